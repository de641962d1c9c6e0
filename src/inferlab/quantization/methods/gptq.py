"""GPTQ, our own, from the Hessians that `calibrate` stored: no forward pass of its own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from inferlab.errors import InferlabError
from inferlab.models.adapters import linear_groups
from inferlab.params import section
from inferlab.quantization.affine import Grid, Quantized, minmax_grid, searched_grid
from inferlab.quantization.driver import Job, Layer, Report, packed_format, quantize_checkpoint
from inferlab.quantization.formats import storable_grid
from inferlab.quantization.gptq import Solution, damped, solve, warn_of_damping
from inferlab.quantization.refine import refine


@section
class GptqParams:
    """The section `quantize.gptq`."""

    bits: Literal[2, 3, 4, 8]
    group_size: Annotated[int, Field(ge=0)]
    symmetric: bool
    token_weights: Literal["none", "gradient"]
    damping: Annotated[float, Field(gt=0, le=1)]
    activation_order: bool
    scale_search: Literal["none", "weight", "hessian"]
    signed_scales: bool
    refinements: Annotated[int, Field(ge=0)]


def run(job: Job, params: GptqParams) -> Report:
    """Quantize with error compensation and save in the GPTQ format.

    Raises InferlabError before any work when the calibration has no gradients but they are needed.
    """
    shape = params.bits, params.group_size, params.symmetric
    chosen_hessian(job.calibration.load(linear_groups(job.checkpoint)[0]), params)

    def solver(layer: Layer, group_size: int) -> tuple[Quantized, bool]:
        hessian = chosen_hessian(layer.statistics, params)
        grid = first_grid(layer.weight, hessian, params, group_size)
        solution = solve_layer(layer.weight, hessian, grid, params)
        warn_of_damping(layer.name, hessian, params.damping, solution.damping)
        return solution.quantized, solution.fell_back

    return quantize_checkpoint(job, solver, packed_format(job, *shape), *shape)


def chosen_hessian(statistics: Mapping[str, Tensor], params: GptqParams) -> Tensor:
    """The Hessian [in, in] that `token_weights` asks for: of all tokens alike, or weighted."""
    if params.token_weights == "none":
        return statistics["hessian"]
    if "weighted_hessian" not in statistics:
        raise InferlabError(
            "gptq.token_weights is 'gradient', but the calibration was made without gradients; set "
            "calibrate.gradients to true, or token_weights to none (params.yaml)"
        )
    return statistics["weighted_hessian"]


def first_grid(weight: Tensor, hessian: Tensor, params: GptqParams, group_size: int) -> Grid:
    """The scales before any column is quantized. `weight`: [rows, columns], fp32."""
    shape = params.bits, group_size, params.symmetric
    if params.scale_search == "none":
        return storable_grid(minmax_grid(weight, *shape))
    importance = hessian.diagonal() if params.scale_search == "hessian" else None
    return storable_grid(searched_grid(weight, *shape, importance, params.signed_scales))


def solve_layer(weight: Tensor, hessian: Tensor, grid: Grid, params: GptqParams) -> Solution:
    """GPTQ on `grid`, then the refinements that are asked for."""
    solution = solve(weight, hessian, grid, params.damping, params.activation_order)
    if solution.fell_back or not params.refinements:
        return solution
    refined = refine(
        weight, solution.quantized, damped(hessian, solution.damping), params.refinements
    )
    return replace(solution, quantized=refined)
