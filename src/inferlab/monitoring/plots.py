"""The scenario in one figure: latencies, queue, tokens, use, errors and alerts over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from inferlab.monitoring.settings import MonitoringParams, spans

Row = Mapping[str, Any]
Lines = Mapping[str, str]
PANELS: tuple[tuple[str, Lines], ...] = (
    (
        "time to first token, s",
        {
            "ttft_p50_s": "p50, server",
            "ttft_p95_s": "p95, server",
            "client_ttft_p95_s": "p95, clients",
        },
    ),
    (
        "tokens a second\nof one request",
        {"client_tps_p50": "p50, clients", "client_tps_p5": "p5, clients"},
    ),
    ("requests", {"requests_running": "running", "requests_waiting": "waiting"}),
    ("tokens a second", {"output_tokens_per_s": "output", "prompt_tokens_per_s": "prompt"}),
    ("processors busy", {"cpu_cores": "all processes", "front_end_cores": "front end, exported"}),
    (
        "requests a second",
        {"finished_per_s": "finished", "answered_per_s": "accepted", "refused_per_s": "refused"},
    ),
    ("US dollars per\n1,000 requests", {"usd_per_1000_requests": "at this rate"}),
    ("a scrape, s", {"scrape_s": "time it took"}),
)
COLOURS = {"info": "tab:gray", "warning": "tab:orange", "critical": "tab:red"}
SHADES = ("#f2f2f2", "#ffffff")


def plot_timeline(
    rows: Sequence[Row], alerts: Sequence[Row], params: MonitoringParams, path: Path
) -> None:
    """A panel a quantity over a shared clock, phases as bands, and a bar for each alert below."""
    names = list(params.alerts)
    heights = [1.0] * len(PANELS) + [0.22 * len(names) + 0.2]
    figure, panels = plt.subplots(
        len(heights),
        1,
        figsize=(11, 1.75 * sum(heights)),
        sharex=True,
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    for panel in panels:
        _bands(panel, params)
    for panel, (label, lines) in zip(panels, PANELS, strict=False):
        _lines(panel, rows, lines)
        panel.set(ylabel=label, ylim=(0, None))
        panel.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    _alerts(panels[-1], alerts, names, rows[-1]["seconds"])
    for name, (start, end) in spans(params.phases).items():
        middle = (start + end) / 2
        panels[0].annotate(
            name,
            (middle, 1.02),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=9,
        )
    panels[-1].set(xlabel="seconds since the scenario began", xlim=(0, rows[-1]["seconds"]))
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def _bands(panel: Axes, params: MonitoringParams) -> None:
    for number, (start, end) in enumerate(spans(params.phases).values()):
        panel.axvspan(start, end, color=SHADES[number % 2], zorder=0)


def _lines(panel: Axes, rows: Sequence[Row], lines: Lines) -> None:
    for column, label in lines.items():
        points = [float("nan") if row[column] == "" else row[column] for row in rows]
        panel.plot([row["seconds"] for row in rows], points, label=label, lw=1.5)


def _alerts(panel: Axes, alerts: Sequence[Row], names: Sequence[str], end: float) -> None:
    """Pending thin, firing thick."""
    for row in alerts:
        if row["fired_s"] == "":
            continue
        place, colour = -names.index(row["alert"]), COLOURS[row["severity"]]
        cleared = end if row["cleared_s"] == "" else row["cleared_s"]
        panel.hlines(place, row["since_s"], row["fired_s"], colors=colour, lw=1)
        panel.hlines(place, row["fired_s"], cleared, colors=colour, lw=7)
    panel.set_yticks([-number for number in range(len(names))], names, fontsize=8)
    panel.set_ylim(-len(names) + 0.4, 0.6)
    panel.set_ylabel("alerts")
    panel.legend(
        [plt.Line2D([], [], color=colour, lw=5) for colour in COLOURS.values()],
        list(COLOURS),
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
        fontsize=8,
    )
