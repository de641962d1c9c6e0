"""Cache sizes against real caches, capacities, the command, and the stage."""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from test_cli import run as run_command
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from inferlab.economics.hardware import gpu_memory
from inferlab.errors import InferlabError
from inferlab.kvcache.architecture import architecture, load_architecture, tensor_bytes
from inferlab.kvcache.capacity import DoesNotFitError, Plan, capacity, weight_bytes
from inferlab.kvcache.shape import CACHE_TYPES, CacheShape
from stages import kv_memory

GIB = 2**30
SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 50, "intermediate_size": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = {"model_type": "llama", **SMALL, **HEADS}
CONFIGS: dict[str, dict[str, Any]] = {
    "grouped": LLAMA,
    "wide heads": LLAMA | {"head_dim": 48},
    "no key for KV heads": {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"},
    "every layer slides": LLAMA | {"model_type": "mistral", "sliding_window": 16},
    "sliding and full": LLAMA | {"model_type": "gemma2", "head_dim": 16, "sliding_window": 8},
    "window that is off": LLAMA | {"model_type": "qwen2", "sliding_window": 8},
    "mixture": LLAMA | {"model_type": "mixtral", "num_local_experts": 3},
    "other names": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4},
    "inside a wrapper": {
        "model_type": "gemma3",
        "text_config": LLAMA | {"model_type": "gemma3_text"},
    },
    "latents": LLAMA
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
}

shapes = st.builds(
    CacheShape,
    query_heads=st.just(8),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    key_dim=st.integers(1, 9),
    value_dim=st.integers(0, 9),
    windows=st.lists(st.none() | st.integers(1, 20), min_size=1, max_size=4).map(tuple),
    context=st.just(64),
)


@pytest.mark.parametrize(
    ("name", "bytes_per_token", "parameters"),
    [
        # Parameters: half the total_size of the published bf16 model.safetensors.index.json.
        ("llama_3_8b", 131_072, 16_060_522_496 / 2),
        ("llama_3_70b", 327_680, 141_107_412_992 / 2),
        ("mixtral_8x7b", 131_072, 93_405_585_408 / 2),
    ],
)
def test_named_models(name: str, bytes_per_token: int, parameters: float) -> None:
    found = load_architecture(name)
    assert found.shape.bytes_per_token("fp16") == bytes_per_token
    assert found.matrices + found.others == parameters


def test_llama_8b_takes_one_gibibyte_at_its_context() -> None:
    shape = load_architecture("llama_3_8b").shape
    assert shape.cache_bytes(8192, "fp16") == GIB
    assert shape.cache_bytes(8192, "fp8", batch=32) == 16 * GIB
    assert shape.cache_bytes(8192, "int8") == GIB * (128 + 4) // 256


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_real_cache_takes_what_is_computed(kind: str) -> None:
    """transformers drops what left a window before the next token comes: window − 1 stay."""
    parsed = AutoConfig.for_model(**CONFIGS[kind])
    shape = architecture(CONFIGS[kind], kind).shape
    if kind == "inside a wrapper":
        parsed = parsed.text_config
    model = AutoModelForCausalLM.from_config(parsed, dtype=torch.float32)
    shortest = min((window for window in shape.windows if window), default=99)
    for length in (5, 40):
        cache = DynamicCache(config=parsed)
        with torch.inference_mode():
            model(torch.zeros(3, length, dtype=torch.long), past_key_values=cache)
        dropped = sum(1 for window in shape.windows if window and length > window)
        assert shortest > 5
        token = (shape.key_dim + shape.value_dim) * shape.kv_heads * 4
        assert tensor_bytes(cache) == shape.cache_bytes(length, "fp32", 3) - 3 * dropped * token


def test_what_the_config_leaves_out_is_named() -> None:
    assert "num_key_value_heads" in architecture(CONFIGS["no key for KV heads"], "x").assumed
    assert architecture(CONFIGS["no key for KV heads"], "x").shape.kv_heads == 4
    assert architecture(CONFIGS["wide heads"], "x").assumed == ()


@given(shapes, st.integers(1, 60), st.integers(1, 5))
def test_bytes_by_counting_numbers(shape: CacheShape, length: int, batch: int) -> None:
    held = 0
    for window in shape.windows:
        kept: list[int] = []
        for token in range(length):
            kept = [*kept, token][-(window or length) :]
        held += len(kept) * shape.kv_heads * (shape.key_dim + shape.value_dim)
    assert shape.cache_bytes(length, "fp16", batch) == 2 * batch * held


@given(shapes, st.sampled_from([1, 2, 4, 8]), st.sampled_from(sorted(CACHE_TYPES)))
def test_gpus_share_the_cache_until_heads_run_out(shape: CacheShape, gpus: int, dtype: str) -> None:
    each, alone = (shape.cache_bytes(30, dtype, gpus=n) for n in (gpus, 1))
    assert each * min(gpus, shape.kv_heads) == alone


@pytest.fixture(scope="module")
def sliding() -> Any:
    return architecture(LLAMA | {"model_type": "gemma2", "head_dim": 16, "sliding_window": 8}, "x")


@given(st.integers(1, 2000), st.integers(1, 40), st.floats(0, 0.5))
def test_largest_is_what_still_fits(sliding: Any, length: int, batch: int, reserve: float) -> None:
    found = capacity(sliding, Plan("l4", "int4", "int8", reserve), 10)
    taken = lambda tokens, count: sliding.shape.cache_bytes(tokens, "int8", count)  # noqa: E731
    most = found.largest_batch(length)
    assert taken(length, most) <= found.room_bytes < taken(length, most + 1)
    longest = found.largest_length(batch * 100_000)
    assert taken(longest, batch * 100_000) <= found.room_bytes
    context = longest == sliding.shape.context
    assert context or found.room_bytes < taken(longest + 1, batch * 100_000)


def test_capacity_by_hand() -> None:
    """Llama-3-8B: 72 GiB − 14.96 GiB of weights hold 57 sequences of 1 GiB; 70B needs two GPUs."""
    small, large = load_architecture("llama_3_8b"), load_architecture("llama_3_70b")
    assert capacity(small, Plan("h100", "fp16", "fp16", 0.1), 8192).largest_batch(8192) == 57
    found = capacity(large, Plan("a100", "fp16", "fp16", 0.1), 8192)
    assert found.gpus == 2
    room = 0.9 * gpu_memory("a100") - weight_bytes(large, "fp16") / 2
    assert found.largest_batch(8192) == int(room // (2.5 * GIB / 2))
    assert capacity(large, Plan("a100", "int4", "fp16", 0.1), 8192).gpus == 1


def test_smaller_types_take_less() -> None:
    found = load_architecture("llama_3_8b")
    sizes = [weight_bytes(found, dtype) for dtype in ("fp32", "bf16", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 2 * sizes[1] == 4 * (found.matrices + found.others)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 10, "num_key_value_heads": 5}, "head_dim is missing and hidden"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "wide"}, "hidden_size must be a whole number above 0; got 'wide'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number above 0; got 0"),
        ({"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
        ({"model_type": "llamas"}, "'llamas' is no causal language model"),
        ({"model_type": "t5"}, "'t5' is no causal language model"),
        ({"model_type": "bert"}, "bert is no decoder alone"),
        ({"model_type": "mamba"}, "layer 0 of mamba keeps more than keys and values"),
        ({"model_type": "qwen3_next"}, "layer 0 of qwen3_next keeps more than keys and values"),
        ({"model_type": "mimo_v2_flash"}, "the cache of mimo_v2_flash takes 1,148,160 bytes"),
        ({"model_type": "falcon", "multi_query": True}, "not .* as keys and values of equal heads"),
        ({"model_type": "jetmoe"}, "transformers fills no cache that its size could be checked by"),
        ({"model_type": "dots1"}, "transformers cannot read it"),
    ],
)
def test_configs_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InferlabError, match=message) as error:
        architecture(LLAMA | change, "c.json")
    assert "\n" not in str(error.value) and str(error.value).startswith("c.json: ")


def test_a_plan_that_does_not_fit_says_what_is_short() -> None:
    large = load_architecture("llama_3_70b")
    with pytest.raises(
        DoesNotFitError, match=r"1 h100: of 72.0 GiB on each, fp16 weights take 131"
    ):
        capacity(large, Plan("h100", "fp16", "fp16", 0.1, gpus=1), 8192)
    with pytest.raises(InferlabError, match="9,000 tokens do not fit the context of llama_3_70b"):
        capacity(large, Plan("h100", "fp16", "fp16", 0.1), 9000)
    with pytest.raises(InferlabError, match=r"3 GPUs cannot share 64 heads .* can be 1, 2, 4"):
        capacity(large, Plan("h100", "fp16", "fp16", 0.1, gpus=3), 8192)


def test_the_command_sizes_a_folder(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 layers, 2 KV heads of 32: 512 bytes a token; 21.6 GiB of an L4 hold 88,474 × 512 tokens."""
    status, output = run_command(
        f"kv {tiny_llama} --length 512 --batch 4 --gpu l4 --weights fp16", monkeypatch, capsys
    )
    assert not status
    assert "512 bytes a token (fp16)" in output
    room = int((0.9 * 24 * GIB - 2 * load_architecture(str(tiny_llama)).others) // 2**18)
    shown = [int(cell.replace(",", "")) for cell in re.findall(r"\d{2},\d{3}", output)]
    assert any(0 <= room - cell < 100 for cell in shown)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("kv", "Missing argument 'CONFIG_OR_NAME'"),
        ("kv llama_3_9b", "no named model; known: llama_3_70b, llama_3_8b, mixtral_8x7b; did you"),
        ("kv llama_3_8b --dtype int3", "unknown cache dtype 'int3'; known: bf16, fp16"),
        ("kv llama_3_8b --weights fp12", "unknown weight dtype 'fp12'; known: bf16"),
        ("kv llama_3_8b --gpu h10", "unknown GPU 'h10'; known: a100"),
        ("kv llama_3_8b --length 8193", "8,193 tokens do not fit the context of llama_3_8b"),
        ("kv llama_3_8b --batch 0", "--batch and --length must be at least 1"),
        ("kv llama_3_8b --reserve-share 1", "--reserve-share must be at least 0 and below 1"),
        ("kv llama_3_8b --tensor-parallel 5", "5 GPUs cannot share 32 heads"),
        ("kv llama_3_70b --tensor-parallel 1 --weights fp16", "does not fit on 1 a100"),
    ],
)
def test_faults_of_the_command_are_one_line(
    arguments: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line, output = run_command(arguments, monkeypatch, capsys)
    assert isinstance(line, str) and line.startswith("inferlab: ") and message in line
    assert "\n" not in line and output == ""


@pytest.mark.smoke
def test_stage(workspace: Path, tiny_llama: Path) -> None:
    shutil.copytree(tiny_llama, "models/base")
    kv_memory.main()
    found = json.loads(Path("metrics/kv_memory.json").read_text())
    assert found["bytes_per_token_llama_3_8b"] == found["bytes_per_token_mixtral_8x7b"] == 131_072
    assert found["bytes_per_token_llama_3_70b"] == 327_680
    assert found["real_cache_difference_bytes"] == 0
    with Path("plots/kv_memory/capacities.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert int(row["largest_batch_1024"]) > int(row["largest_batch_8192"]) > 0
    assert Path("plots/kv_memory/memory.png").stat().st_size > 10_000


@pytest.mark.smoke
def test_stage_refuses_an_unknown_model(workspace: Path) -> None:
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["kv_memory"]["models"] = ["llama_3_9b"]
    Path("params.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit, match="llama_3_9b is no config"):
        kv_memory.main()
    assert not list(Path().rglob("*.json"))


@pytest.mark.slow
def test_vllm_holds_as_many_tokens(tiny_llama: Path) -> None:
    """The engine's own count of blocks for the memory that it was given."""
    from inferlab.serving.engine import EngineParams, serve

    content = yaml.safe_load((Path(__file__).parent.parent / "params.yaml").read_text())
    settings = content["serve_benchmark"]["engine"] | {
        "kv_cache_gib": 0.125,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "extra_arguments": (),
    }
    with serve({"tiny": tiny_llama}, EngineParams(**settings)) as servers:
        text = httpx.get(f"{servers['tiny'].url}/metrics").text
    info = next(line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    blocks, size = (
        int(re.search(rf'{key}="(\d+)"', info)[1]) for key in ("num_gpu_blocks", "block_size")
    )
    block = load_architecture(str(tiny_llama)).shape.cache_bytes(size, "bf16")
    assert blocks == GIB // 8 // block
