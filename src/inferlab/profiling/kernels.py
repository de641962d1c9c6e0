"""What a call makes torch do, read off torch's profiler: operators, kernels, allocations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from inferlab.profiling.memory import peak_of

Result = TypeVar("Result")
COMPILED = "cpp_fused"
"""What inductor's own loops are called, with its option cpp.enable_kernel_profile."""
PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm")}
"""They do work of their own beside the operators that they call."""
VIEWS = {
    f"aten::{name}"
    for name in (
        *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "as_strided"),
        *("slice", "select", "narrow", "unsqueeze", "squeeze", "unflatten", "flatten", "alias"),
        *(
            "_reshape_alias",
            "detach",
            "detach_",
            "resolve_conj",
            "resolve_neg",
            "lift_fresh",
            "is_same_size",
        ),
        *("empty", "empty_like", "empty_strided", "new_empty", "resize_", "resize_as_", "set_"),
        *("result_type", "can_cast", "contiguous", "to", "view_as", "reshape_as", "expand_as"),
    )
}
"""They touch no numbers unless another operator does it for them: other strides over the same
memory, or memory as it comes."""


@dataclass(frozen=True)
class Work:
    """Of one call. `operators`: those that no other operator called, and compiled kernels.

    `kernels`: passes over data; on a CPU products, compiled loops, and operators that call no
    other working one; on a CUDA device its kernels. `allocations` and `allocated_bytes`: of
    tensors, released ones included. `peak_bytes`: held at once beyond those there before.
    """

    operators: int
    kernels: int
    allocations: int
    allocated_bytes: int
    peak_bytes: int


def profile_work(call: Callable[[], Result], device: str = "cpu") -> tuple[Work, Result]:
    """Run `call` once under the profiler; what it did, and its result."""
    activities = [ProfilerActivity.CPU]
    if device != "cpu":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with profile(activities=activities, profile_memory=True) as profiled:
        result = call()
        if device != "cpu":
            torch.cuda.synchronize()
    events = profiled.events()
    roots = [e for e in events if e.device_type == DeviceType.CPU and e.cpu_parent is None]
    taken = [event.nbytes() for event in _memory(profiled, device) if event.nbytes() > 0]
    if device == "cpu":
        kernels, peak = sum(_kernels(event) for event in roots), peak_of(profiled)
    else:
        on_device = [event for event in events if event.device_type == DeviceType.CUDA]
        kernels = sum(1 for event in on_device if not event.is_user_annotation)
        peak = torch.cuda.max_memory_allocated() - before
    return Work(sum(map(_operators, roots)), kernels, len(taken), sum(taken), peak), result


def saved_bytes(call: Callable[[], Any]) -> int:
    """Bytes of what the forward passes of `call` keep for their gradients, inputs included."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return sum(kept.values())


def _memory(profiled: profile, device: str) -> list[Any]:
    kind = DeviceType.CPU if device == "cpu" else DeviceType.CUDA
    events = profiled.profiler.kineto_results.events()
    return [e for e in events if e.name() == "[memory]" and e.device_type() == kind]


def _operators(event: FunctionEvent) -> int:
    if event.name.startswith("aten::") or COMPILED in event.name:
        return 1
    return sum(_operators(child) for child in event.cpu_children)


def _kernels(event: FunctionEvent) -> int:
    below = sum(_kernels(child) for child in event.cpu_children)
    if event.name in PRODUCTS or COMPILED in event.name:
        return below + 1
    works = event.name.startswith("aten::") and event.name not in VIEWS
    return below or int(works)
