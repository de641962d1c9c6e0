"""The most memory that an operation holds at once, measured in two ways.

`peak_allocated` reads torch's allocations off its profiler (or its CUDA allocator): exact, but
blind to what libraries take by themselves. `peak_resident` asks the kernel what a child process of
its own had resident at most: everything, to some MiB.
"""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

Result = TypeVar("Result")
KIB = 1024


def peak_allocated(operation: Callable[[], Result], device: str = "cpu") -> tuple[int, Result]:
    """Bytes of tensors that `operation` holds at its peak beyond those there before; its result."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = operation()
        return torch.cuda.max_memory_allocated() - before, result
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = operation()
    return peak_of(profiled), result


def peak_of(profiled: profile) -> int:
    """The highest running sum of the allocations and releases that a profile recorded, in bytes."""
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def peak_resident(prepare: Callable[..., Callable[[], Any]], *arguments: Any) -> int:
    """Bytes by which the resident memory of a fresh process rises at most during an operation.

    `prepare(*arguments)` runs in the child, makes the inputs and returns the operation; both it and
    its arguments must be importable there. Linux only.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_measure, args=(sender, prepare, arguments))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        child.join()


def _measure(sender: Any, prepare: Callable[..., Callable[[], Any]], arguments: tuple) -> None:
    operation = prepare(*arguments)
    with torch.inference_mode():
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark, VmHWM
        before = _status("VmRSS")
        operation()
        sender.send(_status("VmHWM") - before)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return KIB * next(int(line.split()[1]) for line in lines if line.startswith(field))
