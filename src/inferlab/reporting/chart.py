"""The trade-off chart: every candidate's latency against its cost, as shapes to draw in SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from inferlab.reporting.decision import Case, Decision, pareto
from inferlab.reporting.requirements import (
    LABELS,
    QUALITY_LIMITS,
    Candidate,
    Requirements,
    overshoots,
    usd_per_million_requests,
)

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 96, 16, 52
SHAPES = ("circle", "square", "diamond", "triangle", "down")
COLOURS = 10
"""How many colours the style sheet has, `--series-0` and so on."""


@dataclass(frozen=True)
class Point:
    """A candidate's place in pixels and all that is known of it, as text."""

    x: float
    y: float
    label: str
    front: bool
    within: bool
    chosen: bool


@dataclass(frozen=True)
class Series:
    """A variant on an engine, its points by concurrency. `below`: it misses the quality floor."""

    name: str
    colour: int
    shape: str
    below: bool
    points: Sequence[Point]


@dataclass(frozen=True)
class Tick:
    """A mark on an axis: where, and its text."""

    place: float
    text: str


@dataclass(frozen=True)
class Chart:
    """One latency against cost. `limit`: the pixel row of the user's limit, None when far off."""

    key: str
    title: str
    limit: float | None
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    series: Sequence[Series]


def charts(case: Case, wanted: Requirements, decision: Decision) -> list[Chart]:
    """A chart for each latency; none without candidates."""
    if not case.candidates:
        return []
    return [_chart(key, case, wanted, decision) for key in ("ttft_ms", "tpot_ms")]


def _chart(key: str, case: Case, wanted: Requirements, decision: Decision) -> Chart:
    costs = [
        usd_per_million_requests(one, case.traffic, case.usd_per_hour) for one in case.candidates
    ]
    across = _Scale(min(costs), max(costs), LEFT, WIDTH - RIGHT)
    times = [getattr(one, key) for one in case.candidates]
    limit = getattr(wanted, key)
    upward = _Scale(min(times), max(times), HEIGHT - BOTTOM, TOP)
    shown = upward.low <= limit <= upward.high
    front = pareto(case.candidates)
    winner = decision.winner.candidate if decision.winner else None
    points: dict[tuple[str, str], list[Point]] = {}
    for one, usd, time, on_front in zip(case.candidates, costs, times, front, strict=True):
        within = not overshoots(one, wanted)
        text = _text(one, usd, on_front, within)
        place = (round(across.pixel(usd), 1), round(upward.pixel(time), 1))
        found = Point(*place, text, on_front, within, one == winner)
        points.setdefault((one.variant, one.engine), []).append(found)
    return Chart(
        key,
        f"{LABELS[key].capitalize()}, milliseconds",
        round(upward.pixel(limit), 1) if shown else None,
        across.ticks(),
        upward.ticks(),
        _series(points, case.candidates, wanted),
    )


def _series(
    points: dict[tuple[str, str], list[Point]],
    candidates: Sequence[Candidate],
    wanted: Requirements,
) -> list[Series]:
    """A colour a variant, a shape an engine."""
    variants = list(dict.fromkeys(variant for variant, _ in points))
    engines = list(dict.fromkeys(engine for _, engine in points))
    below = {
        (one.variant, one.engine)
        for one in candidates
        if set(overshoots(one, wanted)) & set(QUALITY_LIMITS)
    }
    return [
        Series(
            f"{variant} on {engine}",
            variants.index(variant) % COLOURS,
            SHAPES[engines.index(engine) % len(SHAPES)],
            (variant, engine) in below,
            found,
        )
        for (variant, engine), found in points.items()
    ]


def _text(one: Candidate, usd: float, front: bool, within: bool) -> str:
    load = "1 request at a time" if one.concurrency == 1 else f"{one.concurrency} requests at once"
    parts = [
        f"{one.name}, {load}",
        f"first token {one.ttft_ms:,.0f} ms",
        f"each next {one.tpot_ms:,.0f} ms",
        f"{one.requests_per_s:.2f} requests a second",
        f"${usd:,.2f} a million requests",
        f"perplexity × {one.perplexity_ratio:.3f} of the base",
        "keeps every limit" if within else "misses a limit",
    ]
    if front:
        parts.append("on the Pareto front")
    if one.unserved:
        parts.append(f"without a server, {one.unserved}")
    return "; ".join(parts)


class _Scale:
    """A logarithmic axis from pixels `start` to `end`, a little wider than its values."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        margin = max((high / low) ** 0.06, 1.1)
        self.low, self.high = low / margin, high * margin
        self.start, self.end = start, end

    def pixel(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[Tick]:
        """At 1, 2 and 5 times powers of ten; at 1, 1.5, 2, 3, 5, 7 where these are too few."""
        for steps in ((1, 10), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
            values = self._values(steps)
            if len(values) >= 4:
                break
        return [Tick(round(self.pixel(one), 1), f"{one:,.6g}") for one in values]

    def _values(self, steps: Sequence[float]) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = sorted({step * 10.0**decade for decade in decades for step in steps})
        return [one for one in found if self.low <= one <= self.high]
