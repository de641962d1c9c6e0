"""What distillation comes to, as pictures."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from inferlab.data.tables import Row


def plot_temperatures(rows: Sequence[Row], teacher_accuracy: float, path: Path) -> None:
    """Left: accuracy against temperature. Right: each arm's gain over cross-entropy."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for kind, label in (("kl_t", "KL only"), ("combined_t", "KL and labels")):
        own = [row for row in rows if row["arm"].startswith(kind) and "fresh" not in row["arm"]]
        left.errorbar(
            [row["temperature"] for row in own],
            [row["accuracy_mean"] for row in own],
            [row["accuracy_std"] for row in own],
            marker="o",
            capsize=3,
            label=label,
        )
    (plain,) = (row for row in rows if row["arm"] == "ce")
    mean, spread = plain["accuracy_mean"], plain["accuracy_std"]
    left.axhline(mean, color="grey", label="labels only")
    left.axhspan(mean - spread, mean + spread, color="grey", alpha=0.2)
    left.axhline(teacher_accuracy, color="black", linestyle="--", label="teacher")
    left.set(xscale="log", xlabel="temperature", ylabel="test accuracy, mean and std of seeds")
    temperatures = sorted({row["temperature"] for row in rows})
    left.set_xticks(temperatures, [f"{one:g}" for one in temperatures])
    left.minorticks_off()
    left.legend()

    others = [row for row in rows if row["arm"] != "ce"][::-1]
    gains = [row["minus_ce"] for row in others]
    below = [row["minus_ce"] - row["minus_ce_low"] for row in others]
    above = [row["minus_ce_high"] - row["minus_ce"] for row in others]
    places = range(len(others))
    right.errorbar(gains, places, xerr=[below, above], fmt="o", capsize=3)
    right.axvline(0, color="grey")
    right.set_yticks(places, [row["arm"] for row in others])
    right.set(xlabel="accuracy minus cross-entropy's, 95 % interval over documents and seeds")
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)


def plot_amounts(table: Sequence[Row], path: Path) -> None:
    """Perplexity and four-way accuracy against the pairs trained on, the spread over seeds."""
    panels = {
        "answer_perplexity": "answer perplexity",
        "four_way_accuracy": "four-way accuracy",
    }
    figure, axes = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    curve = sorted(
        (row for row in table if row["arm"].startswith("synthetic")), key=lambda row: row["pairs"]
    )
    for axis, (name, label) in zip(axes, panels.items(), strict=True):
        series = {"synthetic": curve}
        series |= {arm: [row for row in table if row["arm"] == arm] for arm in ("human", "mixture")}
        for arm, rows in series.items():
            spread = [row[f"{name}_std"] for row in rows]
            axis.errorbar(
                [row["pairs"] for row in rows],
                [row[name] for row in rows],
                spread,
                marker="o",
                capsize=3,
                label=arm,
            )
        axis.axhline(table[0][name], color="grey", linestyle="--", label="untrained")
        axis.set(xlabel="training pairs", ylabel=f"{label}, mean and std of seeds")
    axes[0].legend()
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)
