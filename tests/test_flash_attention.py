"""Tiled attention and the Triton kernel against the standard one; memory as measured; the stage."""

import csv
import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inferlab.attention.standard import standard_attention
from inferlab.attention.tiled import forward_tiles, tiled_attention
from inferlab.errors import InferlabError
from inferlab.profiling.memory import peak_allocated, peak_resident
from stages import flash_attention

Attention = Callable[..., Tensor]


def inputs(length: int, keys: int | None = None, heads: int = 2, size: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    lengths = (length, keys or length, keys or length)
    return [torch.randn(2, heads, n, size, generator=generator) for n in lengths]


def gradients(attention: Attention, tensors: list[Tensor], causal: bool) -> tuple[Tensor, ...]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    given = torch.linspace(-1, 1, leaves[0].numel(), dtype=leaves[0].dtype).view_as(leaves[0])
    return torch.autograd.grad(attention(*leaves, causal), leaves, given)


def test_two_tokens_by_hand() -> None:
    """Equal scores: the first token sees its own value, the second the mean of both."""
    zero = torch.zeros(1, 1, 2, 1)
    values = torch.tensor([2.0, 6.0]).view(1, 1, 2, 1)
    for attention in (standard_attention, partial(tiled_attention, query_tile=1, key_tile=1)):
        assert attention(zero, zero, values, True).flatten().tolist() == [2, 4]
        assert attention(zero, zero, values, False).flatten().tolist() == [4, 4]


@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 45), st.integers(1, 45), st.booleans()
)
@settings(deadline=None, max_examples=60)
def test_any_tiles_give_the_standard_result(
    queries: int, keys: int, query_tile: int, key_tile: int, causal: bool
) -> None:
    tensors = inputs(queries, queries if causal else keys)
    tiled = partial(tiled_attention, query_tile=query_tile, key_tile=key_tile)
    exact = standard_attention(*tensors, causal)
    assert torch.allclose(tiled(*tensors, causal), exact, rtol=0, atol=1e-5)
    # In fp64: a gradient sums over all queries, and in fp32 the order of so many terms shows.
    doubles = [tensor.double() for tensor in tensors]
    found = gradients(tiled, doubles, causal)
    for own, one in zip(found, gradients(standard_attention, doubles, causal), strict=True):
        assert torch.allclose(own, one, rtol=0, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_as_torchs_own(causal: bool) -> None:
    tensors = inputs(300, size=64)
    sdpa = F.scaled_dot_product_attention(*tensors, is_causal=causal)
    assert (tiled_attention(*tensors, causal) - sdpa).abs().max() < 1e-5


def test_gradients_by_finite_differences() -> None:
    tensors = [tensor.double().requires_grad_() for tensor in inputs(5, size=3)]
    assert torch.autograd.gradcheck(lambda *t: tiled_attention(*t, True, 2, 3), tensors)


def test_large_scores_do_not_overflow() -> None:
    queries, keys, values = inputs(20)
    found = tiled_attention(1e4 * queries, keys, values, True, 4, 4)
    assert torch.allclose(found, standard_attention(1e4 * queries, keys, values, True), atol=1e-5)


def test_log_sum_exp_of_the_rows() -> None:
    queries, keys, values = inputs(9)
    scores = queries @ keys.transpose(-1, -2) / 4
    _, found = forward_tiles(queries, keys, values, False, 4, 2)
    assert torch.allclose(found, scores.logsumexp(-1), atol=1e-5)


def test_memory_does_not_grow_with_the_square() -> None:
    tensors = inputs(1024, size=32)
    with torch.inference_mode():
        standard, _ = peak_allocated(lambda: standard_attention(*tensors, True))
        tiled, _ = peak_allocated(lambda: tiled_attention(*tensors, True, 64, 64))
    assert standard > 2 * 4 * 1024 * 1024 * 4
    assert tiled < standard / 10


def test_peak_of_allocations_by_hand() -> None:
    """Two tensors of 4 KiB at once, a third only after the first is gone."""

    def operation() -> Tensor:
        first = torch.ones(1024)
        second = first + 1
        del first
        return second * 2

    peak, result = peak_allocated(operation)
    assert 2 * 4096 <= peak < 2 * 4096 + 64  # and the numbers 1 and 2 as tensors
    assert result[0] == 4


def hold(mebibytes: int) -> Callable[[], Tensor]:
    return lambda: torch.ones(mebibytes, 2**18)


@pytest.mark.smoke
def test_resident_peak_is_what_is_held() -> None:
    assert 64 <= peak_resident(hold, 64) / 2**20 < 80


@pytest.mark.parametrize("attention", [standard_attention, tiled_attention])
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3, 4), (2, 3, 4), (2, 3, 4)), r"must be \[batch, heads, tokens, head_dim\]"),
        (((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 5, 4)), "keys and values alike"),
        (((1, 2, 3, 4), (1, 1, 3, 4), (1, 1, 3, 4)), "batch, heads and head_dim .* differ"),
        (((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 5)), "batch, heads and head_dim .* differ"),
        (((1, 2, 3, 4), (1, 2, 6, 4), (1, 2, 6, 4)), "causal attention needs a key for each"),
    ],
)
def test_shapes_that_do_not_match(
    attention: Attention, shapes: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(InferlabError, match=message):
        attention(*(torch.zeros(shape) for shape in shapes), True)


@pytest.mark.parametrize("tile", [0, -4])
def test_tiles_must_be_positive(tile: int) -> None:
    with pytest.raises(InferlabError, match=f"query_tile must be at least 1; got {tile}"):
        tiled_attention(*inputs(4), True, query_tile=tile)
    with pytest.raises(InferlabError, match=f"key_tile must be at least 1; got {tile}"):
        tiled_attention(*inputs(4), True, key_tile=tile)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process where Triton interprets: it has to be told before anything imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            yield pool


def kernel_differences(queries: int, keys: int, causal: bool) -> list[float]:
    """Largest differences of output and gradients between the Triton and the standard attention."""
    from inferlab.attention.triton_kernel import triton_attention

    tensors = inputs(queries, keys)
    kernel = partial(triton_attention, query_tile=32, key_tile=16)
    found, exact = (
        (attention(*tensors, causal), *gradients(attention, tensors, causal))
        for attention in (kernel, standard_attention)
    )
    return [float((own - one).abs().max()) for own, one in zip(found, exact, strict=True)]


def kernel_message(size: int, tile: int) -> str:
    from inferlab.attention.triton_kernel import triton_attention

    with pytest.raises(InferlabError) as error:
        triton_attention(*inputs(20, size=size), True, query_tile=tile)
    return str(error.value)


@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(70, 70, True), (32, 32, True), (40, 19, False)]
)
def test_triton_kernel(
    interpreter: ProcessPoolExecutor, queries: int, keys: int, causal: bool
) -> None:
    differences = interpreter.submit(kernel_differences, queries, keys, causal).result()
    assert len(differences) == 4 and max(differences) < 1e-5


@pytest.mark.parametrize(
    ("size", "tile", "message"), [(16, 48, "query_tile"), (24, 16, "head_dim")]
)
def test_triton_wants_powers_of_two(
    interpreter: ProcessPoolExecutor, size: int, tile: int, message: str
) -> None:
    found = interpreter.submit(kernel_message, size, tile).result()
    assert found.startswith(f"{message} must be a power of 2, at least 16; got ")


@pytest.mark.smoke
def test_stage(workspace: Path) -> None:
    content = yaml.safe_load(Path("params.yaml").read_text())
    small = {"heads": 2, "lengths": [64, 128], "backward_length": 64, "swept_tiles": [16, 32]}
    content["flash_attention"] |= small | {"query_tile": 16, "key_tile": 16, "repeats": 1}
    Path("params.yaml").write_text(yaml.safe_dump(content))
    flash_attention.main()
    found = json.loads(Path("metrics/flash_attention.json").read_text())
    assert found["max_error_tiled"] < 1e-5 and found["max_gradient_error_tiled"] < 1e-5
    assert found["peak_mib_tiled_128"] < found["peak_mib_standard_128"]
    with Path("plots/flash_attention/tiles.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4
    assert Path("plots/flash_attention/flash.png").stat().st_size > 10_000
