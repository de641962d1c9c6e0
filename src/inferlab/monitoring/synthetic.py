"""Series made from thresholds: some that an alert must fire on, some that it must not."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from inferlab.errors import InferlabError
from inferlab.monitoring.measures import Latest, Quantile, Rate, Ratio, window_s
from inferlab.monitoring.promtool import Case
from inferlab.monitoring.recording import Recording, Series, recording
from inferlab.monitoring.settings import Alert

MARGIN = 0.1
"""How far from the threshold, as a share of it, windowed measures are put."""
START = 1000.0
"""Where counters begin: well above zero, so that no rate is clipped at their birth."""


def threshold_cases(
    name: str, alert: Alert, bounds: Sequence[float], interval_s: float
) -> list[Case]:
    """Beyond its threshold an alert fires, within it is silent, and a moment is too short.

    `bounds`: the finite upper bounds of the histogram's buckets, for a quantile. Raises
    InferlabError when no value of the measure can pass the threshold.
    """
    ticks = 2 + math.ceil((2 * window_s(alert.value) + 2 * alert.for_s) / interval_s) + 2
    inside, beyond = _sides(name, alert, bounds)
    levels = {
        "beyond its threshold": (np.full(ticks, beyond), [name]),
        "within its threshold": (np.full(ticks, inside), []),
    }
    if alert.for_s > interval_s:
        levels["beyond for one tick"] = (np.append(np.full(ticks - 1, inside), beyond), [])
    return [
        Case(
            f"{name}: {what}",
            synthetic(alert.value, level, bounds, interval_s),
            {ticks - 1: firing},
            [name],
        )
        for what, (level, firing) in levels.items()
    ]


def bucket_bounds(measured: Recording, alert: Alert) -> list[float]:
    """The finite bounds of the histogram that a quantile reads, from a recording; else none."""
    if not isinstance(alert.value, Quantile):
        return []
    series = measured.named(f"{alert.value.metric}_bucket", alert.value.labels)
    return sorted({float(one.labels["le"]) for one in series} - {math.inf})


def synthetic(
    measure: Latest | Rate | Ratio | Quantile,
    level: np.ndarray,
    bounds: Sequence[float],
    interval_s: float,
) -> Recording:
    """Series on which the measure is at `level` [ticks]; a quantile's level is a bucket's bound."""
    match measure:
        case Latest():
            series = [Series(measure.metric, measure.labels, level)]
        case Rate():
            series = [_counter(measure.metric, measure.labels, level * interval_s)]
        case Ratio():
            series = _ratio(measure, level)
        case Quantile():
            name = f"{measure.metric}_bucket"
            series = [
                _counter(
                    name,
                    measure.labels | {"le": "+Inf" if math.isinf(bound) else f"{bound:g}"},
                    100.0 * (level <= bound),
                )
                for bound in (*bounds, math.inf)
            ]
    return recording(series, interval_s)


def _ratio(measure: Ratio, level: np.ndarray) -> list[Series]:
    """100 a tick in the whole; the part within it when both are series of one metric."""
    part = _counter(measure.metric, measure.labels, 100 * level)
    contained = measure.metric == measure.of and (
        measure.of_labels.items() <= measure.labels.items()
    )
    if not contained:
        return [part, _counter(measure.of, measure.of_labels, np.full(len(level), 100.0))]
    others = {name: f"not {value}" for name, value in measure.labels.items()}
    return [part, _counter(measure.of, others | measure.of_labels, 100 * (1 - level))]


def _counter(name: str, labels: Mapping[str, str], steps: np.ndarray) -> Series:
    return Series(name, dict(labels), START + np.cumsum(steps))


def _sides(name: str, alert: Alert, bounds: Sequence[float]) -> tuple[float, float]:
    """A level within the threshold and one beyond it."""
    limit, upward = alert.threshold, alert.above is not None
    if isinstance(alert.value, Quantile):
        lower = [bound for bound in bounds if bound <= limit]
        higher = [bound for bound in bounds if bound > limit]
        # Everything observed lies in one bucket, from the bound before it up to its own.
        on_bound = lower[-1:] == [limit]
        within, above = lower[-1:], higher[:1] if on_bound else [*higher, math.inf][1:2]
        if not within or not above:
            span = f"{bounds[0]:g} to {bounds[-1]:g}" if bounds else "none"
            raise InferlabError(
                f"alert {name}: {limit:g} lies outside the buckets of {alert.value.metric} "
                f"({span}), so that a quantile never tells; choose a threshold between them"
            )
        return (within[0], above[0]) if upward else (above[0], within[0])
    step = MARGIN * abs(limit) or 1.0
    if isinstance(alert.value, Latest):
        return limit, limit + step if upward else limit - step
    inside = limit - step if upward and limit else limit
    return (inside, limit + step) if upward else (limit + step, limit - step)
