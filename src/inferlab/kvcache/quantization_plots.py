"""The figure of 33.12: the error of every head in INT8, and what the model loses."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_quantization(
    heads: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], path: Path
) -> None:
    """Left and middle: keys and values, a point a head. Right: divergence by arm."""
    figure, panels = plt.subplots(
        1, 3, figsize=(17, 5.2), layout="constrained", width_ratios=(1, 1, 0.8)
    )
    panels[0].sharey(panels[1])
    for panel, kind in zip(panels, ("keys", "values"), strict=False):
        own = [row for row in heads if row["kind"] == kind]
        count = 1 + max(row["head"] for row in own)
        for name in dict.fromkeys(row["format"] for row in own):
            points = [row for row in own if row["format"] == name]
            places = [row["layer"] + row["head"] / count for row in points]
            errors = [row["relative_error"] for row in points]
            panel.plot(places, errors, ".-", markersize=4, linewidth=0.6, label=name)
        panel.set(yscale="log", xlabel="layer, its heads side by side", title=kind)
    panels[0].set_ylabel("relative error of a head")
    panels[0].legend(fontsize="small")
    shown = sorted((row for row in rows if row["arm"] != "fp32"), key=lambda row: row["kl_nats"])
    bars = panels[2].barh([row["arm"] for row in shown], [row["kl_nats"] for row in shown])
    panels[2].bar_label(bars, fmt="%.2g", fontsize="small", padding=2)
    panels[2].set(xscale="log", xlabel="KL from an fp32 cache, nats a token")
    panels[2].margins(x=0.25)
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
