"""Affine quantization: cases by hand, the bound of half a step, and what a search may promise."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inferlab.errors import InferlabError
from inferlab.quantization.affine import (
    SEARCH_FLOOR,
    SEARCH_STEPS,
    Grid,
    Quantized,
    minmax_grid,
    quantize,
    resolve_group_size,
    searched_grid,
)

GRIDS = st.tuples(st.sampled_from([2, 3, 4, 8]), st.sampled_from([4, 8, 16]), st.booleans())


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """[rows, 16] of normal values on scales from 1e-4 to 1e3, some rows one-sided, some zero."""
    seed, rows = draw(st.integers(0, 2**31)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, 16, generator=generator)
    kinds = st.sampled_from([values, values.abs(), -values.abs(), values * 0])
    scales = [10.0 ** draw(st.integers(-4, 3)) for _ in range(rows)]
    return torch.stack([draw(kinds)[row] * scale for row, scale in enumerate(scales)])


def test_symmetric_by_hand() -> None:
    weight = torch.tensor([[-3.0, -0.8, 0.9, 3.0]])
    grid = minmax_grid(weight, 2, 4, symmetric=True)
    assert grid.scale.tolist() == [[2.0]]  # 2·3 / (2² − 1)
    assert grid.zero.tolist() == [[2.0]]
    quantized = quantize(weight, grid)
    assert quantized.codes.tolist() == [[0, 2, 2, 3]]
    assert quantized.dequantize().tolist() == [[-4.0, 0.0, 0.0, 2.0]]


def test_asymmetric_by_hand() -> None:
    weight = torch.tensor([[-2.0, -0.5, 1.5, 4.0]])
    grid = minmax_grid(weight, 2, 4, symmetric=False)
    assert grid.scale.tolist() == [[2.0]]  # (4 + 2) / 3
    assert grid.zero.tolist() == [[1.0]]
    quantized = quantize(weight, grid)
    assert quantized.codes.tolist() == [[0, 1, 2, 3]]
    assert quantized.dequantize().tolist() == [[-2.0, 0.0, 2.0, 4.0]]


def test_asymmetric_range_holds_zero() -> None:
    weight = torch.tensor([[4.0, 5.0, 6.0, 0.0], [-6.0, -5.0, -4.0, -6.0]])
    grid = minmax_grid(weight, 2, 4, symmetric=False)
    assert grid.scale.tolist() == [[2.0], [2.0]]
    assert grid.zero.tolist() == [[0.0], [3.0]]
    assert quantize(weight, grid).dequantize()[0, 3] == 0


def test_groups_have_scales_of_their_own() -> None:
    weight = torch.tensor([[1.5, -1.5, 15.0, -15.0], [3.0, 0.0, 0.0, 0.0]])
    grid = minmax_grid(weight, 4, 2, symmetric=True)
    torch.testing.assert_close(grid.scale, torch.tensor([[0.2, 2.0], [0.4, 1.0]]))
    torch.testing.assert_close(
        grid.columns(grid.scale), torch.tensor([[0.2, 0.2, 2.0, 2.0], [0.4, 0.4, 1.0, 1.0]])
    )


def test_group_of_zeros_stays_zero() -> None:
    for symmetric in (True, False):
        grid = minmax_grid(torch.zeros(2, 8), 4, 4, symmetric)
        assert torch.isfinite(grid.scale).all()
        assert quantize(torch.zeros(2, 8), grid).dequantize().abs().max() == 0


@settings(deadline=None)
@given(matrices(), GRIDS)
def test_error_is_at_most_half_a_step(weight: Tensor, shape: tuple[int, int, bool]) -> None:
    grid = minmax_grid(weight, *shape)
    quantized = quantize(weight, grid)
    steps = grid.columns(grid.scale)
    error = (quantized.dequantize() - weight).abs()
    assert (error <= steps * 0.5001).all()
    assert int(quantized.codes.max()) < 2 ** shape[0]


@settings(deadline=None)
@given(matrices(), GRIDS)
def test_quantizing_again_changes_nothing(weight: Tensor, shape: tuple[int, int, bool]) -> None:
    quantized = quantize(weight, minmax_grid(weight, *shape))
    assert torch.equal(quantize(quantized.dequantize(), quantized.grid).codes, quantized.codes)


def group_errors(weight: Tensor, grid: Grid, importance: Tensor | None) -> Tensor:
    squared = (quantize(weight, grid).dequantize() - weight).double().square()
    if importance is not None:
        squared = squared * importance
    return squared.unflatten(1, (-1, grid.group_size)).sum(-1)


@settings(deadline=None, max_examples=50)
@given(matrices(), GRIDS, st.booleans())
def test_search_is_never_worse_than_minmax_in_any_group(
    weight: Tensor, shape: tuple[int, int, bool], weighed: bool
) -> None:
    importance = torch.linspace(0.1, 50.0, 16) if weighed else None
    searched = group_errors(weight, searched_grid(weight, *shape, importance), importance)
    plain = group_errors(weight, minmax_grid(weight, *shape), importance)
    assert (searched <= plain * (1 + 1e-5)).all()


@settings(deadline=None, max_examples=25)
@given(matrices(), GRIDS, st.booleans())
def test_search_finds_the_best_of_all_that_it_may_choose(
    weight: Tensor, shape: tuple[int, int, bool], weighed: bool
) -> None:
    importance = torch.linspace(0.1, 50.0, 16) if weighed else None
    full = minmax_grid(weight, *shape)
    signs = (1.0, -1.0) if shape[2] else (1.0,)
    shrinks = torch.linspace(1.0, SEARCH_FLOOR, SEARCH_STEPS).tolist()
    tried = torch.stack(
        [
            group_errors(weight, replace(full, scale=full.scale * shrink * sign), importance)
            for shrink in shrinks
            for sign in signs
        ]
    )
    searched = group_errors(weight, searched_grid(weight, *shape, importance), importance)
    rounding = 1e-6 * group_errors(weight, replace(full, scale=full.scale * 1e30), importance)
    assert (searched <= tried.amin(0) * (1 + 1e-5) + rounding).all()


def test_search_clips_an_outlier_that_costs_the_rest_more() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 64)
    searched = searched_grid(weight, 3, 64, True)
    plain = minmax_grid(weight, 3, 64, True)
    assert (
        group_errors(weight, searched, None).sum() < 0.8 * group_errors(weight, plain, None).sum()
    )


def test_search_heeds_importance() -> None:
    weight = torch.tensor([[1.0, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3]])
    only_first = torch.tensor([1.0] + [0.0] * 7)
    for importance in (only_first, 1 - only_first):
        error = group_errors(weight, searched_grid(weight, 2, 8, True, importance), importance)
        other = group_errors(weight, searched_grid(weight, 2, 8, True, 1 - importance), importance)
        assert error < 0.5 * other


def test_symmetric_search_spends_the_spare_level_on_the_longer_side() -> None:
    """With 2 bits the codes reach −2 and +1 steps; 2, −1, 0, 1 fit with a step of −1 only."""
    weight = torch.tensor([[2.0, -1.0, 0.0, 1.0], [-2.0, 1.0, 0.0, -1.0]])
    grid = searched_grid(weight, 2, 4, symmetric=True)
    assert grid.scale[0, 0] < 0 < grid.scale[1, 0]
    quantized = quantize(weight, grid)
    assert quantized.codes.tolist() == [[0, 3, 2, 1], [0, 3, 2, 1]]
    assert (quantized.dequantize() - weight).abs().max() < 0.05


def test_bits_per_weight_counts_scales_and_zero_points() -> None:
    quantized = quantize(torch.ones(2, 64), minmax_grid(torch.ones(2, 64), 4, 32, True))
    assert quantized.bits_per_weight() == 4 + (16 + 4) / 32


def test_dequantize_by_hand() -> None:
    grid = Grid(torch.tensor([[0.5, -2.0]]), torch.tensor([[1.0, 8.0]]), 4, 2)
    codes = torch.tensor([[0, 3, 7, 15]], dtype=torch.uint8)
    assert Quantized(codes, grid).dequantize().tolist() == [[-0.5, 1.0, 2.0, -14.0]]


def test_group_size_zero_is_a_whole_row() -> None:
    assert resolve_group_size(96, 0) == 96
    assert resolve_group_size(96, 32) == 32


def test_group_size_that_does_not_divide_names_those_that_do() -> None:
    with pytest.raises(InferlabError) as caught:
        resolve_group_size(576, 128, "model.layers.0.mlp.up_proj")
    message = str(caught.value)
    assert message.startswith(
        "group_size 128 does not divide the 576 columns of model.layers.0.mlp.up_proj; "
        "sizes that do: 16, 32, 64, 96, 192"
    )
    assert "\n" not in message
    with pytest.raises(InferlabError, match="none of the usual"):
        resolve_group_size(7, 128)
