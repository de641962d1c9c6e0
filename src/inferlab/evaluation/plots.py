"""The figure of the format comparison."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_bytes_against_perplexity(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Every variant's bytes and ratio of perplexity to the base's, with intervals and the front."""
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    front = [row for row in rows if row["pareto"]]
    axes.step(
        [row["model_bytes"] / 1e6 for row in front],
        [row["ratio_to_base"] for row in front],
        color="0.6",
        where="post",
        label="Pareto front",
        zorder=0,
    )
    for row in rows:
        size, ratio = row["model_bytes"] / 1e6, row["ratio_to_base"]
        error = [[ratio - row["ratio_low"]], [row["ratio_high"] - ratio]]
        axes.errorbar(size, ratio, error, fmt="o" if row["pareto"] else "x", capsize=3)
        axes.annotate(row["variant"], (size, ratio), xytext=(6, 6), textcoords="offset points")
    axes.set(
        xlabel="bytes of the checkpoint folder, millions",
        ylabel="token perplexity over the base's (bars: interval, paired by window)",
        title="What a smaller checkpoint costs in quality",
    )
    axes.margins(x=0.12)
    axes.legend()
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
