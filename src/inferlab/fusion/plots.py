"""The figure of 33.27: memory, kernels and time of each pair of operators, fused and not."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

FIGURES = {
    "peak_mib": ("held at once beyond the inputs, MiB", "{:.0f}"),
    "kernels": ("kernels run, of whole tensors or tiles", "{:.0f}"),
    "milliseconds": ("milliseconds", "{:.1f}"),
}


def plot_fusion(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel a measure, in each a group of bars for every pair and mode, a bar an arm."""
    figure, panels = plt.subplots(1, len(FIGURES), figsize=(16, 4.6), layout="constrained")
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    groups = list(dict.fromkeys((row["pair"], row["mode"]) for row in rows))
    labels = [f"{pair.replace('_', ' + ')}\n{mode}" for pair, mode in groups]
    for panel, (measure, (title, form)) in zip(panels, FIGURES.items(), strict=True):
        for number, arm in enumerate(arms):
            values = {(r["pair"], r["mode"]): r[measure] for r in rows if r["arm"] == arm}
            middles = np.arange(len(groups)) + (number - (len(arms) - 1) / 2) * 0.26
            bars = panel.barh(middles, [values[group] for group in groups], 0.26, label=arm)
            panel.bar_label(bars, fmt=form, fontsize="small", padding=2)
        panel.set_yticks(range(len(groups)), labels)
        panel.invert_yaxis()
        panel.set_xlabel(title)
        panel.margins(x=0.12)
    panels[1].set_xscale("log")
    panels[0].legend(fontsize="small")
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
