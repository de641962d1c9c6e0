"""Refinement after GPTQ: against brute force, and never for the worse."""

import itertools

import pytest
import torch
from test_gptq import COLUMNS, GROUP, correlated
from torch import Tensor

from inferlab.quantization.affine import Grid, Quantized, minmax_grid, quantize
from inferlab.quantization.gptq import damped, output_error, solve
from inferlab.quantization.refine import descend, refine, refit_scales


def example(seed: int = 0, symmetric: bool = True) -> tuple[Tensor, Tensor, Quantized]:
    """A weight, a positive definite Hessian, and what GPTQ makes of the weight."""
    weight, hessian = correlated(seed=seed)
    hessian = damped(hessian, 0.01)
    return (
        weight,
        hessian,
        solve(weight, hessian, minmax_grid(weight, 4, GROUP, symmetric)).quantized,
    )


def error(weight: Tensor, quantized: Quantized, hessian: Tensor) -> float:
    return output_error(weight, quantized.dequantize(), hessian)


def test_one_column_moves_to_its_best_code_by_hand() -> None:
    """H = [[2, 1], [1, 2]], w = (1.4, 1.4), both at 1: the first column visited wants 0.6 more."""
    grid = Grid(torch.ones(1, 1), torch.full((1, 1), 8.0), 4, 2)
    hessian = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    start = Quantized(torch.tensor([[9, 9]], dtype=torch.uint8), grid)
    weight = torch.tensor([[1.4, 1.4]])
    assert descend(weight, start, hessian, torch.arange(2)).codes.tolist() == [[10, 9]]
    assert descend(weight, start, hessian, torch.tensor([1, 0])).codes.tolist() == [[9, 10]]


def test_descent_ends_where_no_single_code_can_be_bettered() -> None:
    weight, hessian, found = example()
    order = torch.arange(COLUMNS)
    for _ in range(50):
        before, found = found, descend(weight, found, hessian, order, block=40)
        if torch.equal(before.codes, found.codes):
            break
    assert torch.equal(before.codes, found.codes)
    best = error(weight[:1], _rows(found, 1), hessian)
    for column, code in itertools.product(range(0, COLUMNS, 7), range(16)):
        codes = found.codes[:1].clone()
        codes[0, column] = code
        other = Quantized(codes, _rows(found, 1).grid)
        assert error(weight[:1], other, hessian) >= best - 1e-6 * best


def test_block_size_does_not_matter() -> None:
    weight, hessian, found = example()
    order = torch.argsort(hessian.diagonal(), descending=True)
    whole = descend(weight, found, hessian, order, block=COLUMNS)
    for block in (1, 40):
        assert torch.equal(descend(weight, found, hessian, order, block).codes, whole.codes)


def test_refitted_scales_are_the_least_squares_solution() -> None:
    """H = XᵀX turns the error into ‖X·(w − Σ s_g·c_g)‖², which lstsq can minimise."""
    generator = torch.Generator().manual_seed(3)
    weight, inputs = torch.randn(3, 8, generator=generator), torch.randn(40, 8, generator=generator)
    found = quantize(weight, minmax_grid(weight, 3, 4, True))
    scales = refit_scales(weight, found, inputs.t() @ inputs).grid.scale
    for row in range(3):
        codes = found.codes[row].float() - 4
        design = torch.stack([inputs[:, :4] @ codes[:4], inputs[:, 4:] @ codes[4:]], dim=1)
        expected = torch.linalg.lstsq(design, inputs @ weight[row, :, None]).solution[:, 0]
        torch.testing.assert_close(scales[row], expected, rtol=5e-3, atol=0)  # bf16


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_refinement_lowers_the_output_error_of_gptq(symmetric: bool, seed: int) -> None:
    weight, hessian, found = example(seed, symmetric)
    once, thrice = (refine(weight, found, hessian, rounds) for rounds in (1, 3))
    errors = [error(weight, one, hessian) for one in (found, once, thrice)]
    assert errors[1] < 0.95 * errors[0]
    assert errors[2] <= errors[1]
    assert torch.equal(thrice.grid.zero, found.grid.zero)
    assert torch.equal(thrice.grid.scale, thrice.grid.scale.bfloat16().float())
    assert int(thrice.codes.max()) <= 15
    assert torch.equal(refine(weight, found, hessian, 0).codes, found.codes)


def test_group_of_zeros_keeps_its_scale() -> None:
    weight, hessian, _ = example()
    weight[:, :GROUP] = 0
    start = quantize(weight, minmax_grid(weight, 4, GROUP, True))
    found = refine(weight, start, hessian, 1)
    assert torch.isfinite(found.grid.scale).all()
    assert (found.grid.scale != 0).all()
    assert torch.isfinite(found.dequantize()).all()


def _rows(quantized: Quantized, rows: int) -> Quantized:
    grid = quantized.grid
    part = Grid(grid.scale[:rows], grid.zero[:rows], grid.bits, grid.group_size)
    return Quantized(quantized.codes[:rows], part)
