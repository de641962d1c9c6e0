"""After GPTQ: move codes and scales, in turn, to where the output error is least.

GPTQ decides each column once, with scales chosen before it knew any code. Both can be revisited at
no cost in bits. With D = W − Q the output error is tr(D·H·Dᵀ), a quadratic in the scales when the
codes are fixed (so the best scales are a least-squares solution), and in one column's codes when
all else is fixed (coordinate descent, as in Behdin et al. 2023, "QuantEase", arXiv:2309.01885).
"""

from dataclasses import replace

import torch
from torch import Tensor

from inferlab.quantization.affine import Quantized
from inferlab.quantization.formats import storable_grid

RIDGE = 1e-6


def refine(weight: Tensor, quantized: Quantized, hessian: Tensor, rounds: int) -> Quantized:
    """`rounds` times: the best scales for the codes, then a pass over the codes.

    `weight` [rows, columns] fp32; `hessian` [columns, columns], positive definite. Columns of the
    largest diagonal are visited first, as GPTQ does. Scales stay such as can be stored.
    """
    order = torch.argsort(hessian.diagonal(), descending=True)
    for _ in range(rounds):
        quantized = refit_scales(weight, quantized, hessian)
        quantized = descend(weight, quantized, hessian, order)
    return quantized


def refit_scales(weight: Tensor, quantized: Quantized, hessian: Tensor) -> Quantized:
    """The scales that minimise the output error of the given codes; zero points stay.

    A row is Σ_g s_g·c_g with c_g its codes (less the zero point) in group g and 0 elsewhere, so
    its scales solve A·s = b with A_gh = c_gᵀ·H·c_h and b_g = c_gᵀ·H·w. A scale that comes out as
    nothing (all codes of the group at the zero point) stays what it was.
    """
    grid = quantized.grid
    size = grid.group_size
    codes = quantized.codes.float() - grid.columns(grid.zero)

    def by_group(products: Tensor) -> Tensor:
        return products.mul_(codes).unflatten(1, (-1, size)).sum(-1)

    wanted = by_group(weight @ hessian)
    columns = torch.arange(len(hessian)).split(size)
    gram = torch.stack([by_group(codes[:, part] @ hessian[part]) for part in columns], dim=1)
    diagonal = gram.diagonal(dim1=1, dim2=2)
    diagonal.add_(RIDGE * diagonal.mean(1, keepdim=True).clamp(min=1e-20))
    scale = torch.linalg.solve(gram, wanted)
    usable = torch.isfinite(scale) & (scale.abs() > 1e-3 * grid.scale.abs())
    found = replace(grid, scale=torch.where(usable, scale, grid.scale))
    return Quantized(quantized.codes, storable_grid(found))


def descend(
    weight: Tensor, quantized: Quantized, hessian: Tensor, order: Tensor, block: int = 64
) -> Quantized:
    """One pass of coordinate descent over the columns in `order`: each code to its best value.

    With all other columns fixed, column j is best at q_j + [D·H]_j / H_jj, rounded to the grid.
    D·H is kept up to date within a block of columns one at a time, outside it all at once.
    """
    grid = quantized.grid
    top, columns = 2**grid.bits - 1, len(order)
    hessian = hessian[order][:, order]
    values = quantized.dequantize().t()[order]
    codes = quantized.codes.t()[order]
    gradient = hessian @ (weight.t()[order] - values)
    scale, zero = grid.scale.t().contiguous(), grid.zero.t().contiguous()
    groups = (order // grid.group_size).tolist()
    step = hessian.diagonal().reciprocal().tolist()
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        moves = torch.empty_like(values[start:stop])
        for j in range(start, stop):
            s, z = scale[groups[j]], zero[groups[j]]
            code = torch.add(values[j], gradient[j], alpha=step[j])
            code = code.div_(s).round_().add_(z).clamp_(0, top)
            codes[j] = code
            moved = torch.sub(code.sub_(z).mul_(s), values[j], out=moves[j - start])
            gradient[j:stop].addr_(hessian[j, j:stop], moved, alpha=-1)
        outside = torch.cat([torch.arange(start), torch.arange(stop, columns)])
        gradient[outside] -= hessian[outside, start:stop] @ moves
    back = torch.argsort(order)
    return Quantized(codes[back].t().contiguous(), grid)
