"""The figure of 33.19: what a chunk costs the long prompt and spares the others."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PANELS = {
    "itl_ms_p99": "ITL, P99, ms",
    "itl_ms_p999": "ITL, P99.9, ms",
    "ttft_long_ms_p95": "TTFT of long prompts, P95, ms",
    "ttft_short_ms_p95": "TTFT of the others, P95, ms",
}


def plot_chunks(rows: Sequence[dict[str, Any]], goal_ms: float, path: Path) -> None:
    """One panel a figure, the chunks along the axis, a line for each share of long prompts."""
    figure, panels = plt.subplots(1, len(PANELS), figsize=(17, 4.5), layout="constrained")
    chunks = list(dict.fromkeys(row["chunk"] for row in rows))
    for panel, (name, label) in zip(panels, PANELS.items(), strict=True):
        for share in dict.fromkeys(row["long_share"] for row in rows):
            own = [row for row in rows if row["long_share"] == share and row[name] != ""]
            panel.errorbar(
                [chunks.index(row["chunk"]) for row in own],
                [row[name] for row in own],
                [row[f"{name}_half"] or 0.0 for row in own],
                marker="o",
                capsize=3,
                label=f"{share:.0%} long",
            )
        panel.set_xticks(range(len(chunks)), [str(chunk or "whole") for chunk in chunks])
        panel.set(xlabel="chunk, tokens of a step", ylabel=label, ylim=(0, None))
    panels[1].axhline(goal_ms, color="grey", linestyle="--", label="goal")
    panels[1].legend()
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
