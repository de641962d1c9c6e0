"""Round-to-nearest: every weight to its nearest code, no calibration. The baseline of the rest."""

from typing import Annotated, Literal

from pydantic import Field

from inferlab.params import section
from inferlab.quantization.affine import Quantized, minmax_grid, quantize, searched_grid
from inferlab.quantization.driver import Job, Layer, Report, packed_format, quantize_checkpoint
from inferlab.quantization.formats import storable_grid


@section
class NearestParams:
    """The section `quantize.int4_rtn`."""

    bits: Literal[2, 3, 4, 8]
    group_size: Annotated[int, Field(ge=0)]
    symmetric: bool
    scale_search: bool


def run(job: Job, params: NearestParams) -> Report:
    """Quantize on the grid that covers each group, or on the best of several (`scale_search`)."""
    shape = params.bits, params.group_size, params.symmetric

    def solve(layer: Layer, group_size: int) -> tuple[Quantized, bool]:
        make = searched_grid if params.scale_search else minmax_grid
        grid = storable_grid(make(layer.weight, params.bits, group_size, params.symmetric))
        return quantize(layer.weight, grid), False

    return quantize_checkpoint(job, solve, packed_format(job, *shape), *shape)
