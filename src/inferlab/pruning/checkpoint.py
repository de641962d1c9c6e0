"""Prune every linear layer of a language model, and say how well it went and what it saves."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from inferlab.calibration.statistics import Calibration
from inferlab.models.adapters import LinearGroup, layer_names, linear_groups
from inferlab.params import section
from inferlab.pruning.formats import stored_bytes
from inferlab.pruning.patterns import Pattern, TwoFour, Unstructured
from inferlab.pruning.scores import CompensationParams, Score, prune
from inferlab.quantization.gptq import output_error, warn_of_damping
from inferlab.run import log, progress
from inferlab.store import Checkpoint, save_checkpoint


@section
class TwoFourParams:
    """The section `prune.sparse24`."""

    score: Score
    compensation: CompensationParams

    def pattern(self) -> Pattern:
        """Where zeros may stand."""
        return TwoFour()


@section
class UnstructuredParams:
    """The section `prune.pruned50`."""

    sparsity: Annotated[float, Field(ge=0, lt=1)]
    score: Score
    compensation: CompensationParams

    def pattern(self) -> Pattern:
        """Where zeros may stand."""
        return Unstructured(self.sparsity)


PruneParams = TwoFourParams | UnstructuredParams
METHODS: dict[str, type[PruneParams]] = {"pruned50": UnstructuredParams, "sparse24": TwoFourParams}
"""The pruned variants and the params section that each reads."""


@dataclass(frozen=True)
class Matrix:
    """The stacked layers of a group, which are pruned as one. `weight`: [out, in], fp32."""

    group: LinearGroup
    weight: Tensor
    rows: list[int]
    statistics: dict[str, Tensor]

    def split(self, stacked: Tensor) -> dict[str, Tensor]:
        """`stacked` [out, in] as one matrix a layer, in the checkpoint's orientation and bf16."""
        parts = zip(self.group.layers, stacked.bfloat16().split(self.rows), strict=True)
        return {
            layer: part.t().contiguous() if self.group.transposed else part for layer, part in parts
        }


@dataclass(frozen=True)
class Report:
    """`sparsity`: share of zeros in the pruned layers, and the least and most of one layer.
    `output_error_vs_magnitude`: mean over groups of the output error over that of the same
    pattern with magnitude scores. `bytes`: of the pruned layers, by storage format.
    """

    layers_pruned: int
    groups_fallback: int
    sparsity: float
    layer_sparsity_min: float
    layer_sparsity_max: float
    output_error_vs_magnitude: float
    weights: int
    bytes: dict[str, int]

    @property
    def bits_per_weight(self) -> float:
        """As the smaller of the formats made for it would store it; no engine here reads them."""
        smallest = min(self.bytes[name] for name in ("two_four", "bitmask") if name in self.bytes)
        return 8 * smallest / self.weights

    def metrics(self) -> dict[str, float]:
        """The flat metrics of a pruned variant."""
        return {
            "layers_pruned": self.layers_pruned,
            "groups_fallback": self.groups_fallback,
            "sparsity": self.sparsity,
            "layer_sparsity_min": self.layer_sparsity_min,
            "layer_sparsity_max": self.layer_sparsity_max,
            "output_error_vs_magnitude": self.output_error_vs_magnitude,
            "bits_per_weight": self.bits_per_weight,
            "packed": 0,
            **{f"bytes_{name}": size for name, size in self.bytes.items()},
        }


def matrices(checkpoint: Checkpoint, calibration: Calibration) -> Iterator[Matrix]:
    """Every group of linear layers with its statistics, in the model's order."""
    for group in progress(linear_groups(checkpoint), "prune"):
        parts = group.weights(checkpoint)
        weight = torch.cat(parts).float()
        yield Matrix(group, weight, [len(part) for part in parts], calibration.load(group))


def check_columns(checkpoint: Checkpoint, pattern: Pattern) -> None:
    """Raises InferlabError naming the first layer whose width the pattern does not fit."""
    for group in linear_groups(checkpoint):
        shape = checkpoint.shape(f"{group.layers[0]}.weight")
        pattern.check(shape[0] if group.transposed else shape[1], group.layers[0])


def prune_checkpoint(
    checkpoint: Checkpoint, calibration: Calibration, params: PruneParams, output: Path
) -> Report:
    """Write the pruned model into the folder `output`, dense with zeros, in bf16.

    Raises InferlabError before any work when the pattern does not fit a layer.
    """
    pattern = params.pattern()
    check_columns(checkpoint, pattern)
    layers: dict[str, Tensor] = {}
    sizes: Counter[str] = Counter()
    ratios, fallen = [], 0
    for matrix in matrices(checkpoint, calibration):
        arguments = matrix.weight, matrix.statistics, pattern
        pruned = prune(*arguments, params.score, params.compensation)
        if pruned.fell_back:
            log.warning("%s: no inverse Hessian, pruned by activation score", matrix.group.name)
            fallen += 1
        asked = params.compensation.damping
        warn_of_damping(matrix.group.name, matrix.statistics["hessian"], asked, pruned.damping)
        baseline = prune(*arguments, "magnitude", params.compensation)
        ratios.append(_ratio(matrix, pruned.weight, baseline.weight))
        layers |= matrix.split(pruned.weight)
        sizes.update(stored_bytes(pruned.weight.bfloat16()))
    names = layer_names(linear_groups(checkpoint))
    tensors = {f"{name}.weight": layers[name] for name in names}
    kept = {name: checkpoint.tensor(name) for name in checkpoint.names if name not in tensors}
    save_checkpoint(output, checkpoint.config, kept | tensors, aside_from=checkpoint.folder)
    zeros = [int((layer == 0).sum()) for layer in layers.values()]
    counts = [layer.numel() for layer in layers.values()]
    shares = [zero / count for zero, count in zip(zeros, counts, strict=True)]
    return Report(
        layers_pruned=len(names),
        groups_fallback=fallen,
        sparsity=sum(zeros) / sum(counts),
        layer_sparsity_min=min(shares),
        layer_sparsity_max=max(shares),
        output_error_vs_magnitude=mean(ratios),
        weights=sum(counts),
        bytes=dict(sizes),
    )


def _ratio(matrix: Matrix, found: Tensor, baseline: Tensor) -> float:
    hessian = matrix.statistics["hessian"]
    reference = output_error(matrix.weight, baseline, hessian)
    return output_error(matrix.weight, found, hessian) / max(reference, 1e-30)
