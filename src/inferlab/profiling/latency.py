"""How long operations take, measured in turns so that a shared machine slows all of them alike."""

import time
from collections.abc import Callable, Hashable, Mapping
from statistics import median
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)
SHORTEST = 0.03
"""Seconds that one turn lasts at least: a quick call is repeated that often."""


def median_ms(calls: Mapping[Name, Callable[[], object]], rounds: int) -> dict[Name, float]:
    """Median over `rounds` of the milliseconds of one call, by name.

    In each round every call has its turn; a round before the first warms up and does not count.
    """
    repeats = {name: max(1, int(SHORTEST / _seconds(call, 1))) for name, call in calls.items()}
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(1000 * _seconds(call, repeats[name]))
    return {name: median(values) for name, values in times.items()}


def _seconds(call: Callable[[], object], repeats: int) -> float:
    """Of one call, mean of `repeats`."""
    _wait()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    _wait()
    return (time.perf_counter() - start) / repeats


def _wait() -> None:
    """Until a CUDA device, which works on after a call returns, is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
