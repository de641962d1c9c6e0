"""GPTQ, our own, from the Hessians that `calibrate` stored: no forward pass of its own."""

from typing import Annotated, Literal

from pydantic import Field

from inferlab.params import section
from inferlab.quantization.affine import Quantized, minmax_grid, searched_grid
from inferlab.quantization.driver import Job, Layer, Report, packed_format, quantize_checkpoint
from inferlab.quantization.formats import storable_grid
from inferlab.quantization.gptq import solve as solve_gptq


@section
class GptqParams:
    """The section `quantize.gptq`."""

    bits: Literal[2, 3, 4, 8]
    group_size: Annotated[int, Field(ge=0)]
    symmetric: bool
    damping: Annotated[float, Field(gt=0, le=1)]
    activation_order: bool
    scale_search: Literal["none", "weight", "hessian"]


def run(job: Job, params: GptqParams) -> Report:
    """Quantize with error compensation and save in the GPTQ format."""
    shape = params.bits, params.group_size, params.symmetric

    def solve(layer: Layer, group_size: int) -> tuple[Quantized, bool]:
        hessian = layer.statistics["hessian"]
        if params.scale_search == "none":
            grid = minmax_grid(layer.weight, params.bits, group_size, params.symmetric)
        else:
            importance = hessian.diagonal() if params.scale_search == "hessian" else None
            grid = searched_grid(
                layer.weight, params.bits, group_size, params.symmetric, importance
            )
        solution = solve_gptq(
            layer.weight, hessian, storable_grid(grid), params.damping, params.activation_order
        )
        return solution.quantized, solution.fell_back

    return quantize_checkpoint(job, solve, packed_format(job, *shape), *shape)
