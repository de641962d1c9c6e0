"""The figure of 33.9."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from torch import Tensor

from inferlab.data.tables import Row
from inferlab.pruning.head_study import Arm

CHOICES = {
    "gradient": "least by gradient",
    "taylor": "least by Taylor",
    "random": "random",
    "most_important": "most by gradient",
}
MARKS = ("x", "o", "s", "^")


def plot_heads(
    scores: Tensor,
    arms: Sequence[Arm],
    rows: Sequence[Row],
    layers: Sequence[Row],
    path: Path,
) -> None:
    """Heat map of the gradient scores [samples, layers, heads], accuracy by arm, layers."""
    figure, panels = plt.subplots(1, 3, figsize=(18, 5), layout="constrained")
    _heat_map(figure, panels[0], scores, [arm for arm in arms if arm.choice == "gradient"])
    _accuracies(panels[1], rows)
    _layers(panels[2], layers)
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def _heat_map(figure: plt.Figure, panel: plt.Axes, scores: Tensor, ranked: Sequence[Arm]) -> None:
    """A mark shows from which share on a head goes."""
    image = panel.imshow(scores.mean(0), cmap="viridis", aspect="auto")
    figure.colorbar(image, ax=panel, label="mean |∂L/∂mask|, nats")
    gone = np.zeros(ranked[0].removed.shape, dtype=bool)
    for mark, arm in zip(MARKS, sorted(ranked, key=lambda arm: arm.share), strict=False):
        layer, head = np.nonzero(arm.removed.numpy() & ~gone)
        panel.plot(
            head,
            layer,
            mark,
            color="white",
            markerfacecolor="none",
            markersize=8,
            linestyle="none",
            label=f"goes at {100 * arm.share:g} %",
        )
        gone |= arm.removed.numpy()
    panel.set(xlabel="head", ylabel="layer", title="importance of each head")
    panel.set_xticks(range(scores.shape[2]))
    panel.set_yticks(range(scores.shape[1]))
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, labelcolor="black")
    panel.get_legend().get_frame().set_facecolor("lightgrey")


def _accuracies(panel: plt.Axes, rows: Sequence[Row]) -> None:
    """Bars by choice and share, without and with retraining."""
    shares = sorted({row["share"] for row in rows} - {0.0})
    whole = {row["state"]: row["accuracy_mean"] for row in rows if row["choice"] == "whole"}
    names = [(choice, share) for share in shares for choice in CHOICES]
    labels = {"pruned": "not retrained", "recovered": "retrained"}
    for offset, state in enumerate(labels):
        own = {(row["choice"], row["share"]): row for row in rows if row["state"] == state}
        bars = panel.barh(
            [place + 0.4 * offset - 0.2 for place in range(len(names))],
            [own[name]["accuracy_mean"] for name in names],
            0.4,
            xerr=[own[name]["accuracy_std"] for name in names],
            label=labels[state],
        )
        panel.bar_label(bars, fmt="%.3f", fontsize="small", label_type="center", color="white")
        panel.axvline(
            whole[state],
            color=f"C{offset}",
            linestyle=":",
            label=f"whole, {labels[state]}",
        )
    ticks = [f"{100 * share:g} %, {CHOICES[choice]}" for choice, share in names]
    panel.set_yticks(range(len(names)), ticks)
    panel.invert_yaxis()
    panel.set(xlabel="test accuracy, mean and std of draws", title="what removal costs")
    panel.legend(loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=4, fontsize="small")


def _layers(panel: plt.Axes, layers: Sequence[Row]) -> None:
    lost = [name for name in layers[0] if name.startswith("heads_lost_")]
    places = np.arange(len(layers))
    for number, name in enumerate(lost):
        offset = 0.8 * (number + 0.5) / len(lost) - 0.4
        heights = [row[name] for row in layers]
        share = name.removeprefix("heads_lost_")
        panel.bar(places + offset, heights, 0.8 / len(lost), label=f"heads lost at {share} %")
    panel.set(xlabel="layer", ylabel="heads", title="which layers lose most")
    panel.set_xticks(places)
    cost = panel.twinx()
    cost.plot(
        places,
        [row["nats_without_half"] for row in layers],
        "o-",
        color="black",
        label="loss when it alone loses half",
    )
    cost.axhline(0, color="grey", linewidth=0.5)
    cost.set_ylabel("rise of the test loss, nats")
    handles = [
        *panel.get_legend_handles_labels()[0],
        *cost.get_legend_handles_labels()[0],
    ]
    panel.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
        ncols=3,
        fontsize="small",
    )
