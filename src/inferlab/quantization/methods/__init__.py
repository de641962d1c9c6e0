"""The methods of quantization, one file each. A variant's name picks its method.

To add a method: a file with a params section and a function `(Job, params) -> Report`, one line in
`METHODS`, its section under `quantize` in params.yaml, and its name in dvc.yaml's matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inferlab.quantization.driver import Job, Report
from inferlab.quantization.methods import (
    bitsandbytes,
    gptq,
    gptqmodel,
    integer,
    mixed,
    nearest,
)


@dataclass(frozen=True)
class Method:
    """The params section that a method reads, and the function that runs it."""

    params: type
    run: Callable[[Job, Any], Report]


METHODS = {
    "int8_tensor": Method(integer.IntegerParams, integer.run),
    "int8": Method(integer.IntegerParams, integer.run),
    "mixed": Method(mixed.MixedParams, mixed.run),
    "int4_rtn": Method(nearest.NearestParams, nearest.run),
    "nf4": Method(bitsandbytes.Nf4Params, bitsandbytes.run),
    "gptq": Method(gptq.GptqParams, gptq.run),
    "gptqmodel": Method(gptqmodel.GptqModelParams, gptqmodel.run),
}
