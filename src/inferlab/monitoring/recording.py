"""A recorded series: what a server exported at every tick of a clock, gaps included."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from inferlab.errors import InferlabError, suggestion

UP = "up"
"""Prometheus' own series: 1 when a scrape succeeded, 0 when it failed."""
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
"""What is appended to a metric's name for its series, by type."""


@dataclass(frozen=True)
class Series:
    """One metric with its labels. `values`: [ticks], NaN where it was not exported."""

    name: str
    labels: Mapping[str, str]
    values: np.ndarray


@dataclass(frozen=True)
class Recording:
    """`ticks` scrapes, `interval_s` seconds apart; tick n stands for the time n * interval_s."""

    interval_s: float
    ticks: int
    series: Mapping[str, Sequence[Series]]

    def named(self, name: str, labels: Mapping[str, str]) -> list[Series]:
        """The series of a metric whose labels include these."""
        return [
            one for one in self.series.get(name, ()) if labels.items() <= dict(one.labels).items()
        ]

    @property
    def gaps(self) -> int:
        """How many scrapes failed."""
        return sum(int((one.values == 0).sum()) for one in self.series.get(UP, ()))


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of one answer of /metrics, by name and labels.

    Raises InferlabError when the text is not in Prometheus' format.
    """
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in _families(text)
        for sample in family.samples
    }


def _families(text: str) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(text))
    except ValueError as error:
        raise InferlabError(f"what was scraped is not in Prometheus' format: {error}") from None


def record(scrapes: Sequence[str | None], interval_s: float) -> Recording:
    """Series from the texts of successive scrapes; None is a scrape that failed.

    A text that cannot be parsed counts as failed, as it does for Prometheus.
    """
    columns: dict[tuple[str, tuple[tuple[str, str], ...]], np.ndarray] = {}
    up = np.zeros(len(scrapes))
    for tick, text in enumerate(scrapes):
        try:
            found = samples(text) if text is not None else {}
        except InferlabError:
            found = {}
        up[tick] = bool(found)
        for key, value in found.items():
            if key not in columns:
                columns[key] = np.full(len(scrapes), math.nan)
            columns[key][tick] = value
    return recording(
        [Series(name, dict(labels), values) for (name, labels), values in columns.items()]
        + [Series(UP, {}, up)],
        interval_s,
    )


def recording(series: Iterable[Series], interval_s: float) -> Recording:
    """A recording of series that are all of the same length."""
    by_name: dict[str, list[Series]] = {}
    for one in series:
        by_name.setdefault(one.name, []).append(one)
    ticks = {len(one.values) for group in by_name.values() for one in group}
    assert len(ticks) == 1, "all series of a recording have the same ticks"
    return Recording(interval_s, ticks.pop(), by_name)


def exported(text: str) -> set[str]:
    """The names of all series of one scrape, and `up`.

    A metric with labels has no series before its first event; then its declaration counts.
    """
    return {UP} | {
        name
        for family in _families(text)
        for name in (
            [sample.name for sample in family.samples]
            or [f"{family.name}{suffix}" for suffix in SUFFIXES.get(family.type, ("",))]
        )
    }


def require_exported(wanted: Mapping[str, Sequence[str]], known: set[str]) -> None:
    """Raise InferlabError at the first name that the server does not export.

    `wanted`: series names by what reads them, such as `monitoring.alerts.QueueGrows`.
    """
    for reader, names in wanted.items():
        for name in names:
            if name not in known:
                close = suggestion(name, known).rpartition("did you mean ")[2]
                hint = f"; did you mean {close}" if close.endswith("?") else ""
                raise InferlabError(
                    f"{reader}: the server exports no metric {name!r}{hint} "
                    f"({len(known)} names, all listed by curl URL/metrics)"
                )
