"""Which layers to leave in 16 bits when the rest becomes INT8, under a budget of weights.

Layers that read the same input (q, k, v; gate, up) are kept or quantized together: engines fuse
them into one matrix, which has one format.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from inferlab.errors import lookup
from inferlab.models.adapters import LinearGroup
from inferlab.params import section

Rule = Literal["sensitivity", "outlier_share", "input_outliers"]


@section
class TextParams:
    """How much text a measurement takes: the first `tokens` of each of the first `windows`."""

    windows: Annotated[int, Field(gt=0)]
    tokens: Annotated[int, Field(gt=1)]

    def cut(self, windows: Tensor) -> Tensor:
        """From prepared `windows` [windows, length]; fewer or shorter ones are taken whole."""
        return windows[: self.windows, : self.tokens].long()


@dataclass(frozen=True)
class Unit:
    """A group of layers that is kept or quantized as one.

    `nats`: rise of the loss when it is INT8; `outlier_share` of its weights; `input_outliers`: the
    largest over the median column maximum of its input.
    """

    name: str
    layers: tuple[str, ...]
    weights: int
    nats: float
    outlier_share: float
    input_outliers: float = 0.0


RULES: Mapping[Rule, Callable[[Unit], float]] = {
    "sensitivity": lambda unit: unit.nats / unit.weights,
    "outlier_share": lambda unit: unit.outlier_share,
    "input_outliers": lambda unit: unit.input_outliers,
}
"""What is kept first: the largest value. Sensitivity counts for each byte that it costs."""


def ranked(units: Sequence[Unit], rule: Rule) -> list[Unit]:
    """`units`, those first that `rule` keeps first."""
    return sorted(units, key=RULES[rule], reverse=True)


def choose(units: Sequence[Unit], rule: Rule, share: float) -> list[Unit]:
    """The units to keep so that at most `share` of all weights stays in 16 bits.

    Takes them in the order of `rule` and passes over those that no longer fit.
    """
    left = share * sum(unit.weights for unit in units)
    kept = []
    for unit in ranked(units, rule):
        if unit.weights <= left:
            kept.append(unit)
            left -= unit.weights
    return kept


def named_groups(groups: Sequence[LinearGroup], names: Collection[str]) -> set[str]:
    """The groups that hold the layers `names`, by group name.

    Raises InferlabError for a name that is no linear layer, with a suggestion.
    """
    group_of = {layer: group.name for group in groups for layer in group.layers}
    return {
        lookup(group_of, name, "linear layer (params.yaml: quantize.mixed.keep)") for name in names
    }


def curve(units: Sequence[Unit], rule: Rule) -> list[dict[str, float | str]]:
    """From all INT8 to all 16-bit, one unit after another: what is kept and what is lost."""
    total = sum(unit.weights for unit in units)
    nats, weights, layers = sum(unit.nats for unit in units), 0, 0
    rows: list[dict[str, float | str]] = []
    for unit in (None, *ranked(units, rule)):
        if unit is not None:
            nats -= unit.nats
            weights += unit.weights
            layers += len(unit.layers)
        rows.append(
            {
                "rule": rule,
                "layers_16bit": layers,
                "share_16bit": weights / total,
                "megabytes": megabytes(total, weights),
                "nats": max(nats, 0.0),
            }
        )
    return rows


def megabytes(weights: int, kept: int) -> float:
    """Of `weights` linear weights, `kept` of them in 16 bits; scales (0.5 %) are left out."""
    return (weights + kept) / 1e6


def outlier_share(weights: Sequence[Tensor], sigmas: float) -> float:
    """Share of values more than `sigmas` standard deviations from their own matrix's mean."""
    outside = sum(
        int(((w - w.mean()).abs() > sigmas * w.std()).sum()) for w in map(Tensor.float, weights)
    )
    return outside / sum(weight.numel() for weight in weights)


def largest_over_median(values: Tensor) -> float:
    """Of the magnitudes of `values`; 0 when half of them are 0."""
    magnitudes = values.float().abs().flatten()
    median = float(torch.median(magnitudes))
    return float(magnitudes.max()) / median if median else 0.0


def kurtosis(values: Tensor) -> float:
    """Fourth moment over the square of the second: 3 for normal values, 0 for a constant."""
    centred = values.float() - values.float().mean()
    squares = centred.square_()
    return float(squares.square().mean() / squares.mean().square().clamp(min=1e-30))
