"""GPTQ against a naive reference, its claims, and Hessians that are less than perfect."""

import pytest
import torch
from torch import Tensor

from inferlab.quantization.affine import Grid, minmax_grid, quantize, searched_grid
from inferlab.quantization.gptq import inverse_factor, output_error, solve
from inferlab.quantization.naive import solve_naively, steps

COLUMNS = 96  # more than one block of the column loop
GROUP = 32


def correlated(tokens: int = 400, columns: int = COLUMNS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight [16, columns] and the Hessian of inputs whose columns move together."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(16, columns, generator=generator)
    sources = torch.randn(tokens, 12, generator=generator)
    inputs = sources @ torch.randn(12, columns, generator=generator)
    inputs += 0.3 * torch.randn(tokens, columns, generator=generator)
    return weight, 2 * inputs.t() @ inputs / tokens


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("activation_order", [True, False])
def test_equals_the_naive_reference(activation_order: bool, symmetric: bool) -> None:
    weight, hessian = correlated()
    grid = minmax_grid(weight, 4, GROUP, symmetric)
    order = torch.arange(COLUMNS)
    if activation_order:
        order = torch.argsort(hessian.diagonal(), descending=True)
    solution = solve(weight, hessian, grid, damping=0.01, activation_order=activation_order)
    expected = solve_naively(weight, hessian, grid, 0.01, order).codes
    assert torch.equal(solution.quantized.codes, expected)
    assert not torch.equal(expected, quantize(weight, grid).codes)
    assert solution.damping == 0.01
    assert not solution.fell_back
    assert solution.dead_columns == 0


def test_steps_are_elimination_by_hand() -> None:
    """H⁻¹ = [[2, −1], [−1, 2]]/3: 1.4 leaves 0.4, of which 0.4·(1/3)/(2/3) = 0.2 moves on."""
    grid = Grid(torch.ones(1, 1), torch.full((1, 1), 8.0), 4, 2)
    hessian = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    weight = torch.tensor([[1.4, 1.4]], dtype=torch.float64)
    first, second = steps(weight, hessian, grid, 0.0, torch.arange(2))
    assert (first.column, first.codes.tolist(), second.codes.tolist()) == (0, [9], [10])
    assert first.inverse.tolist() == pytest.approx([2 / 3, -1 / 3])
    assert first.errors.item() == pytest.approx(0.4)
    assert first.shifts.tolist() == [pytest.approx([0, 0.2])]
    assert second.weights.item() == pytest.approx(1.6)
    assert second.inverse.tolist() == pytest.approx([0, 1 / 2])


def test_inverse_factor_is_the_upper_cholesky_factor_of_the_inverse() -> None:
    _, hessian = correlated()
    factor, damping = inverse_factor(hessian.double(), 0.01)
    assert factor is not None
    wide = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(COLUMNS)
    expected = torch.linalg.cholesky(torch.linalg.inv(wide), upper=True)
    torch.testing.assert_close(factor, expected)


def test_two_columns_by_hand() -> None:
    """H = [[2, 1], [1, 2]], steps of 1: rounding 1.4 to 1 leaves 0.4 · H₀₁/H₁₁ = 0.2 for 1.4."""
    grid = Grid(torch.ones(1, 1), torch.full((1, 1), 8.0), 4, 2)
    hessian = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    solution = solve(torch.tensor([[1.4, 1.4]]), hessian, grid, 1e-9, activation_order=False)
    assert solution.quantized.codes.tolist() == [[9, 10]]
    assert quantize(torch.tensor([[1.4, 1.4]]), grid).codes.tolist() == [[9, 9]]


def test_activation_order_starts_with_the_largest_diagonal() -> None:
    """As above with a heavier second column: now 1.4 there is rounded first and left alone."""
    grid = Grid(torch.ones(1, 1), torch.full((1, 1), 8.0), 4, 2)
    hessian = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    weight = torch.tensor([[1.4, 1.4]])
    assert solve(weight, hessian, grid, 1e-9, True).quantized.codes.tolist() == [[10, 9]]


def test_output_error_is_the_mean_square_over_tokens_and_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weight, other = (torch.randn(n, 4, generator=generator) for n in (5, 3, 3))
    expected = (inputs @ (weight - other).t()).square().mean()
    found = output_error(weight, other, 2 * inputs.t() @ inputs / 5)
    assert found == pytest.approx(float(expected), rel=1e-5)
    assert output_error(weight, weight, torch.eye(4)) == 0


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("activation_order", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_beats_round_to_nearest_on_correlated_inputs(
    bits: int, activation_order: bool, seed: int
) -> None:
    weight, hessian = correlated(seed=seed)
    for make in (minmax_grid, searched_grid):
        grid = make(weight, bits, GROUP, True)
        result = solve(weight, hessian, grid, 0.01, activation_order).quantized.dequantize()
        nearest = quantize(weight, grid).dequantize()
        ratio = output_error(weight, result, hessian) / output_error(weight, nearest, hessian)
        assert ratio < 0.6


@pytest.mark.parametrize("activation_order", [True, False])
def test_uncorrelated_inputs_give_round_to_nearest(activation_order: bool) -> None:
    weight, _ = correlated()
    grid = minmax_grid(weight, 4, GROUP, True)
    hessian = torch.diag(torch.linspace(0.5, 2.0, COLUMNS))
    solution = solve(weight, hessian, grid, 0.01, activation_order)
    assert torch.equal(solution.quantized.codes, quantize(weight, grid).codes)


def test_inputs_are_left_as_they_were() -> None:
    weight, hessian = correlated()
    before = weight.clone(), hessian.clone()
    solve(weight, hessian, minmax_grid(weight, 4, GROUP, True))
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian, before[1])


def test_dead_columns_are_rounded_alone_and_do_not_disturb_the_others() -> None:
    weight, hessian = correlated()
    dead = torch.tensor([3, 40, 95])
    hessian[dead] = 0
    hessian[:, dead] = 0
    grid = minmax_grid(weight, 4, GROUP, True)
    solution = solve(weight, hessian, grid)
    nearest = quantize(weight, grid)
    assert solution.dead_columns == 3
    assert not solution.fell_back
    assert torch.equal(solution.quantized.codes[:, dead], nearest.codes[:, dead])
    changed = weight.clone()
    changed[:, dead] = 0.123 * weight[:, dead]
    alive = torch.ones(COLUMNS, dtype=torch.bool)
    alive[dead] = False
    again = solve(changed, hessian, grid)
    assert torch.equal(again.quantized.codes[:, alive], solution.quantized.codes[:, alive])


def test_inputs_that_are_all_dead_give_round_to_nearest() -> None:
    weight, hessian = correlated()
    grid = minmax_grid(weight, 4, GROUP, True)
    solution = solve(weight, torch.zeros_like(hessian), grid)
    assert solution.dead_columns == COLUMNS
    assert torch.equal(solution.quantized.codes, quantize(weight, grid).codes)


def test_fewer_tokens_than_columns_makes_the_damping_grow() -> None:
    weight, hessian = correlated(tokens=10)
    grid = minmax_grid(weight, 4, GROUP, True)
    solution = solve(weight, hessian, grid, damping=1e-10)
    assert 1e-10 < solution.damping <= 1
    tenth = solve(weight, hessian, grid, damping=solution.damping / 10)
    assert tenth.damping == pytest.approx(solution.damping)
    assert not solution.fell_back
    result, nearest = solution.quantized.dequantize(), quantize(weight, grid).dequantize()
    assert torch.isfinite(result).all()
    assert output_error(weight, result, hessian) < output_error(weight, nearest, hessian)


def test_hopeless_hessian_falls_back_to_round_to_nearest() -> None:
    weight, _ = correlated()
    grid = minmax_grid(weight, 4, GROUP, True)
    indefinite = torch.full((COLUMNS, COLUMNS), 50.0)
    indefinite.diagonal().fill_(1.0)
    solution = solve(weight, indefinite, grid)
    assert solution.fell_back
    assert solution.damping > 1
    assert torch.equal(solution.quantized.codes, quantize(weight, grid).codes)


def test_hessian_that_is_not_finite_falls_back() -> None:
    weight, hessian = correlated()
    hessian[0, 1] = hessian[1, 0] = float("nan")
    grid = minmax_grid(weight, 4, GROUP, True)
    solution = solve(weight, hessian, grid)
    assert solution.fell_back
    assert torch.equal(solution.quantized.codes, quantize(weight, grid).codes)
