"""The figure of 33.20: policies over load."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PANELS = {
    "run_mean_s": ("mean latency of the run, s", "log"),
    "p99_s": ("P99 latency, s", "log"),
    "urgent_p95_s": ("P95 of urgent requests, s", "log"),
    "largest_wait_s": ("largest wait for a first token, s", "log"),
    "jain_slowdown": ("Jain's index of slowdown", "linear"),
    "service_gap_sizes": ("service gap, small and large", "linear"),
}


def plot_policies(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel a figure against load; from the grey line on there is no steady state."""
    figure, panels = plt.subplots(2, 3, figsize=(15, 8), layout="constrained")
    unstable = [row["load"] for row in rows if row["unstable"]]
    for panel, (name, (label, scale)) in zip(panels.flat, PANELS.items(), strict=True):
        for policy in dict.fromkeys(row["policy"] for row in rows):
            own = [row for row in rows if row["policy"] == policy]
            panel.errorbar(
                [row["load"] for row in own],
                [row[name] for row in own],
                [row[f"{name}_half"] for row in own],
                marker="o",
                markersize=4,
                capsize=3,
                label=policy,
            )
        if unstable:
            panel.axvline(min(unstable), color="grey", linestyle="--", linewidth=1)
        panel.set(xlabel="load, share of capacity", ylabel=label, yscale=scale)
    panels.flat[0].legend(fontsize="small")
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
