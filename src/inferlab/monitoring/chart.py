"""Lines over time as shapes for SVG: where each point, tick and phase lies in pixels."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inferlab.monitoring.settings import MonitoringParams, spans

Row = Mapping[str, Any]
WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 22, 30
TICKS = 4


@dataclass(frozen=True)
class Line:
    """A column's name in words, its pieces (a gap separates two) as SVG points, and its summary."""

    name: str
    pieces: Sequence[str]
    summary: str


@dataclass(frozen=True)
class Chart:
    """A titled panel; ticks and bands are pixel places with text, `text` is for screen readers."""

    title: str
    lines: Sequence[Line]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    bands: Sequence[tuple[float, float, str]]
    text: str


def chart(
    title: str, columns: Mapping[str, str], rows: Sequence[Row], params: MonitoringParams
) -> Chart:
    """The columns of the table (by their names in words) over the scenario."""
    end = rows[-1]["seconds"]
    present = [row[column] for row in rows for column in columns if row[column] != ""]
    step = _step(max([*present, 1e-9]))
    top = step * max(1, math.ceil(max([*present, 0.0]) / step))

    def across(seconds: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * min(seconds / end, 1.0), 1)

    def upward(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top, 1)

    lines = []
    for column, name in columns.items():
        pieces: list[list[str]] = [[]]
        for row in rows:
            if row[column] == "":
                pieces.append([])
            else:
                pieces[-1].append(f"{across(row['seconds'])},{upward(row[column])}")
        drawn = [" ".join(piece) for piece in pieces if piece]
        lines.append(Line(name, drawn, _summary(name, column, rows)))
    marks = [n * _step(end) for n in range(math.floor(end / _step(end)) + 1)]
    return Chart(
        title,
        lines,
        [(across(one), f"{one:g} s") for one in marks],
        [(upward(n * step), f"{n * step:.4g}") for n in range(round(top / step) + 1)],
        [(across(a), across(b), name) for name, (a, b) in spans(params.phases).items()],
        f"{title} over {end:g} seconds. " + " ".join(line.summary for line in lines),
    )


def _summary(name: str, column: str, rows: Sequence[Row]) -> str:
    known = [(row[column], row["phase"]) for row in rows if row[column] != ""]
    if not known:
        return f"{name}: nothing to show."
    value, phase = max(known)
    return f"{name}: from {min(known)[0]:.3g} to {value:.3g}, the highest in {phase}."


def _step(most: float) -> float:
    """A round distance of ticks, so that about TICKS of them reach `most`."""
    scale = 10.0 ** math.floor(math.log10(most / TICKS))
    return next(scale * one for one in (1, 2, 2.5, 5, 10) if scale * one * TICKS >= most)
