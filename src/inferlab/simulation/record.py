"""What a run leaves behind: times of every request, counts, and the checks that hold in any run."""

from dataclasses import dataclass, field

import numpy as np

from inferlab.simulation.cost import PICOSECONDS
from inferlab.simulation.gaps import Gaps
from inferlab.simulation.workload import Workload

WARM_UP = 0.1
"""The first share of requests, which finds the system emptier than it will be; not averaged."""


@dataclass
class Record:
    """Times [requests] in picoseconds, -1 where a request never got there.

    `last` is the last token's time; `finish` is when the request is over, which is later where a
    batch ends as one. `present` is the integral of the number of requests in the system over
    time, kept by the engine's own clock.
    """

    workload: Workload
    arrival: np.ndarray
    first: np.ndarray
    last: np.ndarray
    finish: np.ndarray
    gaps: Gaps = field(default_factory=Gaps)
    steps: int = 0
    tokens_out: int = 0
    preemptions: int = 0
    rejected: int = 0
    present: int = 0
    padding: int = 0

    @classmethod
    def of(cls, workload: Workload) -> "Record":
        """An empty record."""
        times = [np.full(len(workload), -1, dtype=np.int64) for _ in range(4)]
        return cls(workload, *times)

    @property
    def served(self) -> np.ndarray:
        """Which requests [requests] were served."""
        return self.finish >= 0

    def check(self) -> None:
        """Assert conservation: every request and token accounted for, and Little's law exactly."""
        served = self.served
        assert int(served.sum()) + self.rejected == len(self.workload)
        assert self.tokens_out == int(self.workload.outputs[served].sum())
        latencies = self.finish[served] - self.arrival[served]
        assert self.present == int(latencies.sum(dtype=object) if len(latencies) else 0)
        ordered = (self.arrival <= self.first) & (self.first <= self.last)
        assert bool((ordered & (self.last <= self.finish))[served].all())

    def same_as(self, other: "Record") -> bool:
        """Whether both are equal to the bit."""
        times = ("arrival", "first", "last", "finish")
        counts = ("steps", "tokens_out", "preemptions", "rejected", "present", "padding")
        return (
            all(np.array_equal(getattr(self, name), getattr(other, name)) for name in times)
            and all(getattr(self, name) == getattr(other, name) for name in counts)
            and self.gaps.counts == other.gaps.counts
            and self.gaps.longest == other.gaps.longest
        )


@dataclass(frozen=True)
class Latencies:
    """Seconds [served requests] of those that count, in the order of their index `which`."""

    which: np.ndarray
    ttft: np.ndarray
    tpot: np.ndarray
    e2e: np.ndarray


def latencies(record: Record, front_end: int = 0, skip: float = 0.0) -> Latencies:
    """Of the served requests but for the first `skip` of all, which found an empty system.

    `front_end` picoseconds are spent outside the engine. TPOT of an output of one token is NaN.
    """
    which = np.flatnonzero(record.served)
    which = which[which >= skip * len(record.workload)]
    arrival = record.arrival[which]
    first, last = record.first[which], record.last[which]
    gaps = (record.workload.outputs[which] - 1).astype(float)
    gaps[gaps == 0] = np.nan
    return Latencies(
        which,
        (first - arrival + front_end) / PICOSECONDS,
        (last - first) / gaps / PICOSECONDS,
        (record.finish[which] - arrival + front_end) / PICOSECONDS,
    )


def seconds(record: Record) -> float:
    """From the first arrival to the last finish."""
    served = record.served
    if not served.any():
        return 0.0
    return float(record.finish[served].max() - record.arrival[served].min()) / PICOSECONDS


def requests_per_s(record: Record) -> float:
    """Requests finished a second between the first and the last tenth of them."""
    ends = np.sort(record.finish[record.served])
    low, high = int(0.1 * len(ends)), int(0.9 * len(ends))
    if high <= low or ends[high] == ends[low]:
        return len(ends) / max(seconds(record), 1e-12)
    return float((high - low) / (ends[high] - ends[low]) * PICOSECONDS)


def is_unstable(record: Record, tolerance: float = 0.05) -> bool:
    """Whether the system fell behind: its number of requests grew by `tolerance` an arrival.

    Compared are the middle of the arrivals and their end. Beyond saturation the growth is
    1 − 1/load of each arrival; in a steady state it is noise around 0. A closed loop is never
    unstable, and of fewer than 100 requests there is no telling.
    """
    if record.workload.clients is not None:
        return False
    arrival = record.arrival[record.served]
    finish = np.sort(record.finish[record.served])
    count = len(arrival)
    if count < 100:
        return False
    middle, end = count // 2 - 1, count - 1
    inside = [
        place + 1 - int(np.searchsorted(finish, arrival[place], side="right"))
        for place in (middle, end)
    ]
    return inside[1] - inside[0] > tolerance * (end - middle)
