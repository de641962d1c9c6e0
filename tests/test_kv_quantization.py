"""Formats of the cache by hand and against the runtime's own INT8; what is refused."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from heldout_text import set_params
from hypothesis import given
from hypothesis import strategies as st
from runtime_models import make_model, random_tokens

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.kvcache.quantization_study import (
    KvQuantizationParams,
    error_table,
    metrics,
    run_arms,
    take_tokens,
    token_bytes,
)
from inferlab.kvcache.rounded_cache import Arm, rounded_states, turned
from inferlab.kvcache.rounding import FORMATS, head_errors, int8_codes, store
from inferlab.kvcache.scoring import score
from inferlab.models.runtime.cache import KVCache, quantize_heads
from inferlab.models.runtime.llama import Llama
from inferlab.models.runtime.loading import load_llama
from inferlab.store import save_tensors
from stages import kv_quantization

EIGHT = [name for name in FORMATS if name.startswith("int8")]
FINER = [
    ("int8_head", "int8_tensor"),
    ("int8_token", "int8_tensor"),
    ("int8_channel", "int8_head"),
    ("int8_token_head", "int8_head"),
    ("int8_token_head", "int8_token"),
]
PARAMS = KvQuantizationParams(
    tokens=48, inputs=2, formats=tuple(FORMATS)[1:], before_rope=("int8_tensor",), apart="int8_head"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    return load_llama(make_model(tmp_path_factory.mktemp("llama")), "fp32")


def test_codes_by_hand() -> None:
    """One head, two tokens: scales of 1/127 and 2/127 a token, 2/127 for all."""
    vectors = torch.tensor([[[[1.0, -0.5], [2.0, 0.01]]]])
    codes, scale = int8_codes(vectors, (-1,))
    assert codes.tolist() == [[[[127, -64], [127, 1]]]]
    assert scale.flatten().tolist() == pytest.approx([1 / 127, 2 / 127])
    assert int8_codes(vectors, (-3, -2, -1))[0].tolist() == [[[[64, -32], [127, 1]]]]
    assert int8_codes(torch.zeros(1, 1, 1, 2), (-1,))[1].tolist() == [[[[1.0]]]]


def test_scale_a_token_and_head_is_the_runtimes() -> None:
    vectors = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    codes, scale = quantize_heads(vectors)
    restored = store(vectors, "int8_token_head").restored
    torch.testing.assert_close(restored, codes * scale[..., None])


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        ("int8_tensor", 2),
        ("int8_head", 2 * 3),
        ("int8_token", 2 * 5),
        ("int8_token_head", 2 * 3 * 5),
        ("int8_channel", 2 * 3 * 8),
    ],
)
def test_bytes_are_codes_and_scales(dtype: str, scales: int) -> None:
    """Each of the two sequences has scales of its own."""
    vectors = torch.ones(2, 3, 5, 8)
    assert store(vectors, dtype).bytes == vectors.numel() + 4 * scales
    assert store(vectors, "fp16").bytes == store(vectors, "bf16").bytes == 2 * vectors.numel()


@given(st.integers(0, 2**16), st.floats(0.01, 100), st.sampled_from(EIGHT))
def test_error_is_at_most_half_a_step(seed: int, factor: float, dtype: str) -> None:
    vectors = factor * torch.randn(1, 3, 6, 4, generator=torch.Generator().manual_seed(seed))
    error = (store(vectors, dtype).restored - vectors).abs()
    assert error.max() <= vectors.abs().max() / 127 / 2 * (1 + 1e-5)


@pytest.mark.parametrize(("finer", "coarser"), FINER)
def test_finer_scales_lose_less_where_sizes_differ(finer: str, coarser: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [torch.rand(shape, generator=generator) * 9 + 1 for shape in ((3, 1, 1), (64, 1), (8,))]
    vectors = torch.randn(1, 3, 64, 8, generator=generator) * sizes[0] * sizes[1] * sizes[2]
    errors = [head_errors(vectors, store(vectors, dtype).restored) for dtype in (finer, coarser)]
    assert errors[0].mean() < 0.9 * errors[1].mean()


def test_head_errors_by_hand() -> None:
    vectors = torch.tensor([[[[3.0, 4.0]], [[1.0, 0.0]]]])
    restored = torch.tensor([[[[3.0, 3.0]], [[1.0, 0.0]]]])
    assert head_errors(vectors, restored).tolist() == [[pytest.approx(0.2), 0.0]]


def test_turning_back_undoes_the_rotation(model: Llama) -> None:
    keys = torch.randn(1, 2, 30, 8, generator=torch.Generator().manual_seed(0))
    rope = model.config.rope
    torch.testing.assert_close(turned(turned(keys, rope), rope, back=True), keys)
    assert (turned(keys, rope)[0, 0, 5] - keys[0, 0, 5]).abs().max() > 0.1


def test_one_pass_is_what_the_runtimes_int8_cache_computes(model: Llama) -> None:
    tokens = random_tokens(2, 40)
    found, _ = rounded_states(model, tokens, Arm("int8_token_head", "int8_token_head"))
    expected = model.hidden(tokens, model.new_cache(2, 40, "int8"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_exact_cache_is_the_runtimes(model: Llama) -> None:
    tokens = random_tokens(2, 40)
    expected = model.hidden(tokens, model.new_cache(2, 40))
    for before_rope in (False, True):
        found, _ = rounded_states(model, tokens, Arm("fp32", "fp32", before_rope))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_captured_cache_and_bytes(model: Llama) -> None:
    tokens = random_tokens(2, 48)
    scores, captured = run_arms(model, tokens, PARAMS)
    cache = KVCache(model.config, 2, 48, "fp32")
    model.hidden(tokens, cache)
    torch.testing.assert_close(captured.keys, cache.keys[..., :48, :])
    torch.testing.assert_close(captured.values, cache.values[..., :48, :])
    own = token_bytes(captured.keys, "int8_token_head")
    held = KVCache(model.config, 2, 48, "int8")
    assert 2 * own * 2 * (48 + 1) == held.bytes
    assert scores["fp32"].kl() == 0
    assert 0 < scores["fp16"].kl() < scores["bf16"].kl() < scores["int8_tensor"].kl()
    rows = [{"arm": name, "token_perplexity": 2.0, "kl_nats": 0.1} for name in PARAMS.arms]
    assert len(metrics(rows, PARAMS)) == 8 + 5
    errors = {(r["tensor"], r["format"]): r for r in error_table(captured, PARAMS, 0)}
    assert len(errors) == 4 * 7
    for finer, coarser in FINER:
        for kind in ("keys", "values"):
            assert errors[kind, finer]["relative_error"] < errors[kind, coarser]["relative_error"]


def test_rounding_keys_and_values_apart_adds_up(model: Llama) -> None:
    """Each alone loses something, less than both."""
    tokens = random_tokens(2, 48)
    arms = {"both": ("int8_head",) * 2, "keys": ("int8_head", "fp32"), "v": ("fp32", "int8_head")}
    states = {name: rounded_states(model, tokens, Arm(*pair))[0] for name, pair in arms.items()}
    states["fp32"] = rounded_states(model, tokens, Arm("fp32", "fp32"))[0]
    found = {name: own.kl() for name, own in score(model, states, tokens, "fp32").items()}
    assert min(found["keys"], found["v"]) > 0 and max(found["keys"], found["v"]) < found["both"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"formats": ["int8_heads"]},
            "formats: unknown dtype of the cache 'int8_heads'; .*_head?",
        ),
        ({"before_rope": ["int4"]}, "before_rope: unknown dtype of the cache 'int4'; known: bf16"),
        ({"apart": "fp61"}, "apart: unknown dtype of the cache 'fp61'; .*did you mean fp"),
        ({"tokens": 1}, "tokens must be greater than or equal to 2; got 1"),
    ],
)
def test_parameters_that_are_refused(workspace: Path, changes: Any, message: str) -> None:
    set_params("kv_quantization", **changes)
    with pytest.raises(InferlabError, match=message) as error:
        parameters.load("kv_quantization", KvQuantizationParams)
    assert "\n" not in str(error.value)


def test_what_does_not_fit_is_refused(model: Llama) -> None:
    with pytest.raises(InferlabError, match="unknown dtype of the cache 'int7'; known: bf16"):
        Arm("int7", "fp32")
    with pytest.raises(InferlabError, match=r"kv_quantization.inputs is 2, but .* cut 1 windows"):
        take_tokens(torch.zeros(1, 48), PARAMS)
    with pytest.raises(InferlabError, match=r"kv_quantization.tokens is 48, .*; take 47 or less"):
        take_tokens(torch.zeros(2, 47), PARAMS)
    with pytest.raises(InferlabError, match="257 positions do not fit the model's context of 256"):
        rounded_states(model, random_tokens(1, 257), Arm("fp32", "fp32"))


@pytest.mark.smoke
def test_stage(workspace: Path, tiny_llama: Path) -> None:
    shutil.copytree(tiny_llama, "models/base")
    Path("data/windows").mkdir(parents=True)
    windows = {"input_ids": random_tokens(2, 64, vocabulary=512).int()}
    save_tensors(Path("data/windows/heldout.safetensors"), windows)
    set_params("kv_quantization", tokens=64)
    kv_quantization.main()
    found = json.loads(Path("metrics/kv_quantization.json").read_text())
    assert found["kl_nats_int8_token_head"] < found["kl_nats_int8_tensor"]
    with Path("plots/kv_quantization/arms.csv").open() as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    assert float(rows["bf16"]["bytes_per_token"]) == 2 * 2 * 2 * 32 * 2
    assert float(rows["int8_token_head"]["bytes_per_token"]) == 2 * 2 * 2 * (32 + 4)
    assert Path("plots/kv_quantization/heads.csv").read_text().count("\n") == 1 + 2 * 2 * 3 * 5
    assert Path("plots/kv_quantization/heads.png").stat().st_size > 10_000


@pytest.mark.smoke
def test_stage_refuses_more_than_the_context(workspace: Path, tiny_llama: Path) -> None:
    shutil.copytree(tiny_llama, "models/base")
    with pytest.raises(SystemExit, match=r"kv_quantization.tokens is 1024, but .* context is 512"):
        kv_quantization.main()
    assert not Path("metrics").exists()
