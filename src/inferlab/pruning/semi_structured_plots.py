"""The figure of 33.10."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PATTERN_LABELS = {"2_4": "2:4", "unstructured": "unstructured 50 %"}


def plot_errors(
    arms: Sequence[Mapping[str, Any]],
    layers: Sequence[Mapping[str, Any]],
    dense_perplexity: float,
    matrix: str,
    path: Path,
) -> None:
    """Perplexity of the model, errors of one matrix, and output error by depth at 2:4."""
    figure, panels = plt.subplots(1, 3, figsize=(16, 4.8), layout="constrained")
    _bars(panels[0], arms, "token_perplexity", "%.1f")
    panels[0].axhline(dense_perplexity, color="black", linestyle=":", label="dense")
    panels[0].set(yscale="log", ylabel="token perplexity", title="whole model")
    one = [row for row in layers if row["layer"] == matrix]
    _bars(panels[1], one, "output_error", "%.3f")
    panels[1].set(ylabel="output error, share of the outputs' energy", title=matrix)
    for score in dict.fromkeys(row["score"] for row in layers):
        own = [row for row in layers if row["score"] == score and row["pattern"] == "2_4"]
        blocks = sorted({row["block"] for row in own})
        means = [np.mean([r["output_error"] for r in own if r["block"] == b]) for b in blocks]
        panels[2].plot(blocks, means, marker=".", label=score)
    panels[2].set(
        xlabel="block",
        ylabel="output error, mean of its layers",
        yscale="log",
        title="2:4 by depth",
    )
    for panel in panels:
        panel.legend()
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def _bars(panel: plt.Axes, rows: Sequence[Mapping[str, Any]], value: str, form: str) -> None:
    """Groups of bars: one group a score, one bar a pattern."""
    scores = list(dict.fromkeys(row["score"] for row in rows))
    for offset, pattern in enumerate(PATTERN_LABELS):
        heights = [row[value] for row in rows if row["pattern"] == pattern]
        places = np.arange(len(scores)) + 0.4 * offset - 0.2
        bars = panel.bar(places, heights, 0.4, label=PATTERN_LABELS[pattern])
        panel.bar_label(bars, fmt=form, fontsize="small")
    panel.set_xticks(range(len(scores)), scores)
