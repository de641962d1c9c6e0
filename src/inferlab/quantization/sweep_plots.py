"""The figure of the sweep."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

STYLES = {"rtn": ("tab:blue", "round-to-nearest"), "gptq": ("tab:red", "GPTQ")}


def plot_sweep(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Perplexity over the base's against bits a weight, one line a method and grid."""
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    for method, (colour, label) in STYLES.items():
        for grid, style in (("symmetric", "-o"), ("asymmetric", "--s")):
            line = [row for row in rows if (row["method"], row["grid"]) == (method, grid)]
            line.sort(key=lambda row: row["bits_per_weight"])
            axes.plot(
                [row["bits_per_weight"] for row in line],
                [row["ratio_to_base"] for row in line],
                style,
                color=colour,
                label=f"{label}, {grid}",
            )
    axes.axhline(1, color="0.7", zorder=0)
    axes.set(
        xlabel="bits a weight, scales and zero points included",
        ylabel="token perplexity over the 16-bit model's",
        yscale="log",
        title="What a bit buys",
    )
    axes.legend()
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
