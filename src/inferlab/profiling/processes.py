"""What running processes use of the machine, seen from outside: processors, memory, GPUs.

By psutil, and by NVML where it and a GPU are there. Memory is resident memory, so that a process
counts as if it ran alone: proportional shares (PSS) would make it smaller for every neighbour that
maps the same libraries or weights, and pages that several of a tree share count for each. Linux.
"""

import contextlib
import importlib.util
import os
import re
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import ModuleType

import psutil

KIB = 1024
SAMPLE_SECONDS = 0.1


@dataclass(frozen=True)
class Reading:
    """At one moment. `cores`: processors kept busy since the last reading (1.0 is one core);
    `memory_bytes`: resident, all processes; `gpu`: share of time (0 to 1) that the busiest GPU
    ran a kernel, `gpu_bytes`: memory taken on all GPUs, both None without one."""

    cores: float
    memory_bytes: int
    gpu: float | None
    gpu_bytes: int | None


@dataclass(frozen=True)
class Usage:
    """Over a stretch. `cpu_share`: of the cores that this process may use, busy with the tree;
    `peak_bytes`: resident at most since the processes started; `gpu_share`: as `Reading.gpu`, the
    mean over the stretch, None without a GPU or the library that asks it."""

    cpu_share: float
    peak_bytes: int
    gpu_share: float | None


class Meter:
    """Reads the use of a process and all its descendants; every reading closes an interval.

    Raises psutil.NoSuchProcess for a process that is gone; one that goes later uses nothing.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seconds: dict[psutil.Process, float] = {}
        self._nvml = nvml()
        self._before = 0.0

    def read(self, now: float) -> Reading:
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
        return Reading(cores, memory, *_gpus(self._nvml))

    def gpu_share(self) -> float | None:
        """Of the last moments, as `Reading.gpu`."""
        return _gpus(self._nvml)[0]

    def peak_bytes(self) -> int:
        """Resident at most, each process since its start."""
        return sum(_peak_bytes(one.pid) for one in descendants(self._root))


class Watch:
    """Watches a process and all its descendants from here until `stop`."""

    def __init__(self, pid: int) -> None:
        """Raises psutil.NoSuchProcess for a process that is gone."""
        self._meter = Meter(pid)
        self._gpu: list[float] = []
        self._stopped = threading.Event()
        if (share := self._meter.gpu_share()) is not None:
            self._gpu.append(share)  # a load may be over before the first sample
            threading.Thread(target=self._sample, daemon=True).start()
        self._begin = time.perf_counter()
        self._meter.read(0.0)

    def stop(self) -> Usage:
        """What was used since the start."""
        reading = self._meter.read(time.perf_counter() - self._begin)
        self._stopped.set()
        share = reading.cores / len(os.sched_getaffinity(0))
        return Usage(share, self._meter.peak_bytes(), fmean(self._gpu) if self._gpu else None)

    def _sample(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            self._gpu.append(self._meter.gpu_share() or 0.0)


def descendants(root: psutil.Process) -> list[psutil.Process]:
    """The process and all that descend from it; empty when it is gone."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0
    found = re.search(r"^VmHWM:\s+(\d+)", status, re.MULTILINE)
    return KIB * int(found[1]) if found else 0  # a process that waits to be collected has none


def nvml() -> ModuleType | None:
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
    library = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # it looks itself up
    spec.loader.exec_module(library)
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    return library


def _gpus(library: ModuleType | None) -> tuple[float | None, int | None]:
    count = library.nvmlDeviceGetCount() if library else 0
    if not library or not count:
        return None, None
    handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    shares = [library.nvmlDeviceGetUtilizationRates(one).gpu / 100 for one in handles]
    return max(shares), sum(library.nvmlDeviceGetMemoryInfo(one).used for one in handles)
