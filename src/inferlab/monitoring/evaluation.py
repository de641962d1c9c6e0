"""Measures over a recording, by the rules of Prometheus: rate() with its extrapolation,
histogram_quantile() with its interpolation, `for:` with its pending time.

Source: promql/functions.go (extrapolatedRate) and promql/quantile.go (bucketQuantile) of
Prometheus 2. tests/test_monitoring.py and the stage itself compare alert times with promtool.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inferlab.monitoring.measures import Latest, Measure, Quantile, Rate, Ratio
from inferlab.monitoring.recording import Recording, Series
from inferlab.monitoring.settings import Alert

AGGREGATES = {"sum": math.fsum, "min": min, "max": max}


@dataclass(frozen=True)
class Episode:
    """One time that an alert's condition held. Seconds; None: never fired, or not cleared yet."""

    alert: str
    since: float
    fired: float | None
    cleared: float | None


def values(measure: Measure, recording: Recording, closed: bool = True) -> np.ndarray:
    """The measure at every tick [ticks]; NaN where it has no value.

    `closed`: whether a window holds the sample at its very beginning, as Prometheus 2 has it;
    Prometheus 3 leaves it out.
    """
    return np.array([_value(measure, recording, tick, closed) for tick in range(recording.ticks)])


def episodes(name: str, alert: Alert, measured: np.ndarray, interval_s: float) -> list[Episode]:
    """Every time that the condition held, with when it fired after `for_s` seconds of holding."""
    found: list[Episode] = []
    since: float | None = None
    fired: float | None = None
    for tick, holds in enumerate(exceeds(alert, measured)):
        now = tick * interval_s
        if holds:
            since = now if since is None else since
            if fired is None and now - since >= alert.for_s:
                fired = now
        elif since is not None:
            found.append(Episode(name, since, fired, now))
            since = fired = None
    return found + ([Episode(name, since, fired, None)] if since is not None else [])


def exceeds(alert: Alert, measured: np.ndarray) -> np.ndarray:
    """At which ticks the condition holds; never where there is no value."""
    with np.errstate(invalid="ignore"):
        if alert.above is not None:
            return measured > alert.above
        return measured < alert.below


def _value(measure: Measure, recording: Recording, tick: int, closed: bool) -> float:
    match measure:
        case Latest():
            now = [one.values[tick] for one in recording.named(measure.metric, measure.labels)]
            present = [value for value in now if not math.isnan(value)]
            return AGGREGATES[measure.aggregate](present) if present else math.nan
        case Rate():
            series = recording.named(measure.metric, measure.labels)
            return _sum_of_rates(series, recording.interval_s, tick, measure.window_s, closed)
        case Ratio():
            over = (recording.interval_s, tick, measure.window_s, closed)
            part = _sum_of_rates(recording.named(measure.metric, measure.labels), *over)
            whole = _sum_of_rates(recording.named(measure.of, measure.of_labels), *over)
            with np.errstate(divide="ignore", invalid="ignore"):
                return float(np.divide(part, whole))
        case Quantile():
            return _quantile(measure, recording, tick, closed)


def _sum_of_rates(
    series: Sequence[Series], interval_s: float, tick: int, window_s: float, closed: bool
) -> float:
    """NaN when no series has a rate."""
    rates = [rate(one.values, interval_s, tick, window_s, closed) for one in series]
    present = [value for value in rates if not math.isnan(value)]
    return math.fsum(present) if present else math.nan


def rate(
    counter: np.ndarray, interval_s: float, tick: int, window_s: float, closed: bool = True
) -> float:
    """The growth a second of `counter` [ticks] over the window that ends at `tick`.

    Resets are taken out, and the growth is extrapolated to the window's ends unless the samples
    stop well before them. NaN with fewer than two samples.
    """
    first = _first_tick(interval_s, tick, window_s, closed)
    ticks = [n for n in range(first, tick + 1) if not math.isnan(counter[n])]
    if len(ticks) < 2:
        return math.nan
    samples = counter[ticks]
    steps = np.diff(samples)
    growth = samples[-1] - samples[0] + samples[:-1][steps < 0].sum()
    sampled = (ticks[-1] - ticks[0]) * interval_s
    between = sampled / (len(ticks) - 1)
    to_start = window_s - (tick - ticks[0]) * interval_s
    to_end = (tick - ticks[-1]) * interval_s
    if growth > 0 and samples[0] >= 0:
        # A counter cannot have been below zero, so it is not extrapolated to before its birth.
        to_start = min(to_start, sampled * samples[0] / growth)
    threshold = 1.1 * between
    whole = sampled + sum(one if one < threshold else between / 2 for one in (to_start, to_end))
    # In Prometheus' order of operations, which decides on which side of a threshold a tie falls.
    return float(growth * (whole / sampled / window_s))


def _first_tick(interval_s: float, tick: int, window_s: float, closed: bool) -> int:
    """The first tick in the window; in whole milliseconds, so that no rounding decides it."""
    interval, window = round(1000 * interval_s), round(1000 * window_s)
    start = tick * interval - window
    first = -(-start // interval)
    if not closed and first * interval == start:
        first += 1
    return max(first, 0)


def _quantile(measure: Quantile, recording: Recording, tick: int, closed: bool) -> float:
    counts: dict[float, float] = {}
    for one in recording.named(f"{measure.metric}_bucket", measure.labels):
        growth = rate(one.values, recording.interval_s, tick, measure.window_s, closed)
        if not math.isnan(growth):
            bound = float(one.labels["le"])
            counts[bound] = counts.get(bound, 0.0) + growth
    return bucket_quantile(measure.quantile, counts)


def bucket_quantile(quantile: float, counts: dict[float, float]) -> float:
    """The quantile of a histogram from cumulative counts by upper bound, linear in a bucket.

    NaN when nothing was observed or the bucket of +Inf is missing. A quantile beyond the last
    finite bound is given as that bound: it cannot be known.
    """
    bounds = sorted(counts)
    if len(bounds) < 2 or not math.isinf(bounds[-1]):
        return math.nan
    below = np.maximum.accumulate([counts[bound] for bound in bounds])
    if below[-1] <= 0:
        return math.nan
    rank = quantile * below[-1]
    place = min(int(np.searchsorted(below, rank)), len(bounds) - 1)
    if place == len(bounds) - 1:
        return bounds[-2]
    if place == 0 and bounds[0] <= 0:
        return bounds[0]
    start, before = (bounds[place - 1], below[place - 1]) if place else (0.0, 0.0)
    share = (rank - before) / (below[place] - before)
    return float(start + (bounds[place] - start) * share)
