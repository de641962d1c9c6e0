"""The radar of whole configurations: one chart with the scales, and each configuration by itself.

Outward is better on every axis. Scales are linear between round figures a little beyond the values,
which are printed: the centre is seldom zero, so a shape's area means nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.projections.polar import PolarAxes

RINGS = 5
NARROWEST = 0.1
"""Of the largest value: a scale spans at least so much, so that noise does not fill a chart."""
PADDING = 0.05
STEPS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
COLUMNS = 4
INK, FAINT = "0.15", "0.8"
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = "osD^vPX*"


@dataclass(frozen=True)
class Scale:
    """Linear from the centre to the rim of the chart."""

    centre: float
    rim: float

    def place(self, value: float) -> float:
        """0 in the centre, 1 at the rim."""
        return (value - self.centre) / (self.rim - self.centre)

    def ring(self, number: int) -> float:
        """The figure at ring `number` of RINGS, 0 the centre."""
        return self.centre + number * (self.rim - self.centre) / RINGS


@dataclass(frozen=True)
class Axis:
    """A column of the table, its words in the chart, which way is better, and its limits if any."""

    column: str
    label: str
    unit: str
    more_is_better: bool
    factor: float = 1.0
    scale: Scale | None = None

    def value(self, row: Mapping[str, Any]) -> float:
        """As the chart shows it."""
        return self.factor * row[self.column]


AXES = (
    Axis("ttft_ms", "TTFT", "ms", more_is_better=False),
    Axis("decode_tokens_per_s", "TPS of one client", "tokens/s", more_is_better=True),
    Axis("throughput_tokens_per_s", "throughput", "tokens/s", more_is_better=True),
    Axis("cpu_share", "CPU busy", "%", more_is_better=False, factor=100, scale=Scale(100, 0)),
    Axis("memory_mib", "memory", "MiB", more_is_better=False),
    Axis("token_perplexity", "perplexity", "", more_is_better=False),
)


def scale_for(values: Sequence[float], more_is_better: bool) -> Scale:
    """RINGS equal steps of a round size that hold all values (none below 0), better outward."""
    low, high = min(values), max(values)
    missing = max(0.0, NARROWEST * high - (high - low)) / 2 + PADDING * (high - low)
    low, high = max(0.0, low - missing), high + missing
    step = _round_step((high - low) / RINGS or 1.0)
    while (first := math.floor(low / step) * step) + RINGS * step < high:
        step = _round_step(step * 1.01)
    ends = (first, first + RINGS * step)
    return Scale(*ends) if more_is_better else Scale(*reversed(ends))


def plot_radar(rows: Sequence[Mapping[str, Any]], reference: str, path: Path) -> None:
    """All configurations over the scales, and below each one's shape with its own figures."""
    scales = [
        axis.scale or scale_for([axis.value(row) for row in rows], axis.more_is_better)
        for axis in AXES
    ]
    dashed = next(row for row in rows if row["configuration"] == reference)
    lines = math.ceil(len(rows) / COLUMNS)
    figure = plt.figure(figsize=(13, 7.5 + 3.4 * lines), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[7.5, 3.4 * lines])
    _all_together(above, rows, scales)
    below.suptitle(f"One at a time, on the same scales; dashed: {_name(dashed)}", fontsize=12)
    panels = below.subplots(lines, COLUMNS, subplot_kw={"projection": "polar"}, squeeze=False)
    for panel, row in zip(panels.flat, rows, strict=False):
        _alone(panel, row, dashed, scales)
    for panel in panels.flat[len(rows) :]:
        panel.set_axis_off()
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def _all_together(figure: Any, rows: Sequence[Mapping[str, Any]], scales: Sequence[Scale]) -> None:
    """The large chart with every scale, and the key beside it."""
    panel = figure.add_subplot(projection="polar")
    _prepare(panel)
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.75, len(rows)))
    for place, row in enumerate(rows):
        style = {"linestyle": LINES[place % len(LINES)], "marker": MARKERS[place % len(MARKERS)]}
        places = _places(row, scales)
        panel.plot(*_closed(places), color=colours[place], label=_name(row), linewidth=1.8, **style)
    for angle, axis, scale in zip(_angles(), AXES, scales, strict=True):
        for ring in range(1, RINGS):
            _figure(panel, angle, ring / RINGS, scale.ring(ring))
        better = "more" if axis.more_is_better else "less"
        unit = f", {axis.unit}" if axis.unit else ""
        ends = f"centre {scale.centre:g}, rim {scale.rim:g}"
        panel.text(
            *(angle, 1.06, f"{axis.label}{unit}\n{ends}\n{better} is better"),
            **_outward(angle),
            fontsize=10,
        )
    beside = {"loc": "center left", "bbox_to_anchor": (1.32, 0.5)}
    panel.legend(**beside, frameon=False, handlelength=5, labelspacing=1.2, fontsize=11)


def _alone(
    panel: PolarAxes,
    row: Mapping[str, Any],
    reference: Mapping[str, Any],
    scales: Sequence[Scale],
) -> None:
    """One configuration, filled, with its figures at the ends of the axes."""
    _prepare(panel)
    panel.plot(*_closed(_places(reference, scales)), color="0.45", linestyle="--", linewidth=1)
    outline = _closed(_places(row, scales))
    panel.plot(*outline, color=INK, linewidth=1.6)
    panel.fill(*outline, color=INK, alpha=0.25)
    for angle, axis in zip(_angles(), AXES, strict=True):
        unit = f" {axis.unit}" if axis.unit else ""
        text = f"{axis.label}\n{_short(axis.value(row))}{unit}"
        panel.text(angle, 1.08, text, **_outward(angle), fontsize=8)
    panel.set_title(_name(row), fontsize=11, fontweight="bold", pad=32)


def _prepare(panel: PolarAxes) -> None:
    """Straight rings and spokes, the first axis upwards, the others clockwise."""
    panel.set(theta_offset=np.pi / 2, theta_direction=-1, ylim=(0, 1), xticks=[], yticks=[])
    panel.grid(False)
    panel.spines["polar"].set_visible(False)
    for ring in range(1, RINGS + 1):
        panel.plot(*_closed([ring / RINGS] * len(AXES)), color=FAINT, linewidth=0.8, zorder=0)
    for angle in _angles():
        panel.plot([angle, angle], [0, 1], color=FAINT, linewidth=0.8, zorder=0)


def _figure(panel: PolarAxes, angle: float, radius: float, value: float) -> None:
    """A figure of a scale, beside its spoke, where the markers leave it to be read."""
    aside = (12 * math.cos(angle), -12 * math.sin(angle))
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.8}
    middle = {"horizontalalignment": "center", "verticalalignment": "center"}
    panel.annotate(
        f"{value:g}",
        (angle, radius),
        xytext=aside,
        textcoords="offset points",
        fontsize=8,
        color="0.35",
        bbox=box,
        zorder=1,
        **middle,
    )


def _outward(angle: float) -> dict[str, str]:
    """How text at the rim is aligned, so that it grows away from the chart."""
    across, up = round(math.sin(angle), 6), round(math.cos(angle), 6)
    sides = {0: "center", 1: "left", -1: "right"}
    heights = {0: "center", 1: "bottom", -1: "top"}
    vertical = int(np.sign(up)) if abs(up) > 0.9 else 0
    return {
        "horizontalalignment": sides[int(np.sign(across))],
        "verticalalignment": heights[vertical],
    }


def _places(row: Mapping[str, Any], scales: Sequence[Scale]) -> list[float]:
    return [scale.place(axis.value(row)) for axis, scale in zip(AXES, scales, strict=True)]


def _closed(places: Sequence[float]) -> tuple[list[float], list[float]]:
    """Angles and radii of a closed outline."""
    angles = _angles()
    return [*angles, angles[0]], [*places, places[0]]


def _angles() -> list[float]:
    return [2 * math.pi * place / len(AXES) for place in range(len(AXES))]


def _short(value: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _name(row: Mapping[str, Any]) -> str:
    return row["configuration"].replace("_", " ")


def _round_step(least: float) -> float:
    """The smallest of STEPS times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in STEPS if step * power >= least * (1 - 1e-9))
