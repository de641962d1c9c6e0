"""torch.compile as the fuser that people would use, where this machine can compile at all."""

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger("inferlab.fusion")
OPTIONS = {"cpp.enable_kernel_profile": True}
"""So that the profiler sees compiled loops; costs them a note of their start and end."""


def compilable(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled at its first call for shapes that never change."""
    return torch.compile(function, dynamic=False, fullgraph=True, options=OPTIONS)


def compile_seconds(call: Callable[[], Any]) -> float | None:
    """Seconds that the first run of a compiled call takes; None, said once, where it fails."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    start = time.perf_counter()
    try:
        call()
    except (TorchDynamoException, CppCompileError, InvalidCxxCompiler) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "no message")
        log.warning("torch.compile does not work here, so it is left out: %s", first)
        return None
    return time.perf_counter() - start


def fresh_cache(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Compile everything anew meanwhile, in a folder that is removed: else a second run is free.

    Does nothing unless `wanted`; what it needs takes seconds to import.
    """
    if not wanted:
        return contextlib.nullcontext()
    from torch._inductor.utils import fresh_cache as fresh

    return fresh()
