"""Pictures of who shares a scale: how scales spread, and the ratio that follows from it."""

from pathlib import Path

import matplotlib
import numpy as np

from inferlab.quantization.channel_scales import LayerErrors

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_prediction(errors: list[LayerErrors], path: Path) -> None:
    """Predicted against measured ratio of squared errors, a point a layer."""
    figure, axes = plt.subplots(figsize=(6.5, 6), layout="constrained")
    for sharing, label in (("channel", "one a channel"), ("group", "one a group")):
        predicted = [one.predicted_ratio(sharing) for one in errors]
        measured = [one.ratio(sharing) for one in errors]
        axes.plot(predicted, measured, ".", alpha=0.6, label=f"one scale a tensor over {label}")
    limits = axes.get_xlim()
    axes.plot(limits, limits, color="0.6", zorder=0, label="equal")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="ratio of squared errors predicted from the scales alone",
        ylabel="ratio of squared errors measured",
    )
    axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def plot_scales(errors: list[LayerErrors], detail: LayerErrors, path: Path) -> None:
    """The channels of one layer, scales and errors; and the spread of scales in every layer."""
    figure, (spread, rows, layers) = plt.subplots(1, 3, figsize=(16, 4.6), layout="constrained")
    steps = detail.steps.numpy()
    spread.hist(steps / detail.tensor_step, bins=60)
    spread.set(xlabel="step of a channel over that of the tensor", ylabel="channels")
    spread.set_title(detail.name, fontsize="small")
    for sharing in ("tensor", "channel"):
        rows.plot(steps, detail.row_mse[sharing].numpy(), ".", markersize=3, label=f"per {sharing}")
    line = np.linspace(steps.min(), steps.max(), 100)
    rows.plot(line, line**2 / 12, color="0.4", label="step² / 12")
    rows.set(xlabel="step of a channel", ylabel="squared error of its weights", yscale="log")
    rows.set_title(detail.name, fontsize="small")
    rows.legend(fontsize="small")
    for kind in dict.fromkeys(one.name.rpartition(".")[2] for one in errors):
        own = [one for one in errors if one.name.endswith(f".{kind}")]
        medians = [float(one.steps.median()) / (one.tensor_step or 1.0) for one in own]
        layers.plot(range(len(own)), medians, marker=".", label=kind)
    layers.set(xlabel="block", ylabel="median channel step over that of the tensor", ylim=(0, 1))
    layers.legend(fontsize="small", ncols=2)
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
