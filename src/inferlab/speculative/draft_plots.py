"""Plots of the draft study."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from inferlab.speculative.break_even import best_length, break_even, speedup

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COSTS = np.linspace(0, 1.2, 61)
ACCEPTANCES = np.linspace(0, 0.99, 67)
OFTEN = 85
"""Per cent of rounds: even a model proposes nothing in a last round of one token."""
LEVELS = (0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4)


def plot_break_even(rows: Sequence[dict[str, Any]], verify: Sequence[float], path: Path) -> None:
    """Best speed-up by acceptance and cost ratio, with the greedy runs as points.

    The map is of a drafter that proposes in every round. One that often has nothing to propose
    breaks even at the same acceptance but gains less; its legend has the share of rounds.
    """

    def best(acceptance: float, cost: float) -> float:
        length = best_length(acceptance, cost, verify)
        return speedup(acceptance, length, cost, verify)

    grid = np.array([[best(a, c) for c in COSTS] for a in ACCEPTANCES])
    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    filled = axes.contourf(COSTS, ACCEPTANCES, grid, levels=LEVELS, cmap="RdYlGn", extend="both")
    figure.colorbar(filled, ax=axes, label="speed-up at the best draft length")
    line = [break_even(float(cost), verify) for cost in COSTS]
    axes.plot(COSTS, line, color="black", linewidth=2, label="break-even")
    greedy = [row for row in rows if row["decoding"] == "greedy"]
    for drafter in dict.fromkeys(row["drafter"] for row in greedy):
        points = [row for row in greedy if row["drafter"] == drafter]
        axes.scatter(
            [row["cost_ratio"] for row in points],
            [row["acceptance"] for row in points],
            edgecolor="black",
            label=_label(drafter, [row["proposing"] for row in points]),
            zorder=3,
            clip_on=False,
        )
    axes.set(
        xlabel="pass of the draft / pass of the target",
        ylabel="acceptance (a point a kind of prompt, greedy)",
        ylim=(0, 1),
        xlim=(0, COSTS[-1]),
    )
    axes.legend(loc="lower right")
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)


def _label(drafter: str, proposing: Sequence[float]) -> str:
    low, high = (round(100 * share) for share in (min(proposing), max(proposing)))
    return drafter if low >= OFTEN else f"{drafter} (proposes in {low} to {high} % of rounds)"
