"""Pictures of GPTQ: where in a layer its errors arise, and what bits buy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Rows = Sequence[Mapping[str, Any]]


def plot_columns(rows: Rows, layer: str, path: Path) -> None:
    """The running sum of output error over columns, and each column's share, a line a result."""
    figure, (total, single) = plt.subplots(1, 2, figsize=(13, 4.8), layout="constrained")
    for name in dict.fromkeys(row["result"] for row in rows):
        own = [row for row in rows if row["result"] == name]
        done = [row["columns_done"] for row in own]
        total.plot(done, [row["cumulative"] for row in own], label=name)
        single.plot(done, [row["share"] for row in own], ".", markersize=3, label=name)
    total.set(ylabel="output error so far (mean square)", ylim=(0, None))
    single.set(ylabel="output error of one column", yscale="log")
    for panel in (total, single):
        panel.set_xlabel("columns quantized")
    total.legend()
    figure.suptitle(f"What no later column can repair: {layer}")
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)
