"""GPTQ as its paper writes it down: the whole inverse Hessian, updated after every column.

Frantar et al. 2022 (arXiv:2210.17323), equations (2) and (3), in double precision. It is far too
slow for a model, and is what the fast solver in `gptq` must equal; each step can be read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from inferlab.quantization.affine import Grid, Quantized
from inferlab.quantization.gptq import damped


@dataclass(frozen=True)
class Step:
    """One column, quantized. All tensors: fp64; `codes`: uint8.

    `weights` [rows]: the column when its turn came, as the columns before it left it; `errors`
    [rows]: what rounding took from it; `inverse` [columns]: its row of the inverse Hessian of the
    columns that are left, 0 for those that are done; `shifts` [rows, columns]: what is added to
    the columns still to come.
    """

    column: int
    weights: Tensor
    codes: Tensor
    errors: Tensor
    inverse: Tensor
    shifts: Tensor


def steps(
    weight: Tensor, hessian: Tensor, grid: Grid, damping: float, order: Tensor
) -> Iterator[Step]:
    """Quantize `weight` [rows, columns] on `grid`, the columns one by one in `order` [columns].

    Column q is rounded; its error e over [H⁻¹]qq says how far each column to come must move,
    −e·[H⁻¹]q/[H⁻¹]qq, for the outputs to change least; then q leaves the inverse:
    H⁻¹ ← H⁻¹ − H⁻¹[:, q]·H⁻¹[q, :]/[H⁻¹]qq.
    """
    work = weight.double().clone()
    inverse = torch.linalg.inv(damped(hessian.double(), damping))
    scale, zero = grid.columns(grid.scale).double(), grid.columns(grid.zero).double()
    for q in order.tolist():
        value = work[:, q].clone()
        codes = torch.round(value / scale[:, q] + zero[:, q]).clamp(0, 2**grid.bits - 1)
        errors = value - (codes - zero[:, q]) * scale[:, q]
        row = inverse[q].clone()
        shifts = torch.outer(errors, -row / row[q])
        work += shifts
        inverse -= torch.outer(row, row / row[q])
        inverse[q] = inverse[:, q] = shifts[:, q] = 0
        yield Step(q, value, codes.to(torch.uint8), errors, row, shifts)


def solve_naively(
    weight: Tensor, hessian: Tensor, grid: Grid, damping: float, order: Tensor
) -> Quantized:
    """What `gptq.solve` must give for the same damping and order."""
    codes = torch.empty_like(weight, dtype=torch.uint8)
    for step in steps(weight, hessian, grid, damping, order):
        codes[:, step.column] = step.codes
    return Quantized(codes, grid)
