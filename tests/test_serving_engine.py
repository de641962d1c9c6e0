"""The server process: refused before it starts, or started and surely gone afterwards."""

import asyncio
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.serving import engine as engines
from inferlab.serving import experiment, load, watchdog
from inferlab.serving.engine import EngineParams, Server, serve
from inferlab.serving.load import ErrorKind, Outcome, Request, Target

ROOT = Path(__file__).parent.parent
PATIENCE_SECONDS = 60.0


@pytest.fixture
def engine() -> EngineParams:
    """The pipeline's own settings, for a model of a tiny context."""
    whole = parameters.load("serve_benchmark.engine", EngineParams)
    return dataclasses.replace(whole, max_model_len=64, kv_cache_gib=0.1, threads=1)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Passes for a checkpoint until somebody loads it."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    # An empty safetensors file: the length of its header, and the header.
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(engines.subprocess, "Popen", start)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < limit, f"waited in vain until {what}"
        time.sleep(0.05)


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def assert_gone(processes: list[psutil.Process]) -> None:
    """Ended soon; one that only waits for init to collect it counts as ended."""
    _, left = psutil.wait_procs(processes, timeout=PATIENCE_SECONDS)
    assert [one for one in left if one.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.usefixtures("nothing_starts")
def test_taken_port_is_told_before_any_work(checkpoint: Path, engine: EngineParams) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = dataclasses.replace(engine, port=port)
        with pytest.raises(InferlabError, match=f"port {port} on 127.0.0.1 is taken"):
            serve({"tiny": checkpoint}, settings).__enter__()


@pytest.mark.usefixtures("nothing_starts")
def test_context_too_short_is_told_before_any_work(checkpoint: Path, engine: EngineParams) -> None:
    settings = dataclasses.replace(engine, max_model_len=65)
    with pytest.raises(InferlabError, match=r"65 tokens .* whose context is 64; lower max_model"):
        serve({"tiny": checkpoint}, settings).__enter__()


@pytest.mark.usefixtures("nothing_starts")
def test_no_checkpoint_is_told_before_any_work(tmp_path: Path, engine: EngineParams) -> None:
    with pytest.raises(InferlabError, match="is no checkpoint"):
        serve({"tiny": tmp_path}, engine).__enter__()


def test_servers_listen_on_loopback_and_get_every_setting(engine: EngineParams) -> None:
    settings = dataclasses.replace(
        engine,
        tensor_parallel=2,
        pipeline_parallel=3,
        prefix_caching=False,
        extra_arguments=("--seed=1",),
    )
    line = engines.command("tiny", Path("models/tiny"), 8000, settings)
    for argument in (
        "--host=127.0.0.1",
        "--port=8000",
        "--served-model-name=tiny",
        "--max-model-len=64",
        "--tensor-parallel-size=2",
        "--pipeline-parallel-size=3",
        "--no-enable-prefix-caching",
        "--seed=1",
    ):
        assert argument in line


def engine_sections() -> list[str]:
    """Every stage of params.yaml that has a section of a server."""
    content = yaml.safe_load((ROOT / "params.yaml").read_text())
    return [name for name, one in content.items() if "tensor_parallel" in one.get("engine", {})]


def test_the_serving_stages_have_a_section_of_the_server() -> None:
    assert {"serve_benchmark", "step_cost"} <= set(engine_sections())


@pytest.mark.parametrize("stage", engine_sections())
def test_every_stage_passes_parallelism_on(stage: str, tmp_path: Path) -> None:
    content = yaml.safe_load((ROOT / "params.yaml").read_text())[stage]["engine"]
    file = tmp_path / "params.yaml"
    for tensor, pipeline in ((1, 1), (2, 1), (1, 2), (4, 2)):
        changed = content | {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
        file.write_text(yaml.safe_dump({stage: {"engine": changed}}))
        settings = parameters.load(f"{stage}.engine", EngineParams, file)
        line = engines.command("tiny", Path("models/tiny"), 8000, settings)
        assert f"--tensor-parallel-size={tensor}" in line
        assert f"--pipeline-parallel-size={pipeline}" in line
        # One worker may live in the engine's process; several may not.
        alone = engines.environment(settings).get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
        assert alone == (tensor * pipeline == 1)


def test_activations_beside_int4_weights_have_the_bits_that_were_asked_for(
    engine: EngineParams,
) -> None:
    for bits, flag in ((8, "1"), (16, "0")):
        settings = dataclasses.replace(engine, int4_activation_bits=bits)
        assert engines.environment(settings)["VLLM_CPU_INT4_W4A8"] == flag


def test_several_servers_get_ports_of_their_own() -> None:
    assert len(set(engines._ports(0, 20))) == 20


# The shell leaves a child behind that ignores SIGTERM, as a crashed server would.
STUBBORN = ["sh", "-c", "sh -c 'trap \"\" TERM; while :; do sleep 1; done' & sleep 1000"]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_however_the_parent_ends_the_whole_group_goes(end: signal.Signals) -> None:
    code = f"""
        import signal, subprocess, sys, time
        # A shell's background job, and what it starts, would ignore SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        command = [sys.executable, "-m", "{watchdog.__name__}", "0.5", *{STUBBORN!r}]
        subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        time.sleep(1000)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.DEVNULL
    )
    wait_until(lambda: len(descendants(parent.pid)) >= 4, "the stubborn command has started")
    group = descendants(parent.pid)
    parent.send_signal(end)
    parent.wait(PATIENCE_SECONDS)
    assert_gone(group)


def test_a_command_that_ends_takes_what_it_left_behind() -> None:
    command = [sys.executable, "-m", watchdog.__name__, "0.5", "sh", "-c", "sleep 999 & exit 3"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    ) as process:
        assert process.stdout is not None
        # The end of the output means that nobody holds it any more, `sleep` included.
        assert process.stdout.read() == "exit status 3\n"


@pytest.mark.smoke
def test_server_that_dies_while_loading_shows_its_last_lines(
    checkpoint: Path, engine: EngineParams
) -> None:
    with pytest.raises(InferlabError) as caught:
        serve({"broken": checkpoint}, engine).__enter__()
    first, *lines = str(caught.value).splitlines()
    assert first == "the server of 'broken' died while loading; its last log lines:"
    assert lines[-1] == "  | exit status 1"
    assert any("Error" in line for line in lines)


@pytest.mark.smoke
def test_sigkill_of_the_stage_leaves_no_server_behind(tiny_llama: Path, tmp_path: Path) -> None:
    section = yaml.safe_load(Path("params.yaml").read_text())["serve_benchmark"]["engine"]
    section |= {"max_model_len": 64, "kv_cache_gib": 0.1, "threads": 1}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"engine": section}))
    code = f"""
        from pathlib import Path
        from inferlab import params
        from inferlab.serving.engine import EngineParams, serve
        with serve({{"tiny": Path({str(tiny_llama)!r})}}, params.load("engine", EngineParams)):
            pass
    """
    stage = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path)
    # The watchdog, the front end and the engine itself.
    wait_until(lambda: len(descendants(stage.pid)) >= 3, "the engine has started")
    processes = descendants(stage.pid)
    stage.kill()
    stage.wait()
    assert_gone(processes)


@pytest.mark.smoke
def test_real_server_answers_refuses_and_breaks_off(tiny_llama: Path, engine: EngineParams) -> None:
    def run(requests: list[Request], concurrency: int) -> list[Outcome]:
        return asyncio.run(load.closed_loop(target, requests, concurrency))

    with serve({"tiny": tiny_llama}, engine) as servers:
        server = servers["tiny"]
        target = Target(server.url, server.name)
        processes = [psutil.Process(server.pid), *descendants(server.pid)]
        good = [Request(list(range(3 + i, 23 + i)), 8) for i in range(6)]
        for outcome in run(good, 3):
            assert outcome.error is None
            assert (outcome.prompt_tokens, outcome.output_tokens) == (20, 8)
        # vLLM refuses a prompt over its limit, and cuts the output where both are over it together.
        too_long = [Request([3] * 80, 8), Request([3] * 50, 32)]
        kinds = [outcome.error for outcome in run([*good[:1], *too_long], 1)]
        assert kinds == [None, "http_4xx", "short"]

        async def break_off() -> list[Outcome]:
            sending = asyncio.create_task(load.closed_loop(target, [Request([3], 63)] * 400, 4))
            await asyncio.sleep(1.0)
            os.killpg(server.pid, signal.SIGKILL)
            return await sending

        kinds = [outcome.error for outcome in asyncio.run(break_off())]
        assert set(kinds) <= {None, "cut", "connect"}
        assert "cut" in kinds
        assert kinds[-1] == "connect"
    assert_gone(processes)


def write_project(model: Path, **changes: object) -> None:
    """In the current folder: parameters of a short benchmark of `model`, and text for prompts."""
    import torch

    from inferlab.store import save_tensors

    content = yaml.safe_load((ROOT / "params.yaml").read_text())
    section = content["serve_benchmark"] | {
        "variants": ["base"],
        "concurrency": [1, 2],
        "input_tokens": [8, 16],
        "output_tokens": [4, 8],
        "middle": {"concurrency": 2, "input_tokens": 8, "output_tokens": 4},
        "prefill": {"concurrency": 1, "input_tokens": 16, "output_tokens": 1},
        "decode": {"concurrency": 2, "input_tokens": 4, "output_tokens": 8},
    }
    section["engine"] |= {"max_model_len": 64, "kv_cache_gib": 0.1, "threads": 1}
    section["engine"]["dtype"] = "float32"
    Path("params.yaml").write_text(
        yaml.safe_dump({"run": content["run"], "serve_benchmark": section | changes})
    )
    shutil.copytree(model, "models/base")
    Path("data/windows").mkdir(parents=True)
    stream = torch.randint(3, 100, (500,), generator=torch.manual_seed(0), dtype=torch.int32)
    save_tensors(Path("data/windows/training.safetensors"), {"input_ids": stream})
    windows = torch.randint(3, 100, (3, 20), generator=torch.manual_seed(1), dtype=torch.int32)
    sizes = {"words": torch.full((3,), 10), "bytes": torch.full((3,), 40)}
    save_tensors(Path("data/windows/heldout.safetensors"), {"input_ids": windows, **sizes})


def evaluate(model: Path) -> None:
    """What the stage evaluate leaves of the perplexity of the project's windows."""
    import torch
    from transformers import AutoModelForCausalLM

    from inferlab.evaluation.perplexity import perplexity
    from inferlab.store import load_tensors

    windows = load_tensors(Path("data/windows/heldout.safetensors"))
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = perplexity(exact, windows, batch=2).by_window()
    Path("plots/evaluate").mkdir(parents=True)
    lines = [
        "window,token_perplexity",
        *(f"{n},{row['token_perplexity']}" for n, row in enumerate(rows)),
    ]
    Path("plots/evaluate/base.csv").write_text("\n".join(lines))


@pytest.mark.smoke
def test_stage_from_end_to_end(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages import serve_benchmark

    monkeypatch.chdir(tmp_path)
    write_project(tiny_llama, scored_windows=2)
    evaluate(tiny_llama)

    serve_benchmark.main()

    values = json.loads(Path("metrics/serve_benchmark/base.json").read_text())
    for n in (1, 2):
        assert values[f"output_tokens_per_s_c{n}"] > 0
        assert 0 < values[f"ttft_ms_p50_c{n}"] <= values[f"ttft_ms_p95_c{n}"]
    assert values["failed_requests"] == 0
    # Both compute in 32 bits, so they agree to the last few digits.
    assert values["served_perplexity_ratio"] == pytest.approx(1, abs=1e-6)
    assert values["decode_concurrency"] in (1, 2)
    assert min(values["prefill_tokens_per_s"], values["decode_tokens_per_s"]) > 0
    assert json.loads(Path("metrics/timing/serve_benchmark.json").read_text())["seconds"] > 0
    for axis in ("concurrency", "input_tokens", "output_tokens"):
        assert len(Path(f"plots/serve_benchmark/{axis}.csv").read_text().splitlines()) == 3
        assert Path(f"plots/serve_benchmark/{axis}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.smoke
def test_server_killed_in_the_middle_of_a_benchmark_fails_the_stage(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures are counted, the log's last lines are told, nothing is published, nothing left."""
    from stages import serve_benchmark

    processes: list[psutil.Process] = []

    def measure(servers: dict[str, Server], *arguments: Any) -> Any:
        processes.extend(descendants(servers["base"].pid))
        threading.Timer(1.0, processes[0].kill).start()
        return experiment.measure(servers, *arguments)

    monkeypatch.chdir(tmp_path)
    write_project(tiny_llama, rounds=1000, scored_windows=0)
    monkeypatch.setattr(serve_benchmark, "measure", measure)
    with pytest.raises(SystemExit) as caught:
        serve_benchmark.main()
    first, *lines = str(caught.value).splitlines()
    form = (
        r"inferlab: the server of 'base' died, and of \d+ requests failed (\d+ \w+(, )?)+; its last"
    )
    assert re.match(form, first)
    assert lines[-1] == "  | exit status -9"
    assert_gone(processes)
    assert not [path for path in Path().rglob("*") if ".partial" in path.name]
    assert not list(Path().glob("metrics/**/*.json"))


def outcome(error: ErrorKind | None) -> Outcome:
    return Outcome(0.0, 0.0, 1.0, (1.0,), 4, 1, error)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Passes for a server that ends when its standard input does."""
    log = tmp_path / "server.log"
    log.write_text("".join(f"line {number}\n" for number in range(40)))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        yield Server("tiny", "http://127.0.0.1:1", process.pid, 0.0, process, log)


def test_failures_of_a_living_server_are_only_counted(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "END_SECONDS", 0.05)
    experiment.require_alive(server, [outcome(None), outcome("http_5xx"), outcome("cut")])


def test_failures_of_a_server_that_ended_are_an_error(server: Server) -> None:
    assert server.process.stdin is not None
    server.process.stdin.close()
    experiment.require_alive(server, [outcome(None)])
    failed = [outcome("cut"), outcome("connect"), outcome(None), outcome("cut")]
    with pytest.raises(InferlabError) as caught:
        experiment.require_alive(server, failed)
    first, *lines = str(caught.value).splitlines()
    assert first == (
        "the server of 'tiny' died, and of 4 requests failed 2 cut, 1 connect; its last log lines:"
    )
    assert lines[-1] == "  | line 39"
