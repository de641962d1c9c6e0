"""Whole configurations: parameters, workers, use of the machine, scales, and the stage itself."""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import numpy as np
import psutil
import pytest
import torch
import yaml

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.profiling import processes
from inferlab.profiling.processes import Usage, Watch
from inferlab.serving import end_to_end, engine
from inferlab.serving.end_to_end import EndToEndParams, Round, Running, measure, start
from inferlab.serving.end_to_end_plots import RINGS, plot_radar, scale_for
from inferlab.serving.end_to_end_results import ratios, speeds, table
from inferlab.serving.load import Outcome, Request
from inferlab.serving.worker import Worker, start_workers
from inferlab.store import save_tensors

SECTION = yaml.safe_load(Path("params.yaml").read_text())["end_to_end"]
PAIR = {
    "first": {"engine": "transformers", "variant": "base", "speculative": False},
    "second": {"engine": "vllm", "variant": "int8", "speculative": True},
}
MIB = 2**20


def section(folder: Path, **changes: Any) -> EndToEndParams:
    own = SECTION | ({"reference": "first"} if "configurations" in changes else {})
    file = folder / "params.yaml"
    file.write_text(yaml.safe_dump({"end_to_end": {**own, **changes}}))
    return parameters.load("end_to_end", EndToEndParams, file)


def outcome(chunks: Sequence[float], tokens: int, error: Any = None) -> Outcome:
    return Outcome(0.0, 0.0, chunks[-1], tuple(chunks), 8, tokens, error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"configurations": PAIR | {"second": PAIR["second"] | {"engine": "trt"}}},
            "second.engine must be one of 'transformers', 'vllm', 'runtime'; got 'trt' "
            "(params.yaml: end_to_end.configurations.second.engine)",
        ),
        (
            {"configurations": PAIR | {"first": PAIR["first"] | {"speculative": True}}},
            "first: speculative must be false with transformers; use vllm or runtime",
        ),
        (
            {"configurations": PAIR | {"first": PAIR["first"] | {"dtype": "bf16"}}},
            "first.dtype is not a parameter",
        ),
        ({"configurations": {"first": PAIR["first"]}}, "at least 2"),
        (
            {"reference": "vlm_bf16"},
            "reference 'vlm_bf16' is no configuration; known: runtime_int8, ",
        ),
        ({"configurations": PAIR | {"../x": PAIR["first"]}}, "end_to_end.configurations.../x"),
        (
            {"speculation": {"length": 4, "longest": 2, "shortest": 3}},
            "shortest must be at most longest; got 3 and 2",
        ),
        (
            {"speculation": {"length": 8, "longest": 2, "shortest": 2}},
            "speculation.length must be less than or equal to 7; got 8",
        ),
        ({"input_tokens": 500}, "a request of 520 tokens of input and output is longer than"),
        ({"clients": 1}, "end_to_end.clients must be greater than or equal to 2; got 1"),
        ({"rounds": 0}, "end_to_end.rounds must be greater than or equal to 1; got 0"),
        ({"device": "tpu"}, "end_to_end.device must be one of 'cpu', 'cuda'; got 'tpu'"),
    ],
)
def test_faults_in_the_section(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InferlabError) as caught:
        section(tmp_path, **changes)
    assert message in str(caught.value).replace(f"{tmp_path}/", "")
    assert "\n" not in str(caught.value)


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.mark.usefixtures("nothing_starts")
def test_variant_that_is_no_checkpoint_is_told_before_any_work(
    tmp_path: Path, tiny_llama: Path
) -> None:
    params = section(tmp_path, configurations=PAIR)
    folders = {"first": tiny_llama, "second": tmp_path / "models/int8"}
    with pytest.raises(InferlabError, match=r"models/int8 is no checkpoint: it has no config.json"):
        start(params, folders, 1).__enter__()


@pytest.mark.usefixtures("nothing_starts")
def test_context_that_is_too_short_is_told_before_any_work(
    tmp_path: Path, tiny_llama: Path
) -> None:
    engine_section = SECTION["engine"] | {"max_model_len": 1024}
    params = section(tmp_path, configurations=PAIR, input_tokens=600, engine=engine_section)
    with pytest.raises(InferlabError, match=r"620 tokens .* whose context is 512"):
        start(params, dict.fromkeys(PAIR, tiny_llama), 1).__enter__()


def test_only_the_speculative_server_is_told_to_speculate(tmp_path: Path) -> None:
    params = section(tmp_path)
    arguments = end_to_end._more_arguments(params)
    assert list(arguments) == ["vllm_speculative"]
    [argument] = arguments["vllm_speculative"]
    assert json.loads(argument.removeprefix("--speculative-config=")) == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }


def test_arguments_of_one_server_are_not_those_of_another(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[list[str]] = []

    def note(name: str, model: Path, port: int, settings: Any, log: Path) -> Any:
        lines.append(engine.command(name, model, port, settings))
        return SimpleNamespace(name=name, process=None)

    monkeypatch.setattr(engine, "_launch", note)
    monkeypatch.setattr(engine, "_ready", lambda launch, timeout_s: launch)
    monkeypatch.setattr(engine, "_stop", lambda processes: None)
    settings = section(tmp_path, engine=SECTION["engine"] | {"extra_arguments": ["--seed=1"]})
    models = {"plain": tiny_llama, "other": tiny_llama}
    with engine.serve(models, settings.engine, {"other": ["--more=2"]}):
        pass
    assert [line[-1] for line in lines] == ["--seed=1", "--more=2"]
    assert "--seed=1" in lines[1]


def test_every_configuration_gets_the_same_prompts_in_turn(tmp_path: Path) -> None:
    params = section(tmp_path, configurations=PAIR, single_requests=2, clients=3, rounds=2)
    asked: list[tuple[str, list[Request]]] = []

    def running(name: str) -> Running:
        def put(requests: Sequence[Request]) -> list[Outcome]:
            asked.append((name, list(requests)))
            return [outcome((0.1, 0.2), one.output_tokens) for one in requests]

        return Running(psutil.Process().pid, put)

    stream = np.arange(5000)
    found = measure({name: running(name) for name in PAIR}, stream, params, 0)
    assert [len(found[name]) for name in PAIR] == [2, 2]
    assert [len(one.single) for one in found["first"]] == [2, 2]
    names = [name for name, _ in asked]
    turn = ["first"] * 3 + ["second"] * 3  # two single requests, then all clients at once
    assert names == ["first", "second", *turn, *turn]
    by_name = {name: [batch for who, batch in asked if who == name] for name in PAIR}
    assert by_name["first"] == by_name["second"]
    prompts = [tuple(one.prompt) for batch in by_name["first"] for one in batch]
    assert len(set(prompts)) == len(prompts)


def test_warm_up_that_fails_stops_the_study(tmp_path: Path) -> None:
    params = section(tmp_path, configurations=PAIR)
    bad = Running(psutil.Process().pid, lambda asked: [outcome((0.1,), 0, "cut")] * len(asked))
    with pytest.raises(InferlabError, match=r"'first' failed requests of the warm-up: 4 cut"):
        measure(dict.fromkeys(PAIR, bad), np.arange(5000), params, 0)


def rounds_of(first: float, rates: Sequence[float], gpu: float | None = None) -> list[Round]:
    """Single requests of 11 tokens, first after `first` s and 0.1 s each; loads of 10 tokens."""
    return [
        Round(
            [outcome((first, first + 1.0), 11)],
            [outcome((0.1, 10 / rate), 10)],
            Usage(0.25 * (number + 1), (100 + number) * MIB, gpu),
        )
        for number, rate in enumerate(rates)
    ]


def test_table_by_hand(tmp_path: Path) -> None:
    params = section(tmp_path, configurations=PAIR)
    rounds = {"first": rounds_of(0.5, [10, 20, 40]), "second": rounds_of(0.2, [30, 50, 60])}
    rounds["second"][0].together.append(outcome((0.1,), 0, "timeout"))
    first, second = table(rounds, {"first": 20.0, "second": 20.5}, params)
    assert first == {
        "configuration": "first",
        "engine": "transformers",
        "variant": "base",
        "speculative": 0,
        "ttft_ms": 500.0,
        "decode_tokens_per_s": 10.0,
        "throughput_tokens_per_s": 20.0,
        "throughput_min": 10.0,
        "throughput_max": 40.0,
        "throughput_spread": 1.5,
        "cpu_share": 0.5,
        "memory_mib": 102.0,
        "token_perplexity": 20.0,
        "failed_requests": 0,
    }
    assert (second["speculative"], second["failed_requests"]) == (1, 1)
    assert ratios([first, second], "first") == {
        "throughput_ratio_second": 2.5,
        "token_perplexity_first": 20.0,
        "token_perplexity_second": 20.5,
        "failed_requests": 1,
    }
    timing = speeds([first, second])
    assert timing["ttft_ms_first"] == 500.0
    assert timing["throughput_tokens_per_s_second"] == 50.0


def test_gpu_has_a_column_where_one_was_seen(tmp_path: Path) -> None:
    params = section(tmp_path, configurations=PAIR)
    rounds = dict.fromkeys(PAIR, rounds_of(0.5, [10, 20, 40], gpu=0.75))
    rows = table(rounds, {"first": 20.0, "second": 20.5}, params)
    assert [row["gpu_share"] for row in rows] == [0.75, 0.75]


def test_single_requests_that_all_failed_are_no_measurement(tmp_path: Path) -> None:
    params = section(tmp_path, configurations=PAIR)
    failed = Round([outcome((0.1,), 0, "cut")], [], Usage(0.1, 1, None))
    rounds = {name: [failed] for name in PAIR}
    with pytest.raises(InferlabError, match=r"no request succeeded \(cut: 1\)"):
        table(rounds, {"first": 20.0, "second": 20.5}, params)


BUSY = (
    "import time\nblock = bytearray({size})\nend = time.perf_counter() + 30\nprint(1, flush=True)\n"
)
LOOPS = "while time.perf_counter() < end: pass"
SLEEPS = "time.sleep(30)"


@pytest.fixture
def spawned() -> Iterator[list[subprocess.Popen[str]]]:
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        with process:
            process.kill()


@pytest.mark.parametrize(("work", "busy"), [(LOOPS, True), (SLEEPS, False)])
def test_meter_sees_what_a_tree_uses(
    spawned: list[subprocess.Popen[str]], work: str, busy: bool
) -> None:
    inner = BUSY.format(size=64 * MIB) + work
    outer = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {inner!r}])"
    spawned.append(
        subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True)
    )
    assert spawned[0].stdout is not None
    spawned[0].stdout.readline()  # the block has been filled
    children = psutil.Process(spawned[0].pid).children()
    watch = Watch(spawned[0].pid)
    before = sum(children[0].cpu_times()[:2])
    while busy and sum(children[0].cpu_times()[:2]) - before < 0.1:
        pass
    usage = watch.stop()
    children[0].kill()
    assert 64 * MIB < usage.peak_bytes < 160 * MIB
    assert (usage.cpu_share > 0) is busy
    assert usage.cpu_share <= 1.2  # the kernel counts in ticks of 10 ms


NVML = """
from types import SimpleNamespace

class NVMLError(Exception):
    pass

def nvmlInit():
    if {broken}:
        raise NVMLError

nvmlDeviceGetCount = lambda: 2
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetUtilizationRates = lambda device: SimpleNamespace(gpu=[20, 50][device])
nvmlDeviceGetMemoryInfo = lambda device: SimpleNamespace(used=1000)
"""


@pytest.mark.parametrize(("broken", "share", "taken"), [(False, 0.5, 2000), (True, None, None)])
def test_gpus_are_asked_through_nvml_where_there_are_any(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: bool,
    share: float | None,
    taken: int | None,
) -> None:
    """The busiest one counts; without a driver NVML does not start."""
    (tmp_path / "pynvml.py").write_text(NVML.format(broken=broken))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    own = psutil.Process().pid
    assert Watch(own).stop().gpu_share == share
    assert processes.Meter(own).read(1.0).gpu_bytes == taken
    sys.modules.pop("pynvml", None)


@pytest.mark.parametrize(
    ("values", "more", "centre", "rim"),
    [
        ([330.0, 520.0, 210.0], False, 560, 160),
        ([19.0, 118.0], True, 0, 125),
        ([20.0], True, 19, 21.5),
        ([24.3, 24.31], False, 25.8, 22.8),
    ],
)
def test_scales_hold_all_values_between_round_figures(
    values: list[float], more: bool, centre: float, rim: float
) -> None:
    scale = scale_for(values, more)
    assert all(0 <= scale.place(value) <= 1 for value in values)
    assert (scale.ring(0), scale.ring(RINGS)) == (scale.centre, scale.rim)
    assert (scale.centre, scale.rim) == pytest.approx((centre, rim))
    best = max(values) if more else min(values)
    assert scale.place(best) == max(map(scale.place, values))


def test_radar_of_many_configurations_is_a_picture(tmp_path: Path) -> None:
    row = {
        "configuration": "a_1",
        "ttft_ms": 200.0,
        "decode_tokens_per_s": 20.0,
        "throughput_tokens_per_s": 60.0,
        "cpu_share": 0.9,
        "memory_mib": 900.0,
        "token_perplexity": 20.0,
    }
    other = row | {"configuration": "b", "ttft_ms": 100.0, "memory_mib": 400.0}
    plot_radar([row, other, row, other, row], "b", tmp_path / "radar.png")
    picture = matplotlib.image.imread(tmp_path / "radar.png")
    assert picture.std() > 0.05  # something is drawn
    edge = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
    assert edge.min() == 1.0  # and nothing of it runs over the edge


def tiny_settings(engine_name: str, model: Path) -> dict[str, Any]:
    own = {"engine": engine_name, "model": str(model), "device": "cpu"}
    return own | {"length": 2, "longest": 2, "shortest": 1}


@pytest.mark.smoke
def test_workers_answer_die_and_are_gone(tiny_llama: Path, tmp_path: Path) -> None:
    requests = [Request(list(range(3 + i, 23 + i)), 5) for i in range(3)]
    names = ("transformers", "runtime", "speculative")
    with start_workers({name: tiny_settings(name, tiny_llama) for name in names}, 1) as workers:
        processes_seen = [psutil.Process(worker.pid) for worker in workers.values()]
        for worker in workers.values():
            assert worker.answer() == {}
        for name, worker in workers.items():
            outcomes = worker.put(requests)
            assert len(outcomes) == 3
            for one in outcomes:
                assert (one.error, one.prompt_tokens, one.output_tokens) == (None, 20, 5)
                assert 0 < one.chunks[0] < one.chunks[-1] == one.end
                assert len(one.chunks) == (2 if name == "speculative" else 5)
            # A batch shares its steps; speculation takes one prompt after the other.
            apart = outcomes[0].end <= outcomes[1].chunks[0]
            assert apart == (name == "speculative")
        workers["runtime"].process.kill()
        with pytest.raises(InferlabError, match="the process of 'runtime' died"):
            workers["runtime"].put(requests)
    _, left = psutil.wait_procs(processes_seen, timeout=60)
    assert left == []


@pytest.mark.smoke
def test_worker_that_cannot_load_shows_its_last_lines(tmp_path: Path) -> None:
    with start_workers({"broken": tiny_settings("runtime", tmp_path)}, 1) as workers:
        broken: Worker = workers["broken"]
        with pytest.raises(InferlabError) as caught:
            broken.answer()
    first, *lines = str(caught.value).splitlines()
    assert first == "the process of 'broken' died; its last log lines:"
    assert "is no checkpoint: it has no config.json" in lines[-1]


@pytest.mark.smoke
def test_stage_from_end_to_end(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages import end_to_end as stage

    content = yaml.safe_load(Path("params.yaml").read_text())
    changes = {"input_tokens": 16, "output_tokens": 6, "clients": 2, "rounds": 1}
    kept = ("transformers_bf16", "vllm_speculative", "runtime_int8", "runtime_speculative")
    chosen = {name: SECTION["configurations"][name] | {"variant": "base"} for name in kept}
    engine_section = SECTION["engine"] | {"max_model_len": 64, "kv_cache_gib": 0.1, "threads": 1}
    own = SECTION | changes | {"configurations": chosen, "engine": engine_section}
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(yaml.safe_dump({"run": content["run"], "end_to_end": own}))
    shutil.copytree(tiny_llama, "models/base")
    for folder in ("data/windows", "metrics/evaluate", "metrics/serve_benchmark"):
        Path(folder).mkdir(parents=True)
    Path("metrics/evaluate/base.json").write_text('{"token_perplexity": 20.0}')
    Path("metrics/serve_benchmark/base.json").write_text('{"served_perplexity_ratio": 1.1}')
    stream = torch.randint(3, 100, (500,), generator=torch.manual_seed(0), dtype=torch.int32)
    save_tensors(Path("data/windows/training.safetensors"), {"input_ids": stream})

    stage.main()

    values = json.loads(Path("metrics/end_to_end.json").read_text())
    assert values["failed_requests"] == 0
    assert values["token_perplexity_runtime_int8"] == 20.0
    assert values["token_perplexity_vllm_speculative"] == pytest.approx(22.0)
    assert all(values[f"throughput_ratio_{name}"] > 0 for name in kept[1:])
    timing = json.loads(Path("metrics/timing/end_to_end.json").read_text())
    assert all(timing[f"ttft_ms_{name}"] > 0 for name in kept)
    with Path("plots/end_to_end/configurations.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert {row["configuration"] for row in rows} == set(kept)
    assert all(float(row["memory_mib"]) > 100 for row in rows)
    assert all(float(row["cpu_share"]) >= 0 for row in rows)  # a tiny load takes less than a tick
    assert Path("plots/end_to_end/radar.png").read_bytes().startswith(b"\x89PNG")
