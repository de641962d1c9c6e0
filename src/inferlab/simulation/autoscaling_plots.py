"""Pictures of the autoscaling study."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Floats = NDArray[np.float64]
Row = dict[str, Any]


def plot_front(rows: Sequence[Row], chosen: Sequence[Row], target: float, path: Path) -> None:
    """Missed requests against cost: all settings with their intervals, each policy's front."""
    figure, axes = plt.subplots(figsize=(9.5, 6), layout="constrained")
    for number, policy in enumerate(dict.fromkeys(row["policy"] for row in rows)):
        own = [row for row in rows if row["policy"] == policy]
        color = f"C{number}"
        misses = [_miss_pct(row, "compliance") for row in own]
        below = [
            one - _miss_pct(row, "compliance_high") for one, row in zip(misses, own, strict=True)
        ]
        above = [
            _miss_pct(row, "compliance_low") - one for one, row in zip(misses, own, strict=True)
        ]
        axes.errorbar(
            [row["usd_per_day"] for row in own],
            misses,
            [np.maximum(below, 0), np.maximum(above, 0)],
            fmt="o",
            ms=3,
            lw=0.6,
            alpha=0.5,
            color=color,
        )
        front = sorted((row for row in own if row["front"]), key=lambda row: row["usd_per_day"])
        places = [(row["usd_per_day"], _miss_pct(row, "compliance")) for row in front]
        axes.plot(*zip(*places, strict=True), "-", color=color, label=policy)
        pick = next(row for row in chosen if row["policy"] == policy)
        miss = _miss_pct(pick, "compliance")
        axes.plot(pick["usd_per_day"], miss, "*", ms=13, color=color, mec="black")
    axes.axhline(100 * (1 - target), color="grey", lw=0.8, ls="--", label="target")
    axes.set(
        yscale="symlog",
        xlabel="US dollars a day",
        ylabel="% of requests late or dropped, mean of the days and 95 % interval",
        title="Settings of each policy; stars: chosen on other days than judged on",
    )
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def plot_day(load: Floats, ready: dict[str, Floats], path: Path) -> None:
    """One day. load: in instances' worth [minutes]; ready: instances by policy [minutes]."""
    figure, panels = plt.subplots(
        len(ready),
        1,
        figsize=(11, 1.9 * len(ready)),
        layout="constrained",
        sharex=True,
        sharey=True,
    )
    hours = np.arange(len(load)) / 60
    for number, (axes, (policy, instances)) in enumerate(
        zip(np.atleast_1d(panels), ready.items(), strict=True)
    ):
        axes.fill_between(hours, load, color="0.8", label="load")
        axes.step(hours, instances, where="post", color=f"C{number}", label=policy)
        short = load > instances
        axes.fill_between(
            hours, instances, load, where=short, color="tab:red", label="beyond capacity"
        )
        axes.legend(loc="upper left", fontsize="small", ncols=3)
    axes.set(xlabel="hour of the day", xlim=(0, 24), xticks=range(0, 25, 2))
    figure.supylabel("instances (load: instances' worth)")
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def _miss_pct(row: Row, name: str) -> float:
    return 100 * (1 - row[name])
