"""How well a step's cost fits the measured steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_steps(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Predicted against measured time of every step; steps with prefill apart."""
    figure, panel = plt.subplots(figsize=(6.5, 6), layout="constrained")
    for label, chosen in (("decoding only", False), ("with prefill", True)):
        own = [row for row in rows if (row["pairs"] > 0) == chosen]
        measured = [row["ms_measured"] for row in own]
        panel.scatter(measured, [row["ms_predicted"] for row in own], s=8, alpha=0.4, label=label)
    ends = [min(row["ms_measured"] for row in rows), max(row["ms_measured"] for row in rows)]
    panel.plot(ends, ends, color="black", linewidth=1)
    panel.set(
        xscale="log", yscale="log", xlabel="measured, ms a step", ylabel="predicted, ms a step"
    )
    panel.legend()
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)
