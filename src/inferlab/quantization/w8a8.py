"""INT8 weights and activations inside a model of transformers, layer by layer.

Stands in for linear layers to measure what W8A8 costs without writing and loading a checkpoint.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from inferlab.models.adapters import linear_groups
from inferlab.models.scoring import Int8Linear
from inferlab.quantization.affine import minmax_grid, quantize
from inferlab.quantization.formats import storable_grid
from inferlab.store import Checkpoint

BITS = 8


def w8a8_layers(checkpoint: Checkpoint) -> dict[str, Int8Linear]:
    """Every linear layer of the blocks, rounded to nearest, one scale a channel, by name."""
    layers = {}
    for group in linear_groups(checkpoint):
        for name, weight in zip(group.layers, group.weights(checkpoint), strict=True):
            bias = f"{name}.bias"
            kept = checkpoint.tensor(bias).float() if bias in checkpoint else None
            layers[name] = rounded(weight, kept)
    return layers


def rounded(weight: Tensor, bias: Tensor | None = None) -> Int8Linear:
    """`weight` [out, in] and `bias` [out] as an INT8 layer."""
    grid = storable_grid(minmax_grid(weight, BITS, weight.shape[1], symmetric=True))
    codes = quantize(weight, grid).codes.int() - 2 ** (BITS - 1)
    return Int8Linear(codes.to(torch.int8), grid.scale, bias)


@contextlib.contextmanager
def running_as(
    model: nn.Module, layers: Mapping[str, nn.Module], names: Iterable[str]
) -> Iterator[None]:
    """Within the body the layers `names` of `model` are those of `layers`."""
    originals = {name: model.get_submodule(name) for name in names}
    try:
        for name in originals:
            model.set_submodule(name, layers[name])
        yield
    finally:
        for name, original in originals.items():
            model.set_submodule(name, original)
