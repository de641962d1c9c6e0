"""Pictures of the cascade study."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from inferlab.simulation.cascade_pair import THOUSAND, PairCosts, PairParams

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Row = dict[str, Any]
LABELS = {"raw": "as trained", "scaled": "temperature-scaled"}


def plot_cascade(
    curve: Sequence[Row],
    choices: Sequence[Row],
    bins: Sequence[Row],
    cost_ratio: float,
    values: dict[str, float],
    path: Path,
) -> None:
    """Accuracy against cost with its bounds, and the reliability diagram of the student.

    cost_ratio: student over teacher; values: the metrics, for the accuracies of both alone.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.2), layout="constrained")
    _plot_curve(left, curve, choices, cost_ratio, values)
    _plot_reliability(right, bins)
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def _plot_curve(
    axes: Axes,
    curve: Sequence[Row],
    choices: Sequence[Row],
    cost_ratio: float,
    values: dict[str, float],
) -> None:
    for kind, label in LABELS.items():
        own = [row for row in curve if row["confidence"] == kind]
        costs = [row["cost_vs_teacher"] for row in own]
        accuracies = [row["accuracy"] for row in own]
        spread = [row["accuracy_std"] for row in own]
        axes.errorbar(costs, accuracies, spread, marker="o", ms=4, capsize=2, label=label)
    ordered = sorted(curve, key=lambda row: row["cost_vs_teacher"])
    for name, style in (("oracle", "-."), ("random", ":")):
        accuracies = [row[f"{name}_accuracy"] for row in ordered]
        costs = [row["cost_vs_teacher"] for row in ordered]
        axes.plot(costs, accuracies, style, color="grey", label=f"{name} routing")
    for marker, name, cost in (("s", "student", cost_ratio), ("D", "teacher", 1.0)):
        axes.plot(cost, values[f"{name}_accuracy"], marker, color="black", label=f"{name} alone")
    scaled = next(row for row in choices if row["confidence"] == "scaled")
    axes.plot(
        scaled["cost_vs_teacher"],
        scaled["accuracy"],
        "*",
        ms=14,
        color="tab:red",
        label=f"chosen on the other half ({scaled['threshold']:.2f} on average)",
    )
    axes.set(
        xlabel="cost over the teacher's",
        ylabel="test accuracy, mean and std over random halves and students",
        title="Student first, teacher below a threshold of 0.5 to 0.95",
    )
    axes.legend(fontsize="small")


def _plot_reliability(axes: Axes, bins: Sequence[Row]) -> None:
    for kind, label in LABELS.items():
        own = [row for row in bins if row["confidence"] == kind]
        confidence = [row["mean_confidence"] for row in own]
        axes.plot(confidence, [row["accuracy"] for row in own], "o-", ms=4, label=label)
    axes.plot([0, 1], [0, 1], ":", color="grey", label="calibrated")
    axes.set(
        xlabel="the student's top probability",
        ylabel="accuracy",
        title="Can its confidence be believed?",
    )
    axes.legend()


def plot_pair(
    curve: Sequence[Row], chosen: Sequence[Row], costs: PairCosts, params: PairParams, path: Path
) -> None:
    """The simulated pair: accuracy against dollars under each assumption, prices in the caption."""
    count = len(params.correlations)
    figure, panels = plt.subplots(
        1, count, figsize=(5.2 * count, 5.4), layout="constrained", sharey=True, squeeze=False
    )
    for axes, correlation in zip(panels[0], params.correlations, strict=True):
        for signal in params.signals:
            case = (correlation, signal)
            own = [row for row in curve if (row["correlation"], row["signal"]) == case]
            pick = next(row for row in chosen if (row["correlation"], row["signal"]) == case)
            axes.plot(
                [row["usd_per_1000"] for row in own],
                [row["accuracy"] for row in own],
                "o-",
                ms=4,
                label=f"signal {signal:g} (AUROC {pick['auroc']:.2f})",
            )
        models = ((costs.small_usd, params.small, "s"), (costs.large_usd, params.large, "D"))
        ends = [THOUSAND * usd for usd, _, _ in models]
        for usd, model, marker in models:
            name = model.model.split("/")[-1]
            axes.plot(THOUSAND * usd, model.accuracy, marker, color="black", label=f"{name} alone")
        axes.plot(
            [ends[0], sum(ends)],
            [params.small.accuracy, params.large.accuracy],
            ":",
            color="grey",
            label="random routing",
        )
        axes.axvline(ends[1], color="grey", lw=0.8)
        axes.set(
            xlabel="US dollars per 1,000 requests",
            title=f"correlation {correlation:g} between the models",
        )
        axes.legend(fontsize="x-small", loc="lower right")
    panels[0, 0].set_ylabel("accuracy (simulated)")
    sources = "\n".join(
        f"{one.model}: {one.usd_per_mtok_input:g} and {one.usd_per_mtok_output:g} USD per million "
        f"tokens in and out, {one.date}, {one.source}"
        for one in (costs.small, costs.large)
    )
    figure.supxlabel(sources, fontsize=6, x=0.01, ha="left")
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
