"""The figure of the draft: acceptance over its training, and how much each block matters."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from inferlab.data.tables import Row

MEASURES = {
    "block_influence": "block influence (1 − cosine)",
    "loss_rise": "rise of the loss without it (nats)",
    "kl_rise": "divergence without it (nats)",
}


def plot_draft(steps: Sequence[Row], layers: Sequence[Row], path: Path) -> None:
    """Left: acceptance and perplexity by step. Right: one panel a measure, kept blocks filled."""
    figure = plt.figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(5, 6))
    _draw_steps(left.subplots(), steps)
    panels = right.subplots(len(MEASURES), 1, sharex=True)
    for panel, (name, label) in zip(panels, MEASURES.items(), strict=True):
        numbers, values = ([row[key] for row in layers] for key in ("layer", name))
        colours = ["C0" if row["kept"] else "0.8" for row in layers]
        panel.bar(numbers, values, color=colours)
        if max(values) > 0:
            panel.set_yscale("symlog", linthresh=max(values) / 1000)
        panel.set_title(label, fontsize="small", loc="left")
        panel.tick_params(labelsize="small")
    panels[-1].set_xlabel("block; those of the draft are blue")
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def _draw_steps(axis: plt.Axes, rows: Sequence[Row]) -> None:
    steps = [row["step"] for row in rows]
    axis.plot(
        steps, [row["acceptance"] for row in rows], marker="o", label="acceptance, Σ min(p, q)"
    )
    low, high = ([row[f"acceptance_{side}"] for row in rows] for side in ("low", "high"))
    axis.fill_between(steps, low, high, alpha=0.2)
    greedy = [row["greedy_agreement"] for row in rows]
    axis.plot(steps, greedy, marker="s", linestyle="--", label="greedy agreement")
    axis.set(xlabel="steps of distillation", ylabel="share of held-out tokens", ylim=(0, None))
    axis.set_title(
        "with the 95 % interval of acceptance over windows", fontsize="small", loc="left"
    )
    axis.legend(loc="lower right")
