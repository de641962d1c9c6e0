"""Pictures of the study of speculative sampling."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from inferlab.speculative.closed_form import best_length, speedup, tokens_per_call
from inferlab.speculative.sampling_study import Row, SpeculativeSamplingParams

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

SMALLEST = 1e-20  # p-values below are drawn here


def plot_sampling(
    rows: Sequence[Row], tests: Sequence[Row], params: SpeculativeSamplingParams, path: Path
) -> None:
    """Speed-up against draft length, where speculation pays, and the p-values of both rules."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16.5, 5), layout="constrained")
    _plot_lengths(left, rows, params)
    _plot_break_even(middle, params)
    _plot_tests(right, tests, params)
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def _plot_lengths(axes: Axes, rows: Sequence[Row], params: SpeculativeSamplingParams) -> None:
    for agreement in params.agreements:
        own = [
            row
            for row in rows
            if row["agreement"] == agreement and row["cost_ratio"] == params.shown_cost_ratio
        ]
        lengths = [row["draft_length"] for row in own]
        (line,) = axes.plot(lengths, [row["speedup_expected"] for row in own], lw=1)
        axes.plot(
            lengths,
            [row["speedup"] for row in own],
            "o",
            color=line.get_color(),
            label=f"{agreement:.0%} agreement",
        )
    axes.axhline(1, color="grey", lw=0.8)
    axes.set(
        xlabel="draft length (tokens)",
        ylabel="speed-up over plain decoding",
        title=f"Draft step at {params.shown_cost_ratio:g} of a target call; lines: closed form",
    )
    axes.legend(fontsize="small")


def _plot_break_even(axes: Axes, params: SpeculativeSamplingParams) -> None:
    """The best speed-up of the closed form over acceptance and cost ratio."""
    acceptances, ratios = np.linspace(0.3, 0.98, 60), np.linspace(0.005, 0.95, 60)
    best = np.array(
        [
            [_best_speedup(one, ratio, params.draft_lengths) for one in acceptances]
            for ratio in ratios
        ]
    )
    levels = [1, 1.25, 1.5, 2, 3, 4, 5]
    axes.contourf(acceptances, ratios, best, levels, cmap="viridis", alpha=0.55, extend="max")
    lines = axes.contour(acceptances, ratios, best, levels, colors="black", linewidths=0.8)
    axes.clabel(lines, fmt="%g×")
    axes.plot([0.3, 0.95], [0.3, 0.95], "--", color="tab:red", label="cost ratio = acceptance")
    for agreement in params.agreements:
        axes.axvline(agreement, color="white", lw=0.8, ls=":")
    axes.set(
        xlabel="acceptance rate",
        ylabel="cost of a draft step / target call",
        title=f"Best speed-up with at most {max(params.draft_lengths)} drafted tokens",
    )
    axes.legend(loc="upper left", fontsize="small")


def _best_speedup(acceptance: float, ratio: float, lengths: Sequence[int]) -> float:
    length = best_length(acceptance, ratio, lengths)
    return speedup(tokens_per_call(acceptance, length), length, ratio)


def _plot_tests(axes: Axes, tests: Sequence[Row], params: SpeculativeSamplingParams) -> None:
    for rule, marker in (("residual", "o"), ("broken", "x")):
        values = sorted(row["p_value"] for row in tests if row["rule"] == rule)
        places = (np.arange(len(values)) + 0.5) / len(values)
        label = "right rule" if rule == "residual" else "resampled from the target"
        axes.plot(places, np.maximum(values, SMALLEST), marker, ms=4, label=label)
    even = np.linspace(0.005, 1, 100)
    axes.plot(even, even, color="grey", lw=1, label="uniform: a right rule")
    axes.axhline(params.test.level, color="tab:red", lw=0.8, ls="--", label="level of the test")
    axes.set(
        yscale="log",
        ylim=(SMALLEST / 3, 3),
        xlabel="rank of the p-value / number of tests",
        ylabel=f"p-value (below {SMALLEST:g} drawn there)",
        title="Do outputs follow the target?",
    )
    axes.legend(fontsize="small", loc="center left")
