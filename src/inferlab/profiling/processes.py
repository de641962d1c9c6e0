"""What running processes use of the machine, seen from outside: cores, memory, and a GPU's share.

Memory is resident memory, so that a process counts as if it ran alone: proportional shares (PSS)
would make it smaller for every neighbour that maps the same libraries or weights. Linux only.
"""

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import psutil

KIB = 1024
SAMPLE_SECONDS = 0.1


@dataclass(frozen=True)
class Usage:
    """`cpu_share`: of the cores that this process may use, busy with the tree, 0 to 1.

    `peak_bytes`: resident at most since the processes started; pages that several of the tree
    share are counted for each. `gpu_share`: of the time in which the first GPU was busy, 0 to 1;
    None without a GPU or the library that asks it.
    """

    cpu_share: float
    peak_bytes: int
    gpu_share: float | None


class Meter:
    """Watches a process and all that it started, from here until `stop`."""

    def __init__(self, pid: int) -> None:
        """Raises psutil.NoSuchProcess when the process is gone, as `stop` does."""
        self._pid = pid
        self._gpu: list[float] = []
        self._stopped = threading.Event()
        if (read := _gpu_reader()) is not None:
            self._gpu.append(read())  # a load may be over before the first sample
            threading.Thread(target=self._sample, args=(read,), daemon=True).start()
        self._busy = _cpu_seconds(pid)
        self._begin = time.perf_counter()

    def stop(self) -> Usage:
        """What was used since the start."""
        seconds = time.perf_counter() - self._begin
        busy = _cpu_seconds(self._pid) - self._busy
        self._stopped.set()
        peak = sum(_peak_bytes(one.pid) for one in _tree(self._pid))
        cores = len(os.sched_getaffinity(0))
        return Usage(busy / (seconds * cores), peak, fmean(self._gpu) if self._gpu else None)

    def _sample(self, read: Callable[[], float]) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            self._gpu.append(read())


def _tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _cpu_seconds(pid: int) -> float:
    """Of all processes of the tree; of those that have ended, what their parents were told."""
    return sum(sum(one.cpu_times()[:4]) for one in _tree(pid))


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+)", status, re.MULTILINE)
    return KIB * int(found[1]) if found else 0  # a process that waits to be collected has none


def _gpu_reader() -> Callable[[], float] | None:
    """Asks NVML for the share of the last moments in which the first GPU was busy."""
    try:
        import pynvml

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
    except ImportError:
        return None
    except pynvml.NVMLError:
        return None
    return lambda: pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
