"""The figure of 33.28: memory, speed, perplexity and capacity, a bar for each arm."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")
from matplotlib import pyplot as plt

LABELS = {
    "transformers": "transformers, 16 bits",
    "runtime": "runtime, 16 bits",
    "mapped": "mapped weights",
    "int8_weights": "INT8 weights",
    "int8_cache": "INT8 cache",
    "window": "window",
    "all": "all four",
}


def plot_features(
    rows: Sequence[dict[str, Any]], batches: Sequence[dict[str, Any]], gpu: str, path: Path
) -> None:
    """Peak memory in two parts, decode speed, perplexity, and the largest batch on `gpu`."""
    figure, panels = plt.subplots(1, 4, figsize=(17, 4.6), sharey=True, layout="constrained")
    memory, speed, quality, capacity = panels
    places = np.arange(len(rows))
    _draw_memory(memory, places, rows)
    bars = speed.barh(places, [row["decode_tokens_per_s"] for row in rows], color="C2")
    speed.bar_label(bars, fmt="{:.0f}", fontsize="small", padding=2)
    speed.set(xlabel="decoded tokens a second, one sequence")
    speed.margins(x=0.15)
    _draw_perplexity(quality, places, rows)
    _draw_batches(capacity, places, batches, gpu)
    memory.set_yticks(places, [LABELS[row["arm"]] for row in rows])
    memory.invert_yaxis()
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def _draw_memory(
    panel: plt.Axes, places: NDArray[np.int64], rows: Sequence[dict[str, Any]]
) -> None:
    anonymous = [row["anonymous_mib"] for row in rows]
    files = [row["file_backed_mib"] for row in rows]
    own = panel.barh(places, anonymous, label="anonymous")
    panel.bar_label(own, fmt="{:.0f}", label_type="center", fontsize="small", color="white")
    mapped = panel.barh(places, files, left=anonymous, label="file-backed", color="0.75")
    texts = [f"{size:.0f}" if size >= 1 else "" for size in files]
    panel.bar_label(mapped, texts, label_type="center", fontsize="small")
    panel.set(xlabel="peak memory of load, prefill and decode, MiB")
    _legend_above(panel)


def _draw_perplexity(
    panel: plt.Axes, places: NDArray[np.int64], rows: Sequence[dict[str, Any]]
) -> None:
    """Points, so that the axis need not begin at 0, where no difference would be seen."""
    values = [row["token_perplexity"] for row in rows]
    panel.plot(values, places, "o", color="C2")
    for value, place in zip(values, places, strict=True):
        panel.annotate(
            f"{value:.2f}",
            (value, place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
        )
    panel.set(xlabel="token perplexity, held-out text")
    panel.grid(axis="x", color="0.9")
    panel.margins(x=0.25)


def _draw_batches(
    panel: plt.Axes, places: NDArray[np.int64], batches: Sequence[dict[str, Any]], gpu: str
) -> None:
    models = list(dict.fromkeys(row["model"] for row in batches))
    height = 0.8 / len(models)
    for number, model in enumerate(models):
        own = [row["largest_batch"] for row in batches if row["model"] == model]
        shifted = places + (number - (len(models) - 1) / 2) * height
        tokens = next(row["tokens"] for row in batches if row["model"] == model)
        bars = panel.barh(shifted, own, height, label=f"{model}, {tokens:,} tokens")
        panel.bar_label(bars, fmt="{:,.0f}", fontsize="x-small", padding=2)
    panel.set(xscale="log", xlabel=f"most sequences on one {gpu}, calculated")
    panel.set_xlim(1, 5 * max(2, *(row["largest_batch"] for row in batches)))
    _legend_above(panel)


def _legend_above(panel: plt.Axes) -> None:
    panel.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
