"""Affine quantization of a weight matrix: codes, scales, zero points, and where scales come from.

A weight is `(code - zero) * scale` with an unsigned code of `bits` bits. Symmetric grids fix the
zero at the middle code; the scale may then be negative, which puts the one spare level on the side
of the larger weights. Per-tensor, per-channel and per-group differ only in who shares a scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from inferlab.errors import InferlabError
from inferlab.quantization.loops import best_factors

SEARCH_STEPS = 24
SEARCH_FLOOR = 0.55


@dataclass(frozen=True)
class Grid:
    """Scales and zero points. `scale`, `zero`: [rows, groups], fp32; `group_size` in columns."""

    scale: Tensor
    zero: Tensor
    bits: int
    group_size: int

    def columns(self, values: Tensor) -> Tensor:
        """Spread `values` [rows, groups] over columns: [rows, columns]."""
        return values.repeat_interleave(self.group_size, dim=1)


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix. `codes`: [rows, columns], uint8."""

    codes: Tensor
    grid: Grid

    def dequantize(self) -> Tensor:
        """[rows, columns], fp32."""
        grid = self.grid
        codes = self.codes.unflatten(1, (-1, grid.group_size))
        return ((codes - grid.zero[..., None]) * grid.scale[..., None]).flatten(1)

    def bits_per_weight(self, scale_bits: int = 16) -> float:
        """Bits of codes, scales and zero points a weight, as stored."""
        shared = self.grid.scale.numel() * scale_bits + self.grid.zero.numel() * self.grid.bits
        return self.grid.bits + shared / self.codes.numel()


def resolve_group_size(columns: int, group_size: int, layer: str = "the layer") -> int:
    """The group size in columns; 0 means one group a row. Raises InferlabError if it does not fit.

    A group that does not divide the row would leave a ragged one that no format can store.
    """
    if group_size == 0:
        return columns
    if columns % group_size:
        fitting = [size for size in (16, 32, 64, 96, 128, 192, 256) if columns % size == 0]
        raise InferlabError(
            f"group_size {group_size} does not divide the {columns} columns of {layer}; "
            f"sizes that do: {', '.join(map(str, fitting)) or 'none of the usual'}; 0 = a whole row"
        )
    return group_size


def minmax_grid(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> Grid:
    """The grid that just covers each group of `weight` [rows, columns].

    Symmetric: scale = 2·max|w| / (2^bits − 1), zero = 2^(bits−1). Asymmetric: the range is widened
    to hold 0, so that 0 stays exact.
    """
    groups = weight.float().unflatten(1, (-1, group_size))
    levels = 2**bits - 1
    if symmetric:
        scale = groups.abs().amax(-1) * 2 / levels
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = (high - low) / levels
        zero = torch.round(-low / scale.clamp(min=1e-12)).clamp(0, levels)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return Grid(scale, zero, bits, group_size)


def searched_grid(
    weight: Tensor,
    bits: int,
    group_size: int,
    symmetric: bool,
    importance: Tensor | None = None,
    signed: bool = True,
) -> Grid:
    """Shrink each group's range to where its squared error is least.

    `importance` [columns] weighs the error of a column, for instance by the diagonal of the
    Hessian. Symmetric grids try both signs of the scale if `signed`; asymmetric ones keep their
    zero point.
    """
    full = minmax_grid(weight, bits, group_size, symmetric)
    groups = weight.float().unflatten(1, (-1, group_size))
    weights = torch.ones(weight.shape[1]) if importance is None else importance.float()
    signs = (1.0, -1.0) if symmetric and signed else (1.0,)
    shrinks = torch.linspace(1.0, SEARCH_FLOOR, SEARCH_STEPS).tolist()
    factors = torch.tensor([shrink * sign for shrink in shrinks for sign in signs])
    tensors = (groups, full.scale, full.zero, weights.view(-1, group_size), factors)
    best = best_factors(*(tensor.contiguous().numpy() for tensor in tensors), 2**bits - 1)
    return Grid(full.scale * torch.from_numpy(best), full.zero, bits, group_size)


def quantize(weight: Tensor, grid: Grid) -> Quantized:
    """Round each weight of [rows, columns] to its nearest code on `grid`."""
    groups = weight.float().unflatten(1, (-1, grid.group_size))
    codes = torch.round(groups / grid.scale[..., None] + grid.zero[..., None])
    return Quantized(codes.clamp_(0, 2**grid.bits - 1).flatten(1).to(torch.uint8), grid)
