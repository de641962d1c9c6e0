"""How far the simulator is from the engine, beside how far the engine is from itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_validation(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Simulated over the engine's figure for each configuration; bars: the engine's own rounds."""
    names = list(dict.fromkeys(row["figure"] for row in rows))
    configurations = list(dict.fromkeys(row["configuration"] for row in rows))
    figure, panel = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for place, name in enumerate(configurations):
        own = [row for row in rows if row["configuration"] == name]
        at = [
            index + 0.8 * (place + 0.5) / len(configurations) - 0.4 for index in range(len(names))
        ]
        below = [100 * (1 - row["engine_lowest"] / row["engine"]) for row in own]
        above = [100 * (row["engine_highest"] / row["engine"] - 1) for row in own]
        zeros = [0.0] * len(own)
        colour = f"C{place}"
        bars = {"ecolor": colour, "fmt": "none", "capsize": 4, "linewidth": 2}
        panel.errorbar(at, zeros, [below, above], **bars)
        errors = [row["error_pct"] for row in own]
        panel.scatter(at, errors, color=colour, marker="D", label=name, zorder=3)
    panel.axhline(0, color="grey", linewidth=1)
    panel.set_xticks(range(len(names)), names)
    panel.set(ylabel="% off the engine's mean")
    panel.set_title("marks: the simulator; bars: the engine's own rounds", fontsize="medium")
    panel.legend()
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)
