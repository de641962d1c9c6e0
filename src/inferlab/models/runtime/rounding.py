"""Round the weights of a plain model when it is loaded: to the nearest code, without calibration.

The stage `quantize` makes better ones; this is for a look at a model that has not been through it.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from inferlab.errors import InferlabError, lookup
from inferlab.models.runtime.linear import (
    Dense,
    Int4,
    Linear,
    Projection,
    int8_rows,
    pack_halves,
)
from inferlab.models.runtime.llama import Layer, Llama
from inferlab.quantization.affine import minmax_grid, quantize, resolve_group_size

GROUP_SIZE = 64
"""Weights of a row that share an INT4 scale; halved until it divides the row."""

SMALLEST_GROUP = 16
PROJECTIONS = ("qkv", "output", "gate_up", "down")


def int4_groups(layer: Dense) -> Int4:
    """An asymmetric 4-bit grid a group. Raises InferlabError when no usual group divides a row."""
    size = GROUP_SIZE
    while layer.ins % size and size > SMALLEST_GROUP:
        size //= 2
    size = resolve_group_size(layer.ins, size)
    grid = minmax_grid(layer.weight, 4, size, symmetric=False)
    codes = quantize(layer.weight, replace(grid, scale=grid.scale.half().float())).codes
    packed, zero = pack_halves(codes, size), grid.zero.to(torch.uint8)
    return Int4(packed, grid.scale.half(), zero, layer.bias)


WEIGHTS: dict[str, Callable[[Dense], Linear] | None] = {
    "stored": None,
    "int8": lambda layer: replace(int8_rows(layer.weight), bias=layer.bias),
    "int4": int4_groups,
}


def rounded(model: Llama, weights: str) -> Llama:
    """The model with linear layers in `weights`, one of WEIGHTS, and the output head in INT8.

    `stored` changes nothing. Raises InferlabError for another name and when the model is stored
    in fewer bits already.
    """
    convert = lookup(WEIGHTS, weights, "weights")
    if convert is None:
        return model

    def one(part: Linear) -> Linear:
        if not isinstance(part, Dense):
            raise InferlabError(
                f"the weights are stored in {type(part).__name__.upper()} already, so they cannot "
                f"be rounded to {weights}; take them as stored, or give the 16-bit model"
            )
        return convert(part)

    def projection(given: Projection) -> Projection:
        return Projection(tuple(map(one, given.parts)))

    def layer(given: Layer) -> Layer:
        return replace(given, **{name: projection(getattr(given, name)) for name in PROJECTIONS})

    layers = tuple(map(layer, model.layers))
    head = model.head
    head = int8_rows(head.weight) if isinstance(head, Dense) else head
    return replace(model, layers=layers, head=head)
