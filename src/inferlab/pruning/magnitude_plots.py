"""The figure of 33.8."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from inferlab.data.tables import Row

FORMAT_LABELS = {"dense": "dense", "csr": "CSR", "bitmask": "bitmask"}
KERNEL_LABELS = {"dense": "dense fp32", "csr": "CSR fp32", "dense_bf16": "dense bf16"}
CURVES = {
    ("iterative", "global"): "iterative, global threshold",
    ("iterative", "layer"): "iterative, a threshold a matrix",
    ("one_shot_retrained", "global"): "one shot, then retrained as long",
    ("one_shot", "global"): "one shot, global threshold",
    ("one_shot", "layer"): "one shot, a threshold a matrix",
}


def plot_pruning(
    rows: Sequence[Row],
    sizes: Sequence[Row],
    latencies: Sequence[Row],
    path: Path,
) -> None:
    """Accuracy, bytes of the matrices, and latency, each against sparsity."""
    figure, panels = plt.subplots(1, 3, figsize=(17, 5.6), layout="constrained")
    _accuracies(panels[0], rows)
    for dtype, style in (("fp32", "-"), ("bf16", ":")):
        for number, (name, label) in enumerate(FORMAT_LABELS.items()):
            own = [one for one in sizes if (one["format"], one["dtype"]) == (name, dtype)]
            panels[1].plot(
                [100 * one["sparsity"] for one in own],
                [one["megabytes"] for one in own],
                style,
                marker="o",
                color=f"C{number}",
                label=f"{label}, {dtype}",
            )
    panels[1].set(ylabel="MB of the prunable matrices", title="size by format", ylim=(0, None))
    _latencies(panels[2], latencies)
    for panel in panels:
        panel.set_xlabel("share of the weights set to zero, %")
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize="small")
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def _accuracies(panel: plt.Axes, rows: Sequence[Row]) -> None:
    unpruned = [row for row in rows if row["schedule"] == "unpruned"]
    first = next(row for row in unpruned if row["rounds"] == 1)
    for (schedule, threshold), label in CURVES.items():
        own = [row for row in rows if (row["schedule"], row["threshold"]) == (schedule, threshold)]
        panel.errorbar(
            [100 * row["sparsity"] for row in [first, *own]],
            [row["accuracy_mean"] for row in [first, *own]],
            [row["accuracy_std"] for row in [first, *own]],
            marker="o",
            capsize=3,
            linestyle="--" if schedule == "one_shot" else "-",
            label=label,
        )
    last = max(unpruned, key=lambda row: row["rounds"])
    panel.axhline(last["accuracy_mean"], color="black", linestyle=":", label="unpruned, as long")
    panel.set(ylabel="test accuracy, mean and std of seeds", title="quality", ylim=(0, None))


def _latencies(panel: plt.Axes, latencies: Sequence[Row]) -> None:
    for style, batch in zip("-:", sorted({row["batch"] for row in latencies}), strict=False):
        own = [row for row in latencies if row["batch"] == batch]
        for number, (kernel, label) in enumerate(KERNEL_LABELS.items()):
            times = [row for row in own if row["kernel"] == kernel]
            label = f"{label}, batch {batch}"
            shares = [100 * row["sparsity"] for row in times]
            milliseconds = [row["latency_ms"] for row in times]
            if len(times) == 1:
                panel.axhline(milliseconds[0], color=f"C{number}", linestyle=style, label=label)
            else:
                panel.plot(
                    shares,
                    milliseconds,
                    style,
                    marker="o",
                    color=f"C{number}",
                    label=label,
                )
    panel.set(yscale="log", ylabel="milliseconds", title="latency by kernel")
