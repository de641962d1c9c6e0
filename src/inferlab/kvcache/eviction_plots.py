"""The figure of 33.15: perplexity and accuracy by budget, and what heads hold in the end."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_eviction(
    rows: Sequence[dict[str, Any]],
    held: Sequence[dict[str, Any]],
    methods: Sequence[str],
    path: Path,
) -> None:
    """A line a method in each of three panels; full attention dashed."""
    figure, panels = plt.subplots(1, 3, figsize=(16, 4.8), layout="constrained")
    full = next(row for row in rows if row["arm"] == "full")
    for panel, key in zip(panels, ("token_perplexity", "next_token_accuracy"), strict=False):
        for name in methods:
            own = sorted((r["budget"], r[key]) for r in rows if r["arm"] == name)
            panel.plot(*zip(*own, strict=True), marker="o", label=name)
        panel.axhline(full[key], color="0.4", linestyle="--", label="full cache")
        budgets = sorted({row["budget"] for row in rows if row["arm"] != "full"})
        panel.set(xscale="log", xlabel="budget, tokens a head", ylabel=key.replace("_", " "))
        panel.set_xticks(budgets, budgets)
        panel.minorticks_off()
        panel.legend()
    panels[0].set(yscale="log")
    low, high = panels[0].get_ylim()
    ticks = [
        tick for tick in (5, 10, 15, 20, 25, 30, 40, 50, 70, 100, 200, 500) if low < tick < high
    ]
    panels[0].set_yticks(ticks, ticks)
    panels[0].minorticks_off()
    for name in methods:
        points = [(row["from_token"], row["share_held"]) for row in held if row["arm"] == name]
        panels[2].step(*zip(*points, strict=True), where="post", label=name)
    panels[2].set(xlabel="token", ylabel="share of heads that hold it at the end", ylim=(0, 1.05))
    panels[2].legend()
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
