"""Perplexity against bits a weight: widths, group sizes, grids and methods from one calibration.

Nothing is saved and no calibration is repeated: each point quantizes the layers from the stored
Hessians, puts the dequantized weights into a loaded model and scores it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from joblib import Parallel, delayed
from pydantic import Field
from torch import Tensor, nn

from inferlab.calibration.statistics import Calibration
from inferlab.evaluation.perplexity import perplexity
from inferlab.models.adapters import LinearGroup, linear_groups
from inferlab.models.loading import load_model
from inferlab.params import section
from inferlab.quantization.affine import Quantized, minmax_grid, quantize, resolve_group_size
from inferlab.quantization.driver import check_group_size
from inferlab.quantization.formats import storable_grid
from inferlab.quantization.methods.gptq import (
    GptqParams,
    chosen_hessian,
    first_grid,
    solve_layer,
)
from inferlab.store import Checkpoint, open_checkpoint

METHODS = ("rtn", "gptq")
Row = dict[str, Any]


@section
class SweepPoint:
    """One width and group size; 0 is a whole row."""

    bits: Literal[2, 3, 4, 8]
    group_size: Annotated[int, Field(ge=0)]

    def applied_to(self, params: GptqParams, symmetric: bool) -> GptqParams:
        """GPTQ's options with this width and group size."""
        return replace(params, bits=self.bits, group_size=self.group_size, symmetric=symmetric)


@section
class QuantizeSweepParams:
    """The section `quantize_sweep`. `gptq`: its options; the points replace width and grid."""

    points: Annotated[tuple[SweepPoint, ...], Field(min_length=1)]
    heldout_windows: Annotated[int, Field(gt=0)]
    jobs: Annotated[int, Field(ge=0)]
    backend: Literal["loky", "threading"]
    gptq: GptqParams


@dataclass(frozen=True)
class Recipe:
    """A method, and the shape of its grid."""

    method: str
    params: GptqParams


def recipes(params: QuantizeSweepParams) -> list[Recipe]:
    """Every point with each method, symmetric and asymmetric; the slow ones first."""
    return [
        Recipe(method, point.applied_to(params.gptq, symmetric))
        for method in reversed(METHODS)
        for point in params.points
        for symmetric in (True, False)
    ]


def sweep(
    folder: Path,
    calibration: Calibration,
    windows: dict[str, Tensor],
    params: QuantizeSweepParams,
    threads: int,
) -> list[Row]:
    """One row a recipe, and one for the unquantized model.

    `windows`: held-out ones, as `perplexity` takes them. Raises InferlabError before any work when
    a group size does not divide a layer.
    """
    checkpoint = open_checkpoint(folder)
    for point in params.points:
        check_group_size(checkpoint, linear_groups(checkpoint), point.group_size)
    chosen = {name: tensor[: params.heldout_windows] for name, tensor in windows.items()}
    workers = params.jobs or threads
    jobs = Parallel(n_jobs=workers, backend=params.backend)
    # Columns are solved one at a time, so that a point a core is faster than all cores a point.
    work = [None, *recipes(params)]
    return jobs(delayed(_row)(folder, calibration, chosen, one, threads // workers) for one in work)


def quantized_group(
    checkpoint: Checkpoint, group: LinearGroup, statistics: dict[str, Tensor], recipe: Recipe
) -> tuple[Quantized, list[int]]:
    """The stacked layers of a group, quantized, and how many rows each has."""
    parts = group.weights(checkpoint)
    weight, shape = torch.cat(parts).float(), recipe.params
    size = resolve_group_size(weight.shape[1], shape.group_size, group.name)
    rows = [len(part) for part in parts]
    if recipe.method == "rtn":
        grid = storable_grid(minmax_grid(weight, shape.bits, size, shape.symmetric))
        return quantize(weight, grid), rows
    hessian = chosen_hessian(statistics, shape)
    grid = first_grid(weight, hessian, shape, size)
    return solve_layer(weight, hessian, grid, shape).quantized, rows


def summary(rows: Sequence[Row], params: QuantizeSweepParams) -> dict[str, float]:
    """The metrics: the base's perplexity, each method's ratio to it at the narrowest point, and at
    how many points GPTQ is at or below round-to-nearest."""
    found = {(r["method"], r["grid"], r["bits"], r["group_size"]): r["ratio_to_base"] for r in rows}
    narrow = min(params.points, key=lambda point: (point.bits, -point.group_size))
    pairs = [
        (
            found["gptq", grid, one.bits, one.group_size],
            found["rtn", grid, one.bits, one.group_size],
        )
        for one in params.points
        for grid in ("symmetric", "asymmetric")
    ]
    ratios = {
        f"ratio_{method}_{grid}_narrowest": found[method, grid, narrow.bits, narrow.group_size]
        for method in METHODS
        for grid in ("symmetric", "asymmetric")
    }
    better = sum(gptq <= rtn for gptq, rtn in pairs)
    return {
        "token_perplexity_base": rows[0]["token_perplexity"],
        **ratios,
        "points": len(pairs),
        "points_gptq_at_or_below_rtn": better,
    }


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows with `ratio_to_base`; the first is the base."""
    base = rows[0]["token_perplexity"]
    return [row | {"ratio_to_base": row["token_perplexity"] / base} for row in rows]


def _row(
    folder: Path,
    calibration: Calibration,
    windows: dict[str, Tensor],
    recipe: Recipe | None,
    threads: int,
) -> Row:
    torch.set_num_threads(max(threads, 1))
    model = load_model(folder, threads)
    bits = 16.0 if recipe is None else _put_quantized(model, folder, calibration, recipe)
    score = perplexity(model, windows, batch=1).token
    if recipe is None:
        return _cells("base", "none", 16, 0, bits, score)
    grid = "symmetric" if recipe.params.symmetric else "asymmetric"
    shape = recipe.params
    return _cells(recipe.method, grid, shape.bits, shape.group_size, bits, score)


def _cells(
    method: str, grid: str, bits: int, group_size: int, bits_per_weight: float, score: float
) -> Row:
    return {
        "method": method,
        "grid": grid,
        "bits": bits,
        "group_size": group_size,
        "bits_per_weight": bits_per_weight,
        "token_perplexity": score,
    }


@torch.no_grad()
def _put_quantized(
    model: nn.Module, folder: Path, calibration: Calibration, recipe: Recipe
) -> float:
    """Replace the weights of every linear layer in the blocks; returns bits a weight."""
    checkpoint = open_checkpoint(folder)
    bits, weights = 0.0, 0
    for group in linear_groups(checkpoint):
        statistics = calibration.load(group) if recipe.method == "gptq" else {}
        quantized, rows = quantized_group(checkpoint, group, statistics, recipe)
        bits += quantized.bits_per_weight() * quantized.codes.numel()
        weights += quantized.codes.numel()
        values = quantized.dequantize().split(rows)
        for layer, value in zip(group.layers, values, strict=True):
            weight = model.get_submodule(layer).weight
            weight.copy_(value.t() if group.transposed else value)
    return bits / weights
