"""Pictures of outliers: where they are, what smoothing does to them, what 16-bit layers buy."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

from inferlab.quantization.outliers import SMOOTHED, Row

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PANELS = {
    "outlier_share": "share of weights beyond the limit",
    "input_largest_over_median": "inputs: largest over median column",
    "zeroed": "share of the inputs rounded to 0",
    "nats": "rise of the loss in INT8, nats a token",
}
CURVES = {
    "sensitivity": ("tab:blue", "by sensitivity"),
    "outlier_share": ("tab:red", "by outliers of the weights"),
    "input_outliers": ("tab:orange", "by outliers of the inputs"),
    f"sensitivity{SMOOTHED}": ("tab:green", "by sensitivity, smoothed"),
}


def plot_layers(layers: Sequence[Row], path: Path) -> None:
    """Signs of outliers and the cost of INT8 by block, a line a kind of layer."""
    figure, panels = plt.subplots(2, 2, figsize=(13, 8), layout="constrained", sharex=True)
    kinds = dict.fromkeys(_kind(row) for row in layers)
    for panel, (column, label) in zip(panels.flat, PANELS.items(), strict=True):
        for kind in kinds:
            values = [row[column] for row in layers if _kind(row) == kind]
            panel.plot(range(len(values)), values, marker=".", label=kind)
        panel.set(ylabel=label, yscale="linear" if column == "zeroed" else "log")
    for panel in panels[-1]:
        panel.set_xlabel("block")
    panels[0, 0].legend(fontsize="small", ncols=2)
    _save(figure, path)


def plot_smoothing(layers: Sequence[Row], path: Path) -> None:
    """Three figures of each layer before and after smoothing; below the line is better."""
    figure, panels = plt.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
    labels = {
        "zeroed": PANELS["zeroed"],
        "noise": "squared error of a token's outputs over their square",
        "nats": PANELS["nats"],
    }
    for panel, (column, label) in zip(panels, labels.items(), strict=True):
        for kind in dict.fromkeys(_kind(row) for row in layers):
            own = [row for row in layers if _kind(row) == kind]
            before, after = ([row[f"{column}{end}"] for row in own] for end in ("", SMOOTHED))
            panel.plot(before, after, ".", label=kind)
        scale = "linear" if column == "zeroed" else "log"
        panel.set(xlabel="as published", ylabel="smoothed", title=label, xscale=scale, yscale=scale)
        ends = [min(panel.get_xlim()[0], panel.get_ylim()[0]), panel.get_xlim()[1]]
        panel.plot(ends, ends, color="0.7", zorder=0)
        panel.title.set_fontsize("medium")
    panels[0].legend(fontsize="small")
    _save(figure, path)


def plot_curves(curves: Sequence[Row], mixtures: Sequence[Row], path: Path) -> None:
    """The predicted rise of the loss against size for each rule, and what was measured."""
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    for rule, (colour, label) in CURVES.items():
        own = [row for row in curves if row["rule"] == rule][:-1]
        axes.plot(
            [row["megabytes"] for row in own],
            [row["nats"] for row in own],
            color=colour,
            label=label,
        )
        tried = [row for row in mixtures if row["rule"] == rule]
        axes.plot(
            [row["megabytes"] for row in tried], [row["nats"] for row in tried], "o", color=colour
        )
    whole = [row for row in mixtures if not row["layers_16bit"]]
    axes.plot(
        [row["megabytes"] for row in whole],
        [row["nats"] for row in whole],
        "ko",
        label="measured on held-out text (all colours)",
    )
    axes.set(
        xlabel="megabytes of the linear layers",
        ylabel="rise of the loss (KL divergence from 16 bits), nats a token",
        yscale="log",
    )
    axes.legend(fontsize="small")
    _save(figure, path)


def _kind(row: Row) -> str:
    return str(row["layer"]).rpartition(".")[2]


def _save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
