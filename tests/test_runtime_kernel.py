"""The compiled pass against plain torch, bit by bit against itself, and life without a compiler."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_models import make_model, quantized, random_tokens

from inferlab.models.runtime import kernel
from inferlab.models.runtime.cache import Window
from inferlab.models.runtime.decoding import generate
from inferlab.models.runtime.kernel import Kernel, compiled
from inferlab.models.runtime.llama import KERNEL_ROWS, Llama
from inferlab.models.runtime.loading import load_llama

needs_compiler = pytest.mark.skipif(
    compiled() is None, reason="needs a C++ compiler with OpenMP; found none that builds the kernel"
)
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
FORMS = {
    "dense": {},
    "mixed heads": {"num_key_value_heads": 1, "head_dim": 16},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "odd rows": {"vocab_size": 97},
    "qwen3": {"family": "qwen3"},
    "stretched": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 300.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}
WINDOWS = {"full": None, "window": Window(5), "anchored": Window(6, 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose sizes the kernel takes. Read only."""
    return make_model(tmp_path_factory.mktemp("wide"), **WIDE)


def both(folder: Path, dtype: str = "fp32") -> tuple[Llama, Llama]:
    """The model with the kernel, and in plain torch."""
    model = load_llama(folder, dtype)
    assert isinstance(model.kernel, Kernel)
    plain = replace(model, compiled=False)
    assert plain.kernel is None
    return model, plain


def course(model: Llama, dtype: str = "fp32", window: Window | None = None) -> torch.Tensor:
    """Logits of a batch of two that takes 4 columns, half of them padded, then 2, then 2 × 1."""
    cache = model.new_cache(2, 20, dtype, window)
    tokens = random_tokens(2, 8)
    real = torch.tensor([[True] * 4, [False, True, False, True]])
    first = model.forward(tokens[:, :4], cache, real)[real]
    rest = [model.forward(tokens[:, a:b], cache).flatten(0, 1) for a, b in ((4, 6), (6, 7), (7, 8))]
    return torch.cat((first, *rest))


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_model_computes_as_in_torch(form: str, tmp_path: Path) -> None:
    compiled_one, plain = both(make_model(tmp_path / "model", **{**WIDE, **FORMS[form]}))
    torch.testing.assert_close(course(compiled_one), course(plain), rtol=0, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("kind", ["int8", "int8_tensor", "int4", "int4_zero"])
@pytest.mark.parametrize("mapped", [True, False])
def test_every_weight_format_computes_as_in_torch(
    kind: str, mapped: bool, folder: Path, tmp_path: Path
) -> None:
    model = load_llama(quantized(folder, tmp_path / kind, kind, 32), "fp32", mapped)
    assert model.kernel
    plain = replace(model, compiled=False)
    torch.testing.assert_close(course(model), course(plain), rtol=0, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("window", WINDOWS)
def test_every_cache_holds_the_same_as_in_torch(dtype: str, window: str, folder: Path) -> None:
    """A value on the edge between two roundings may fall on either side: one step of the cache."""
    found, expected = (course(one, dtype, WINDOWS[window]) for one in both(folder))
    step = {"fp32": 0.0, "bf16": 2**-8, "int8": 1 / 127}[dtype]
    assert (found - expected).abs().max() <= 1e-4 + 0.2 * step * expected.abs().max()


@needs_compiler
def test_bf16_weights_compute_within_their_rounding(folder: Path) -> None:
    model, _ = both(folder, "bf16")
    exact = course(load_llama(folder, "fp32"))
    assert (course(model) - exact).abs().max() < 0.03 * exact.abs().max()


@needs_compiler
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_verifying_a_draft_is_bit_by_bit_what_decoding_is(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    """So that speculative decoding can promise the same greedy text."""
    model = load_llama(quantized(folder, tmp_path / kind, kind, 32))
    tokens = random_tokens(1, KERNEL_ROWS)
    cache = model.new_cache(1, 20)
    steps = torch.cat([model.forward(one, cache) for one in tokens.split(1, 1)], 1)
    for size in range(1, KERNEL_ROWS + 1):
        cache.truncate(0)
        passes = [model.forward(part, cache) for part in tokens.split(size, 1)]
        assert torch.equal(torch.cat(passes, 1), steps)


@needs_compiler
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_do_not_change_a_bit(threads: int, folder: Path) -> None:
    model, _ = both(folder)
    alone = course(model)
    torch.set_num_threads(threads)
    assert torch.equal(course(model), alone)


@needs_compiler
def test_greedy_text_is_that_of_torch(folder: Path) -> None:
    prompts = [random_tokens(1, length, seed=length)[0].tolist() for length in (3, 9)]
    found, expected = (list(generate(one, prompts, 20, stop_at_end=False)) for one in both(folder))
    assert found == expected


@needs_compiler
def test_a_stand_in_for_attention_is_called(folder: Path) -> None:
    model, _ = both(folder)
    layers = []

    def attend(layer: int, queries: torch.Tensor, *_: Any) -> torch.Tensor:
        layers.append(layer)
        return queries

    model.hidden(random_tokens(1, 1), model.new_cache(1, 4), attend=attend)
    assert layers == [0, 1]


@pytest.mark.parametrize(
    "sizes", [{"head_dim": 8}, {"hidden_size": 40, "head_dim": 32}, {"intermediate_size": 100}]
)
def test_sizes_of_broken_vectors_stay_in_torch(sizes: dict[str, int], tmp_path: Path) -> None:
    model = load_llama(make_model(tmp_path / "model", **{**WIDE, **sizes}), "fp32")
    assert model.kernel is None
    model.forward(random_tokens(1, 2), model.new_cache(1, 4))


def test_groups_of_half_vectors_stay_in_torch(folder: Path, tmp_path: Path) -> None:
    assert load_llama(quantized(folder, tmp_path / "int4", "int4", 16)).kernel is None


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache folder without any library in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def test_without_a_compiler_torch_does_it(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level("INFO"):
        assert compiled.__wrapped__() is None
    assert "no C++ compiler found (g++, c++, clang++): decoding in plain torch" in caplog.text


def test_a_compiler_that_fails_leaves_nothing_behind(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(kernel, "COMPILERS", ("false",))
    assert compiled.__wrapped__() is None
    assert "false cannot build the kernel: decoding in plain torch (no message)" in caplog.text
    assert not list((empty_cache / "inferlab").iterdir())


def test_a_folder_that_cannot_be_made_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kernel._build_folder().is_dir()
