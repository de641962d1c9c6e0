"""The compiled pass as it is built for processors with fewer vector instructions than this one."""

import ctypes
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runtime_models import make_model, quantized, random_tokens
from test_runtime_kernel import WIDE, WINDOWS, course

from inferlab.models.runtime.kernel import Kernel, compiled
from inferlab.models.runtime.llama import KERNEL_ROWS, Llama
from inferlab.models.runtime.loading import load_llama

PROCESSORS = {"x86-64-v3": "avx2", "x86-64-v2": "sse4_2"}
"""The compiler's names, of AVX2 without AVX-512 and of neither, and the flag that each needs."""
KINDS = ("fp32", "int8", "int4", "int4_zero")


@pytest.fixture(scope="module", params=PROCESSORS)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The kernel for one of the processors, in the user's cache after the first run."""
    flags = Path("/proc/cpuinfo").read_text() if platform.machine() == "x86_64" else ""
    if PROCESSORS[request.param] not in flags or (found := compiled(request.param)) is None:
        pytest.skip(f"needs a C++ compiler and an x86 processor with {PROCESSORS[request.param]}")
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model whose sizes the kernel takes, in every format of weights. Read only."""
    home = tmp_path_factory.mktemp("kinds")
    found = {"fp32": make_model(home / "fp32", **WIDE)}
    found |= {kind: quantized(found["fp32"], home / kind, kind, 32) for kind in KINDS[1:]}
    return found


def with_library(model: Llama, library: ctypes.CDLL) -> Llama:
    """The model, its pass over few tokens computed by `library`."""
    copy = replace(model)
    copy.__dict__["kernel"] = Kernel(copy, library)
    return copy


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_format_computes_as_in_torch(
    kind: str, library: ctypes.CDLL, folders: dict[str, Path]
) -> None:
    model = load_llama(folders[kind], "fp32")
    found = course(with_library(model, library))
    plain = course(replace(model, compiled=False))
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("window", WINDOWS)
def test_every_cache_holds_the_same_as_in_torch(
    dtype: str, window: str, library: ctypes.CDLL, folders: dict[str, Path]
) -> None:
    model = load_llama(folders["fp32"], "fp32")
    pair = (with_library(model, library), replace(model, compiled=False))
    found, expected = (course(one, dtype, WINDOWS[window]) for one in pair)
    step = {"fp32": 0.0, "bf16": 2**-8, "int8": 1 / 127}[dtype]
    assert (found - expected).abs().max() <= 1e-4 + 0.2 * step * expected.abs().max()


def test_bf16_weights_compute_within_their_rounding(
    library: ctypes.CDLL, folders: dict[str, Path]
) -> None:
    exact = course(load_llama(folders["fp32"], "fp32"))
    found = course(with_library(load_llama(folders["fp32"], "bf16"), library))
    assert 0 < (found - exact).abs().max() < 0.03 * exact.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_verifying_a_draft_is_bit_by_bit_what_decoding_is(
    kind: str, library: ctypes.CDLL, folders: dict[str, Path]
) -> None:
    model = with_library(load_llama(folders[kind]), library)
    tokens = random_tokens(1, KERNEL_ROWS)
    cache = model.new_cache(1, 20)
    steps = torch.cat([model.forward(one, cache) for one in tokens.split(1, 1)], 1)
    for size in range(2, KERNEL_ROWS + 1):
        cache.truncate(0)
        passes = [model.forward(part, cache) for part in tokens.split(size, 1)]
        assert torch.equal(torch.cat(passes, 1), steps)
