"""The figure of 33.26: memory and time by length, and time by tile."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_flash(rows: Sequence[dict[str, Any]], tiles: Sequence[dict[str, Any]], path: Path) -> None:
    """Peak memory and time of the causal pass against length; a map of time over tile sizes."""
    figure, (memory, seconds, sweep) = plt.subplots(1, 3, figsize=(16, 4.8), layout="constrained")
    causal = [row for row in rows if row["causal"]]
    for name in dict.fromkeys(row["implementation"] for row in causal):
        own = [row for row in causal if row["implementation"] == name]
        lengths = [row["length"] for row in own]
        memory.plot(lengths, [row["peak_mib"] for row in own], marker="o", label=name)
        seconds.plot(lengths, [row["milliseconds"] for row in own], marker="o", label=name)
    for panel, label in ((memory, "peak beyond the inputs, MiB"), (seconds, "milliseconds")):
        panel.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
        panel.minorticks_off()
        panel.legend()
    seconds.set_title("causal forward pass, fp32")
    _draw_tiles(sweep, tiles, max(lengths))
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def _draw_tiles(panel: plt.Axes, tiles: Sequence[dict[str, Any]], length: int) -> None:
    sizes = sorted({row["query_tile"] for row in tiles})
    taken = {(row["query_tile"], row["key_tile"]): row["milliseconds"] for row in tiles}
    grid = np.array([[taken[queries, keys] for keys in sizes] for queries in sizes])
    panel.imshow(grid, cmap="summer")
    for (row, column), value in np.ndenumerate(grid):
        panel.text(column, row, f"{value:.0f}", ha="center", va="center", color="black")
    panel.set_xticks(range(len(sizes)), sizes)
    panel.set_yticks(range(len(sizes)), sizes)
    panel.set(
        xlabel="keys in a tile",
        ylabel="queries in a tile",
        title=f"milliseconds at {length:,} tokens",
    )
