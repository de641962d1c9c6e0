"""The figure of 33.18: what each batching does with a growing rate."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PANELS = {
    "output_tokens_per_s": ("output tokens per second", "linear"),
    "ttft_ms_p95": ("TTFT, P95, ms", "log"),
    "tpot_ms_p50": ("TPOT, median, ms", "linear"),
    "e2e_ms_p95": ("end to end, P95, ms", "log"),
}


def plot_rates(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel a figure against the rate, with 95 % intervals; latencies of steady states only."""
    figure, panels = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    for panel, (name, (label, scale)) in zip(panels.flat, PANELS.items(), strict=True):
        for arm in dict.fromkeys(row["arm"] for row in rows):
            own = [row for row in rows if row["arm"] == arm and row[name] != ""]
            panel.errorbar(
                [row["rate"] for row in own],
                [row[name] for row in own],
                [row[f"{name}_half"] or 0.0 for row in own],
                marker="o",
                markersize=4,
                capsize=3,
                label=arm,
            )
        panel.set(xlabel="requests per second", ylabel=label, yscale=scale)
    panels.flat[0].legend()
    figure.suptitle("Latencies are shown where the batching keeps up with the rate")
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
