"""Throughput and latency against an axis, all variants in one figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PANELS = {
    "output_tokens_per_s": "output tokens per second",
    "ttft_ms_p50": "TTFT, median, ms",
    "tpot_ms_p50": "TPOT, median, ms",
}
AXES = {
    "concurrency": "concurrent requests",
    "input_tokens": "input tokens",
    "output_tokens": "output tokens",
}


def plot_axis(axis: str, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One panel a quantity: the median over rounds, the band from lowest to highest round."""
    figure, panels = plt.subplots(1, len(PANELS), figsize=(14, 4.5), layout="constrained")
    for panel, (name, label) in zip(panels, PANELS.items(), strict=True):
        for variant in dict.fromkeys(row["variant"] for row in rows):
            own = [row for row in rows if row["variant"] == variant]
            values = [row[axis] for row in own]
            panel.plot(values, [row[name] for row in own], marker="o", label=variant)
            low, high = ([row[f"{name}_{edge}"] for row in own] for edge in ("min", "max"))
            panel.fill_between(values, low, high, alpha=0.2)
        panel.set(xlabel=AXES[axis], ylabel=label, xscale="log", ylim=(0, None))
        panel.set_xticks(values, [str(value) for value in values])
        panel.minorticks_off()
    panels[0].legend()
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)
