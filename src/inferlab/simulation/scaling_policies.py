"""Policies that say how many instances a fleet should have, for several days side by side."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Fixed:
    """The same number all day."""

    instances: float
    cooled: bool = True

    def wanted(self, minute: int, p95_ms: Floats, committed: Floats) -> Floats:
        """Always `instances` [runs]."""
        return np.full_like(committed, self.instances)


@dataclass(frozen=True)
class Reactive:
    """More when the P95 of the time to first token is above `high_ms`, one less below `low_ms`.

    It grows by the share `growth` of what is there or on its way, and by one at least.
    """

    high_ms: float
    low_ms: float
    growth: float
    cooled: bool = True

    def wanted(self, minute: int, p95_ms: Floats, committed: Floats) -> Floats:
        """Instances wanted [runs]."""
        more = committed + np.maximum(1, np.ceil(self.growth * committed))
        less = np.where(p95_ms < self.low_ms, committed - 1, committed)
        return np.where(p95_ms > self.high_ms, more, less)


@dataclass(frozen=True)
class Predictive:
    """What the forecast load needs, and a margin. needed: instances [runs, minutes] by forecast."""

    needed: Floats
    margin: float
    cooled: bool = True

    def wanted(self, minute: int, p95_ms: Floats, committed: Floats) -> Floats:
        """Instances wanted [runs]."""
        return np.ceil(self.needed[:, minute] * (1 + self.margin))


@dataclass(frozen=True)
class Hybrid:
    """The forecast, corrected: more when the P95 is high, and no less unless it is low."""

    predictive: Predictive
    reactive: Reactive
    cooled: bool = True

    def wanted(self, minute: int, p95_ms: Floats, committed: Floats) -> Floats:
        """Instances wanted [runs]."""
        forecast = self.predictive.wanted(minute, p95_ms, committed)
        seen = self.reactive.wanted(minute, p95_ms, committed)
        kept = np.where(p95_ms < self.reactive.low_ms, forecast, np.maximum(forecast, committed))
        return np.where(seen > committed, np.maximum(kept, seen), kept)


@dataclass(frozen=True)
class Schedule:
    """A plan made with the whole day known: the bound. instances: [runs, minutes]."""

    instances: Floats
    cooled: bool = False

    def wanted(self, minute: int, p95_ms: Floats, committed: Floats) -> Floats:
        """What the plan says [runs]."""
        return self.instances[:, minute]


def ahead_of(needed: Floats, minutes: int) -> Floats:
    """The most that is needed now or within so many minutes [runs, minutes]: launches take time."""
    later = [
        np.pad(needed, ((0, 0), (0, shift)), mode="edge")[:, shift:] for shift in range(minutes + 1)
    ]
    return np.max(later, 0)


def without_short_gaps(needed: Floats, gap: int) -> Floats:
    """Whole instances [runs, minutes], kept through gaps of at most `gap` minutes.

    Instance k is needed while the load needs k or more. To keep it over a gap no longer than what
    is billed for its launch costs no more than to launch it again: the cheapest plan that meets
    every minute's need.
    """
    minutes = needed.shape[1]
    plan = np.zeros_like(needed)
    for level in range(1, int(needed.max()) + 1):
        busy = needed >= level
        places = np.where(busy, np.arange(minutes), -1)
        last = np.maximum.accumulate(places, 1)
        upcoming = np.where(busy, np.arange(minutes), 2 * minutes)
        following = np.minimum.accumulate(upcoming[:, ::-1], 1)[:, ::-1]
        within = (last >= 0) & (following < minutes) & (following - last - 1 <= gap)
        plan += busy | within
    return plan


def trailing_most(values: Floats, minutes: int) -> Floats:
    """The most of each minute and so many before it [runs, minutes]."""
    return ahead_of(values[:, ::-1], minutes)[:, ::-1]
