"""The figure of 33.11: what the cache takes, and how many sequences fit beside the weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from inferlab.kvcache.capacity import Capacity

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_memory(
    sizes: Sequence[dict[str, Any]], found: Sequence[Capacity], length: int, path: Path
) -> None:
    """Above: GiB of cache by length, a line a batch. Below: largest batch at `length` tokens."""
    models = list(dict.fromkeys(row["model"] for row in sizes))
    figure = plt.figure(figsize=(5 * len(models), 8), layout="constrained")
    panels = figure.subplots(2, len(models), squeeze=False)
    for model, (above, below) in zip(models, panels.T, strict=True):
        _draw_sizes(above, [row for row in sizes if row["model"] == model])
        above.set_title(model)
        _draw_capacities(below, [one for one in found if one.architecture.name == model], length)
        below.set_xlabel(f"most sequences of {length:,} tokens beside the weights")
    panels[0][0].set_ylabel(f"GiB of {sizes[0]['cache']} cache")
    panels[0][0].legend(title="batch", fontsize="small")
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def _draw_sizes(panel: plt.Axes, rows: Sequence[dict[str, Any]]) -> None:
    for batch in dict.fromkeys(row["batch"] for row in rows):
        own = [row for row in rows if row["batch"] == batch]
        lengths = [row["length"] for row in own]
        panel.plot(lengths, [row["cache_gib"] for row in own], marker="o", label=batch)
    panel.axhline(80, color="0.4", linestyle="--", linewidth=1)
    panel.annotate("all of an 80 GB GPU", (lengths[0], 80), fontsize="small", va="bottom")
    panel.set(xscale="log", yscale="log", xlabel="tokens of each sequence", ylim=(0.05, 600))
    panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
    panel.minorticks_off()


def _draw_capacities(panel: plt.Axes, found: Sequence[Capacity], length: int) -> None:
    labels = [
        f"{one.gpus} {one.plan.gpu}, {one.plan.weights} weights, {one.plan.cache} cache"
        for one in found
    ]
    bars = panel.barh(labels, [one.largest_batch(length) for one in found])
    panel.bar_label(bars, fontsize="small", padding=2)
    panel.tick_params(axis="y", labelsize=7)
    panel.margins(x=0.12)
    panel.invert_yaxis()
