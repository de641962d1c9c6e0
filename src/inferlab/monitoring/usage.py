"""What a server's processes use: processors and memory by psutil, GPUs by NVML."""

import contextlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import psutil


@dataclass(frozen=True)
class Usage:
    """At one moment. `cores`: processors kept busy since the last reading (1.0 is one core);
    `memory_bytes`: resident, all processes; `gpu`: share of time (0 to 1) that the busiest GPU
    ran a kernel, `gpu_bytes`: memory taken on all GPUs, both None without one."""

    cores: float
    memory_bytes: int
    gpu: float | None
    gpu_bytes: int | None


class Meter:
    """Reads the use of a process and all its descendants; every reading closes an interval."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seconds: dict[psutil.Process, float] = {}
        self._nvml = _nvml()
        self._before = 0.0

    def read(self, now: float) -> Usage:
        """The use since the last reading; `now`: seconds on a clock of the caller's."""
        seconds, memory = {}, 0
        for process in descendants(self._root):
            with contextlib.suppress(psutil.Error), process.oneshot():
                times = process.cpu_times()
                seconds[process] = times.user + times.system
                memory += process.memory_info().rss
        # A process that was not there before has used what it used since then.
        busy = sum(used - self._seconds.get(process, 0.0) for process, used in seconds.items())
        elapsed = now - self._before
        cores = busy / elapsed if self._seconds and elapsed > 0 else 0.0
        self._seconds, self._before = seconds, now
        return Usage(cores, memory, *_gpus(self._nvml))


def descendants(root: psutil.Process) -> list[psutil.Process]:
    """The process and all that descend from it; empty when it is gone."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _nvml() -> ModuleType | None:
    """NVML's bindings, initialised; None without a driver or without bindings.

    Bindings are NVIDIA's package, or else the copy that vLLM carries, which is read from its file
    because importing vLLM itself takes seconds.
    """
    spec = importlib.util.find_spec("pynvml")
    if spec is None and (vllm := importlib.util.find_spec("vllm")) is not None and vllm.origin:
        copy = Path(vllm.origin).parent / "third_party/pynvml.py"
        spec = importlib.util.spec_from_file_location("pynvml", copy) if copy.exists() else None
    if spec is None or spec.loader is None:
        return None
    nvml = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # it looks itself up
    spec.loader.exec_module(nvml)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _gpus(nvml: ModuleType | None) -> tuple[float | None, int | None]:
    count = nvml.nvmlDeviceGetCount() if nvml else 0
    if not nvml or not count:
        return None, None
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    shares = [nvml.nvmlDeviceGetUtilizationRates(one).gpu / 100 for one in handles]
    return max(shares), sum(nvml.nvmlDeviceGetMemoryInfo(one).used for one in handles)
