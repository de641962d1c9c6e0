"""GPTQ, our own, from the Hessians that `calibrate` stored: no forward pass of its own."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from inferlab.params import section
from inferlab.quantization.affine import Grid, Quantized, minmax_grid, searched_grid
from inferlab.quantization.driver import Job, Layer, Report, packed_format, quantize_checkpoint
from inferlab.quantization.formats import storable_grid
from inferlab.quantization.gptq import Solution, damped, solve
from inferlab.quantization.refine import refine


@section
class GptqParams:
    """The section `quantize.gptq`."""

    bits: Literal[2, 3, 4, 8]
    group_size: Annotated[int, Field(ge=0)]
    symmetric: bool
    damping: Annotated[float, Field(gt=0, le=1)]
    activation_order: bool
    scale_search: Literal["none", "weight", "hessian"]
    signed_scales: bool
    refinements: Annotated[int, Field(ge=0)]


def run(job: Job, params: GptqParams) -> Report:
    """Quantize with error compensation and save in the GPTQ format."""
    shape = params.bits, params.group_size, params.symmetric

    def solver(layer: Layer, group_size: int) -> tuple[Quantized, bool]:
        grid = first_grid(layer.weight, layer.statistics["hessian"], params, group_size)
        solution = solve_layer(layer.weight, layer.statistics["hessian"], grid, params)
        return solution.quantized, solution.fell_back

    return quantize_checkpoint(job, solver, packed_format(job, *shape), *shape)


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
