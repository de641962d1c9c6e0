"""Peak memory in two parts, the engines' common interface, capacities by feature, and the stage."""

import csv
import json
import math
import mmap
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runtime_models import quantized, random_tokens

from inferlab.errors import InferlabError
from inferlab.kvcache.architecture import load_architecture
from inferlab.kvcache.capacity import Plan, capacity
from inferlab.kvcache.features import Features, load_engine, runtime_arms
from inferlab.kvcache.features_study import (
    MIB,
    MemoryEfficientParams,
    StudyWindow,
    arm_table,
    batch_table,
    decode_speeds,
    score,
)
from inferlab.models.runtime.cache import Window
from inferlab.models.runtime.loading import load_llama
from inferlab.models.runtime.scoring import window_nats
from inferlab.profiling.residence import Residence, anonymous_bytes, peak_residence
from inferlab.store import save_tensors
from stages import memory_efficient

HELD_SECONDS = 0.15
STUDY = ["inferlab.kvcache.features_study"]
"""Imported once, by the process that forks the others: the first call in a session decides."""

WINDOW = Window(16, 2)
PARAMS: dict[str, Any] = {
    "window": StudyWindow(16, 2),
    "heldout_windows": 2,
    "batch": 2,
    "prompt_tokens": 24,
    "new_tokens": 4,
    "rounds": 1,
    "gpu": "l4",
    "models": (),
    "length": 8192,
    "reserve_share": 0.1,
}

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/smaps").is_file(), reason="needs /proc/self/smaps; this system has none"
)


def holding(path: Path, own: int, mapped: int) -> Callable[[], str]:
    """An operation that holds `own` MiB and, after letting go of it, `mapped` MiB of a file."""

    def operation() -> str:
        block = bytearray(os.urandom(MIB)) * own
        time.sleep(HELD_SECONDS)
        del block
        with path.open("rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            assert sum(pages[: mapped * MIB : 4096]) == 0
            time.sleep(HELD_SECONDS)
        return "done"

    return operation


def failing(kind: str) -> Callable[[], None]:
    """An operation that cannot be finished."""

    def operation() -> None:
        if kind == "error":
            raise InferlabError("no such model")
        os._exit(3)

    return operation


@pytest.fixture
def zeros(tmp_path: Path) -> Path:
    """A file of 32 MiB."""
    path = tmp_path / "zeros"
    path.write_bytes(bytes(32 * MIB))
    return path


@needs_proc
def test_each_kind_of_memory_is_seen_at_its_own_peak(zeros: Path) -> None:
    found, result = peak_residence([zeros], holding, zeros, 48, 24, preload=STUDY)
    assert result == "done"
    assert found.anonymous / MIB == pytest.approx(49, abs=4)
    # The kernel maps neighbouring pages along with one that is touched.
    assert 24 <= found.file_backed / MIB < 25


@needs_proc
def test_files_that_are_not_looked_at_do_not_count(zeros: Path, tmp_path: Path) -> None:
    found, _ = peak_residence([tmp_path / "other"], holding, zeros, 1, 24, preload=STUDY)
    assert found.file_backed == 0 and found.anonymous < 8 * MIB


@needs_proc
def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(InferlabError, match=r"^no such model$"):
        peak_residence([], failing, "error", preload=STUDY)
    with pytest.raises(InferlabError, match="memory was measured died with exit code 3"):
        peak_residence([], failing, "death", preload=STUDY)


@needs_proc
def test_anonymous_memory_of_this_process() -> None:
    before = anonymous_bytes(os.getpid())
    # Mapped anew: what the allocator was given back earlier would not show.
    with mmap.mmap(-1, 20 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for place in range(0, len(block), mmap.PAGESIZE):
            block[place] = 1
        assert anonymous_bytes(os.getpid()) - before == pytest.approx(len(block), abs=4 * MIB)


@pytest.fixture(scope="module")
def folders(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model in bf16, and the same in INT8."""
    int8 = tmp_path_factory.mktemp("features") / "int8"
    return {"bf16": tiny_llama, "int8": quantized(tiny_llama, int8, "int8")}


ARMS: dict[str, Features | None] = {"transformers": None, **runtime_arms(WINDOW)}


@pytest.fixture(scope="module")
def engines(folders: dict[str, Path]) -> dict[str, Any]:
    return {name: load_engine(features, folders, 1) for name, features in ARMS.items()}


def test_every_feature_stands_alone_and_all_stand_together() -> None:
    plain = Features()
    arms = runtime_arms(WINDOW)
    assert arms["runtime"] == plain
    names = ("mapped", "int8_weights", "int8_cache", "window")
    for name in names:
        values = {key: getattr(arms[name], key) for key in names}
        assert [key for key, value in values.items() if value] == [name]
    assert all(getattr(arms["all"], name) for name in names)
    assert (arms["all"].weights, arms["all"].cache) == ("int8", "int8")
    assert (plain.weights, plain.cache) == ("bf16", "bf16")


def test_nats_of_a_window_are_those_of_transformers(folders: dict[str, Path]) -> None:
    """In fp32 within rounding; a window of three tokens by the logits of each."""
    from transformers import AutoModelForCausalLM

    tokens = random_tokens(2, 30)
    reference = AutoModelForCausalLM.from_pretrained(folders["bf16"], dtype=torch.float32)
    with torch.inference_mode():
        losses = [float(reference(input_ids=row[None], labels=row[None]).loss) for row in tokens]
    model = load_llama(folders["bf16"], "fp32")
    found = window_nats(model, tokens)
    assert found.tolist() == pytest.approx([29 * loss for loss in losses], rel=1e-5)
    few = tokens[:1, :3]
    logs = model.forward(few, model.new_cache(1, 3))[0].log_softmax(-1)
    by_hand = -float(logs[0, few[0, 1]] + logs[1, few[0, 2]])
    assert float(window_nats(model, few)[0]) == pytest.approx(by_hand, rel=1e-5)


def test_nats_go_through_the_cache_that_is_asked_for(folders: dict[str, Path]) -> None:
    model, tokens = load_llama(folders["bf16"], "fp32"), random_tokens(2, 40)
    full, rounded = window_nats(model, tokens), window_nats(model, tokens, "int8")
    assert 0 < float((full - rounded).abs().max()) < 0.05 * float(full.max())
    bounded = window_nats(model, tokens, window=WINDOW)
    assert float((full - bounded).abs().min()) > 1e-3
    early = [window_nats(model, tokens[:, :16], window=one) for one in (None, WINDOW)]
    torch.testing.assert_close(*early, rtol=1e-6, atol=0)


def test_engines_agree_where_only_the_memory_differs(engines: dict[str, Any]) -> None:
    tokens = random_tokens(2, 40)
    nats = {name: engine.nats(tokens) for name, engine in engines.items()}
    assert torch.equal(nats["mapped"], nats["runtime"])
    for name, expected in nats.items():
        limit = 0.5 if name in ("window", "all") else 0.05
        assert float((expected / nats["transformers"] - 1).abs().max()) < limit, name


def test_a_rewound_engine_decodes_the_same_again(engines: dict[str, Any]) -> None:
    """Also a bounded cache, whose ring has turned over; the token to come is the first again."""
    prompts = random_tokens(2, 30)
    for name, engine in engines.items():
        engine.start(prompts, 8)
        seen = []
        for _ in range(2):
            first = engine._token
            engine.decode(8)
            seen.append((first.tolist(), engine._token.tolist()))
            engine.rewind(8)
        assert seen[0] == seen[1], name


def test_caches_take_what_their_features_say(engines: dict[str, Any]) -> None:
    for engine in engines.values():
        engine.start(random_tokens(2, 120), 8)
    sizes = {name: engine.cache_bytes for name, engine in engines.items()}
    token = 2 * 2 * 2 * 2 * 32  # layers, batch, KV heads, keys and values, numbers
    assert sizes["transformers"] == 2 * token * 120
    assert sizes["runtime"] == sizes["mapped"] == sizes["int8_weights"] == 2 * token * 129
    assert sizes["int8_cache"] == (token + token // 32 * 4) * 129
    assert sizes["window"] == 2 * token * (16 + 64)
    assert sizes["all"] == (token + token // 32 * 4) * (16 + 64)


def test_speeds_are_of_every_engine(engines: dict[str, Any]) -> None:
    found = decode_speeds(engines, random_tokens(1, 20), 3, 1)
    assert list(found) == list(engines) and min(found.values()) > 0


def test_scores_are_means_of_a_token(engines: dict[str, Any]) -> None:
    windows = random_tokens(3, 21)
    found = score(ARMS, engines, windows)
    assert list(found) == list(ARMS)
    for name, nats in found.items():
        torch.testing.assert_close(nats, engines[name].nats(windows) / 20, rtol=2e-3, atol=0)
    assert len({id(nats) for nats in found.values()}) == len(ARMS) - 1  # mapped as runtime


def test_table_by_hand() -> None:
    memory = {name: (Residence(3 * MIB, MIB // 2), 2 * MIB) for name in ARMS}
    nats = {name: torch.full((2,), math.log(8)) for name in ARMS}
    nats["all"] = torch.tensor([math.log(8), math.log(32)])
    rows = {row["arm"]: row for row in arm_table(ARMS, memory, dict.fromkeys(ARMS, 10.04), nats)}
    assert rows["all"] == {
        "arm": "all",
        "anonymous_mib": 3.0,
        "file_backed_mib": 0.5,
        "cache_mib": 2.0,
        "decode_tokens_per_s": 10.0,
        "token_perplexity": 16.0,
        "perplexity_ratio": 2.0,
    }
    assert rows["runtime"]["perplexity_ratio"] == 1.0


def test_largest_batches_by_hand() -> None:
    """0.9 x 24 GiB less the weights, over 8,192 tokens of 131,072 bytes; 256 tokens in a window."""
    params = MemoryEfficientParams(**PARAMS | {"window": StudyWindow(256, 4)})
    rows = batch_table(params.arms(), [load_architecture("llama_3_8b")], params)
    found = {row["arm"]: row["largest_batch"] for row in rows}
    usable, gib = 0.9 * 24, 2**30
    others = 2 * 128_256 * 4096 + 65 * 4096  # embeddings, head and norms stay in 16 bits
    matrices = 8_030_261_248 - others
    sixteen, eight = 2 * 8_030_261_248 / gib, (matrices + 2 * others) / gib
    assert found == {
        "transformers": int(usable - sixteen),
        "runtime": int(usable - sixteen),
        "mapped": int(usable - sixteen),
        "int8_weights": int(usable - eight),
        "int8_cache": int((usable - sixteen) / (132 / 256)),
        "window": int((usable - sixteen) * 32),
        "all": int((usable - eight) * 32 / (132 / 256)),
    }
    assert found["runtime"] == 6 and found["all"] > 100 * found["runtime"]


def test_batches_of_models_that_do_not_fit_or_see_less() -> None:
    """70B does not fit on 24 GB; a length beyond the context is cut to it."""
    params = MemoryEfficientParams(**PARAMS | {"length": 100_000})
    large = batch_table(params.arms(), [load_architecture("llama_3_70b")], params)
    assert {row["largest_batch"] for row in large} == {0}
    small = load_architecture("llama_3_8b")
    rows = batch_table(params.arms(), [small], params)
    assert {row["tokens"] for row in rows} == {8192}
    found = capacity(small, Plan("l4", "bf16", "bf16", 0.1, gpus=1), 8192)
    assert rows[0]["largest_batch"] == found.largest_batch(8192)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 4}, "memory_efficient.batch is 4, but only 3 held-out windows were prepared"),
        ({"heldout_windows": 5}, "memory_efficient.heldout_windows is 5, but only 3 held-out"),
        (
            {"prompt_tokens": 31},
            "memory_efficient.prompt_tokens is 31, but held-out windows have 30 tokens",
        ),
    ],
)
def test_text_that_is_too_short(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InferlabError) as fault:
        MemoryEfficientParams(**PARAMS | change).prompts(random_tokens(3, 30))
    assert message in str(fault.value) and "\n" not in str(fault.value)


def write_project(folders: dict[str, Path], **changes: Any) -> None:
    """In the current folder: parameters, both checkpoints and held-out windows."""
    content = yaml.safe_load(Path("params.yaml").read_text())
    small = {
        "window": {"size": 32, "anchors": 4},
        "heldout_windows": 2,
        "prompt_tokens": 96,
        "new_tokens": 8,
        "rounds": 1,
    }
    content["memory_efficient"] |= small | changes
    content["run"]["threads"] = 1
    Path("params.yaml").write_text(yaml.safe_dump(content))
    for name, folder in (("base", folders["bf16"]), ("int8", folders["int8"])):
        shutil.copytree(folder, Path("models", name))
    Path("data/windows").mkdir(parents=True)
    windows = {"input_ids": random_tokens(2, 128).int()}
    save_tensors(Path("data/windows/heldout.safetensors"), windows)


@pytest.mark.smoke
@needs_proc
def test_stage(workspace: Path, folders: dict[str, Path]) -> None:
    write_project(folders)
    memory_efficient.main()
    found = json.loads(Path("metrics/memory_efficient.json").read_text())
    assert found["largest_batch_all_llama_3_8b"] > found["largest_batch_runtime_llama_3_8b"] == 6
    assert all(math.isfinite(value) and value >= 0 for value in found.values())
    with Path("plots/memory_efficient/arms.csv").open() as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    assert list(rows) == list(ARMS)
    for name, row in rows.items():
        weights = Path("models", "int8" if name in ("int8_weights", "all") else "base")
        size = (weights / "model.safetensors").stat().st_size / MIB
        mapped = float(row["file_backed_mib"])
        if name != "transformers":  # maps its file as well, but lets go of one so small
            least = round(0.9 * size, 1)  # as the table rounds
            assert (mapped >= least) == (name in ("mapped", "all")), name
    assert rows["mapped"]["token_perplexity"] == rows["runtime"]["token_perplexity"]
    assert Path("plots/memory_efficient/features.png").stat().st_size > 10_000


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"window": {"size": 4, "anchors": 4}},
            r"memory_efficient.window: window 4 must be larger than its anchors 4",
        ),
        ({"new_tokens": 65}, r"memory_efficient.new_tokens must be less than or equal to 64"),
        ({"gpu": "l5"}, r"unknown GPU 'l5'; known: a100"),
        ({"models": ["llama_3_9b"]}, r"llama_3_9b is no config"),
        ({"prompt_tokens": 500}, r"memory_efficient.prompt_tokens is 500, but held-out windows"),
    ],
)
def test_stage_refuses(
    changes: dict[str, Any], message: str, workspace: Path, folders: dict[str, Path]
) -> None:
    write_project(folders, **changes)
    with pytest.raises(SystemExit, match=message):
        memory_efficient.main()
    assert not Path("metrics").exists() and not list(Path().rglob("*.partial"))
