"""The log of a recording scheduler: measured steps, and the time spent outside the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from inferlab.errors import InferlabError
from inferlab.serving.load import Outcome
from inferlab.serving.metrics import succeeded, ttft


@dataclass(frozen=True)
class Steps:
    """Measured steps in order.

    `seconds` [steps] from the start of a step to the start of the next, or to its own end where
    nothing was left to do; `features` [steps, 5] as in `fit.TERMS`.
    """

    seconds: np.ndarray
    features: np.ndarray

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class Window:
    """What a load left in the log: its steps, and the mean TTFT inside the engine in seconds.

    preemptions: how often a request lost its blocks, to be computed anew.
    """

    steps: Steps
    engine_ttft: float
    preemptions: int = 0


def read_window(log: Path, begin: float, end: float) -> Window:
    """The part of a log between two readings of the monotonic clock.

    Raises InferlabError when it holds no step, or not one first token for each arrival.
    """
    added: list[float] = []
    rows: list[list[float]] = []
    for line in log.read_text().splitlines():
        kind, *fields = line.split(",")
        values = [float(field) for field in fields]
        if begin <= values[0] <= end:
            (added if kind == "add" else rows).append(values[0] if kind == "add" else values)
    if not rows:
        raise InferlabError(f"{log} holds no step of a load; was the scheduler replaced?")
    table = np.array(rows)
    start, stop, tokens, sequences, context, half_pairs, preempted, first_tokens, left = table.T
    if int(first_tokens.sum()) != len(added):
        raise InferlabError(
            f"{log}: {len(added)} requests came and {int(first_tokens.sum())} got a first token; "
            f"requests of another load are in between"
        )
    following = np.append(start[1:], stop[-1])
    seconds = np.where(left > 0, following, stop) - start
    features = np.stack([np.ones_like(start), tokens, sequences, context, half_pairs / 2], axis=1)
    engine_ttft = float((stop * first_tokens).sum() / len(added) - np.mean(added))
    return Window(Steps(seconds, features), engine_ttft, int(preempted.sum()))


def together(parts: Sequence[Steps]) -> Steps:
    """All steps of several loads."""
    return Steps(
        np.concatenate([one.seconds for one in parts]),
        np.concatenate([one.features for one in parts]),
    )


def front_end_seconds(outcomes: Sequence[Outcome], engine_ttft: float) -> float:
    """Mean seconds that a request spends outside the engine before its first token, at least 0."""
    return max(0.0, float(np.mean([ttft(one) for one in succeeded(outcomes)])) - engine_ttft)
