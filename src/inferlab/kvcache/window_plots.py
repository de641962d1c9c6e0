"""The figure of 33.13: perplexity by window, divergence along the text, and what memory buys."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

MIB = 2**20


def plot_windows(
    rows: Sequence[dict[str, Any]], along: Sequence[dict[str, Any]], window: int, path: Path
) -> None:
    """Left: perplexity by window. Middle: divergence along the text. Right: bytes against it."""
    figure, panels = plt.subplots(1, 3, figsize=(16, 4.8), layout="constrained")
    _draw_perplexity(panels[0], rows)
    _draw_along(panels[1], [row for row in along if row["arm"].split("_")[0] == f"w{window}"])
    _draw_memory(panels[2], rows)
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def _kinds(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    bounded = [row for row in rows if row["arm"] != "full" and row["positions"] == "kept"]
    return {
        "window alone": [row for row in bounded if not row["anchors"]],
        "with anchors": [row for row in bounded if row["anchors"]],
    }


def _draw_perplexity(panel: plt.Axes, rows: Sequence[dict[str, Any]]) -> None:
    for label, own in _kinds(rows).items():
        sizes = [row["window"] for row in own]
        panel.plot(sizes, [row["token_perplexity"] for row in own], marker="o", label=label)
    full = next(row for row in rows if row["arm"] == "full")
    panel.axhline(full["token_perplexity"], color="0.4", linestyle="--", label="full attention")
    panel.set(xscale="log", yscale="log", xlabel="window, tokens", ylabel="token perplexity")
    panel.set_xticks(sizes, sizes)
    panel.minorticks_off()
    low, high = panel.get_ylim()
    ticks = [tick for tick in (5, 10, 15, 20, 30, 50, 100, 200, 500, 1000) if low < tick < high]
    panel.set_yticks(ticks, ticks)
    panel.legend()


def _draw_along(panel: plt.Axes, along: Sequence[dict[str, Any]]) -> None:
    for name in dict.fromkeys(row["arm"] for row in along):
        own = [row for row in along if row["arm"] == name and row["kl_nats"] > 0]
        places = [row["from_token"] for row in own]
        panel.plot(places, [max(row["kl_nats"], 1e-5) for row in own], label=name)
    panel.set(yscale="log", xlabel="token", ylabel="KL from full attention, nats")
    panel.set_title("the same window along the text", fontsize="medium")
    panel.legend(fontsize="small")


def _draw_memory(panel: plt.Axes, rows: Sequence[dict[str, Any]]) -> None:
    for label, own in _kinds(rows).items():
        sizes = [row["cache_bytes"] / MIB for row in own]
        panel.plot(sizes, [row["kl_nats"] for row in own], marker="o", label=label)
        for row, size in zip(own, sizes, strict=True):
            panel.annotate(
                row["window"],
                (size, row["kl_nats"]),
                textcoords="offset points",
                xytext=(4, 4),
                fontsize="small",
            )
    full = next(row for row in rows if row["arm"] == "full")["cache_bytes"] / MIB
    panel.axvline(full, color="0.4", linestyle="--", label="full cache")
    panel.set(yscale="log", xlabel="cache held, MiB", ylabel="KL from full attention, nats")
    panel.legend()
