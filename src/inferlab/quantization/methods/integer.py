"""W8A8: int8 weights, one scale a tensor or a channel; activations are quantized when run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field

from inferlab.models.adapters import LinearGroup, adapter_for, layer_names
from inferlab.params import section
from inferlab.quantization.affine import Grid, Quantized, minmax_grid, quantize, searched_grid
from inferlab.quantization.driver import Job, Layer, Report, quantize_checkpoint
from inferlab.quantization.formats import Dequantized, Int8Format, storable_grid
from inferlab.quantization.gptq import DAMPING, warn_of_damping
from inferlab.quantization.gptq import solve as solve_gptq
from inferlab.quantization.smoothing import fixed, searched, smooth

BITS = 8


@section
class IntegerParams:
    """The sections `quantize.int8_tensor` and `quantize.int8`."""

    granularity: Literal["tensor", "channel"]
    scale_search: bool
    smoothing: Literal["none", "alpha", "searched"]
    alpha: Annotated[float, Field(ge=0, le=1)]
    compensation: bool


def run(job: Job, params: IntegerParams) -> Report:
    """Quantize with a symmetric 8-bit grid and save as compressed-tensors.

    `smoothing` moves outliers of the inputs into the weights first; `compensation` lets columns
    absorb the rounding of those before them, as GPTQ does.
    """
    return run_smoothed(smoothed(job, params), params)


def smoothed(job: Job, params: IntegerParams) -> Job:
    """The job on an equivalent checkpoint with tamer inputs, where `params` ask for it."""
    if params.smoothing == "none" or adapter_for(job.checkpoint).transposed:
        return job
    choose = searched if params.smoothing == "searched" else fixed(params.alpha)
    checkpoint, calibration = smooth(job.checkpoint, job.calibration, choose)
    return replace(job, checkpoint=checkpoint, calibration=calibration)


def run_smoothed(job: Job, params: IntegerParams, kept: Sequence[LinearGroup] = ()) -> Report:
    """Quantize a job that is smoothed already; the groups `kept` stay in 16 bits."""
    adapter = adapter_for(job.checkpoint)
    per_channel = params.granularity == "channel"
    names = {group.name for group in kept}
    int8 = Int8Format(per_channel, tuple(layer_names(list(kept))))
    target = Dequantized(True) if adapter.transposed else int8

    def solve(layer: Layer, group_size: int) -> tuple[Quantized, bool]:
        make = searched_grid if params.scale_search else minmax_grid
        if per_channel:
            grid = make(layer.weight, BITS, group_size, True)
        else:
            scales = [
                make(part.reshape(1, -1), BITS, part.numel(), True).scale.expand(len(part), 1)
                for part in layer.weight.split(layer.rows)
            ]
            scale = torch.cat(scales)
            grid = Grid(scale, torch.full_like(scale, 2 ** (BITS - 1)), BITS, group_size)
        grid = storable_grid(grid)
        if params.compensation:
            hessian = layer.statistics["hessian"]
            solution = solve_gptq(layer.weight, hessian, grid, DAMPING)
            warn_of_damping(layer.name, hessian, DAMPING, solution.damping)
            return solution.quantized, solution.fell_back
        return quantize(layer.weight, grid), False

    return quantize_checkpoint(job, solve, target, BITS, 0, symmetric=True, kept=names)
