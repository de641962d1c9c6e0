"""GPTQ: quantize column by column, and let the columns still to come absorb each error.

Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (arXiv:2210.17323), section 3. Scales are fixed before the first column is touched
("static groups"), so quantizing columns in another order needs no index in the checkpoint.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from inferlab.quantization.affine import Grid, Quantized, quantize
from inferlab.quantization.loops import quantize_block
from inferlab.run import log

DAMPING, MAX_DAMPING = 0.01, 1.0


@dataclass(frozen=True)
class Solution:
    """What GPTQ made of one matrix. `damping` is the share of the mean diagonal that was needed."""

    quantized: Quantized
    damping: float
    dead_columns: int
    fell_back: bool


def solve(
    weight: Tensor,
    hessian: Tensor,
    grid: Grid,
    damping: float = DAMPING,
    activation_order: bool = True,
    block: int = 64,
) -> Solution:
    """Quantize `weight` [rows, columns] on `grid` so that its output error is small.

    `hessian` [columns, columns] is 2·XᵀX over the calibration inputs, fp32. `damping` is added to
    its diagonal as a share of the mean diagonal and grows tenfold until the Cholesky factor
    exists; past a share of 1 the layer falls back to round-to-nearest. Columns that no input ever
    reached (a zero on the diagonal) are rounded alone. `activation_order` quantizes the columns of
    the largest diagonal first.
    """
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    order = (
        torch.argsort(diagonal, descending=True)
        if activation_order
        else torch.arange(len(diagonal))
    )
    factor, used = inverse_factor(hessian[order][:, order], damping)
    if factor is None:
        return Solution(quantize(weight, grid), used, int(dead.sum()), fell_back=True)
    codes = _quantize_columns(weight.float()[:, order], factor, grid, order, block)
    codes = codes[:, torch.argsort(order)].contiguous()
    return Solution(Quantized(codes, grid), used, int(dead.sum()), fell_back=False)


def output_error(weight: Tensor, approximation: Tensor, hessian: Tensor) -> float:
    """Mean squared error of the layer's outputs over the calibration inputs.

    With H = 2·XᵀX/tokens it is tr((W−Q)·H·(W−Q)ᵀ) / (2·rows). `weight`, `approximation`:
    [rows, columns]; `hessian`: [columns, columns].
    """
    difference = weight.float() - approximation.float()
    return float(((difference @ hessian) * difference).sum() / (2 * len(difference)))


def inverse_factor(hessian: Tensor, damping: float) -> tuple[Tensor | None, float]:
    """The upper Cholesky factor of the inverse of the damped Hessian, and the damping it took.

    Row i of the factor says how column i's error is spread over the columns after it. With H = A·Aᵀ
    and A upper it is A⁻¹, so the inverse itself is never formed. None when even a damping of 1
    gives no factor.
    """
    identity = torch.eye(len(hessian), dtype=hessian.dtype)
    while damping <= MAX_DAMPING:
        lower, failed = torch.linalg.cholesky_ex(damped(hessian, damping).flip(0, 1))
        if not failed:
            factor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
            if torch.isfinite(factor).all():
                return factor, damping
        damping *= 10
    return None, damping


def warn_of_damping(layer: str, hessian: Tensor, asked: float, used: float) -> None:
    """Log that the damping `used` had to be above what was `asked`; a fallback is logged apart.

    `hessian`: [columns, columns]; both are shares of its mean diagonal.
    """
    if asked < used <= MAX_DAMPING:
        log.warning(
            "%s: damping grew from %g to %g until the Hessian had a factor (%d of %d columns dead)",
            layer,
            asked,
            used,
            int((hessian.diagonal() == 0).sum()),
            len(hessian),
        )


def damped(hessian: Tensor, damping: float) -> Tensor:
    """The Hessian with `damping` times its mean diagonal added to the diagonal.

    A zero on the diagonal (a column that no input ever reached) counts as the mean diagonal.
    """
    diagonal = hessian.diagonal()
    diagonal = torch.where(diagonal == 0, diagonal.mean().clamp(min=1e-12), diagonal)
    result = hessian.clone()
    result.diagonal().copy_(diagonal + damping * diagonal.mean())
    return result


def _quantize_columns(
    weight: Tensor, factor: Tensor, grid: Grid, order: Tensor, block: int
) -> Tensor:
    """The column loop. `weight` [rows, columns] is already in `order`; returns codes alike.

    Works on the transpose, where a column of weights is contiguous. Within a block errors are
    passed on one column at a time, to the columns after the block all at once.
    """
    work = weight.t().contiguous()
    codes = torch.empty_like(work, dtype=torch.uint8)
    groups = order // grid.group_size
    scale, zero = grid.scale.t().contiguous(), grid.zero.t().contiguous()
    top = 2**grid.bits - 1
    for start in range(0, len(work), block):
        stop = min(start + block, len(work))
        inside = slice(start, stop)
        shared = scale[groups[inside]], zero[groups[inside]]
        tensors = (work[inside], *shared, factor[inside, inside].contiguous())
        found = quantize_block(*(tensor.numpy() for tensor in tensors), top)
        codes[inside], errors = map(torch.from_numpy, found)
        work[stop:].addmm_(factor[inside, stop:].t(), errors, alpha=-1)
    return codes.t()
