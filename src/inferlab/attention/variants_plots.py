"""The figure of 33.14: latency, and what pooling K/V heads leaves of random and of real outputs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Rows = Sequence[dict[str, Any]]
STYLES = {"layer": "-", "attention": "--", "sdpa": ":"}
COLOURS = {"mha": "tab:blue", "gqa": "tab:orange", "mqa": "tab:green"}


def plot_variants(latencies: Rows, cosines: Rows, layers: Rows, path: Path) -> None:
    """Decode and prefill time by length; cosines of random heads beside theory; of real layers."""
    figure, panels = plt.subplots(2, 2, figsize=(15, 9), layout="constrained")
    for panel, phase in zip(panels[0], ("decode", "prefill"), strict=True):
        _draw_times(panel, [row for row in latencies if row["phase"] == phase])
        panel.set_title(f"{phase}, fp32")
    _draw_random(panels[1][0], cosines)
    _draw_real(panels[1][1], layers)
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def _draw_times(panel: plt.Axes, rows: Rows) -> None:
    for variant, colour in COLOURS.items():
        for part, style in STYLES.items():
            own = [row for row in rows if (row["variant"], row["part"]) == (variant, part)]
            lengths = [row["length"] for row in own]
            taken = [row["milliseconds"] for row in own]
            panel.plot(lengths, taken, style, color=colour, marker=".", label=f"{variant}, {part}")
    panel.set(xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds")
    panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
    panel.minorticks_off()
    panel.legend(fontsize="small", ncols=3)


def _draw_random(panel: plt.Axes, rows: Rows) -> None:
    both = [row for row in rows if row["part"] == "both"]
    for number, kv_heads in enumerate(dict.fromkeys(row["kv_heads"] for row in both)):
        own = [row for row in both if row["kv_heads"] == kv_heads]
        correlations, colour = [row["correlation"] for row in own], f"C{number + 1}"
        name = f"{kv_heads} KV heads" if kv_heads > 1 else "1 KV head"
        panel.plot(correlations, [row["expected"] for row in own], color=colour, label=name)
        panel.errorbar(
            correlations,
            [row["cosine"] for row in own],
            yerr=[row["cosine_std"] for row in own],
            fmt="o",
            color=colour,
            label=f"{name}, measured",
        )
    panel.set(
        xlabel="correlation of any two heads' weights",
        ylabel="cosine of the layer's outputs",
        title="random weights, K/V heads mean-pooled",
        ylim=(0, 1.02),
    )
    panel.legend(fontsize="small")


def _draw_real(panel: plt.Axes, rows: Rows) -> None:
    layers = [row["layer"] for row in rows]
    for number, part in enumerate(("keys", "values", "both")):
        own = [row[f"cosine_{part}"] for row in rows]
        panel.plot(layers, own, color=f"C{number}", marker=".", label=part)
    aligned = [row["cosine_values_aligned"] for row in rows]
    panel.plot(layers, aligned, "C1--", label="values, heads turned alike first")
    foretold = [row["kept_values"] ** 0.5 for row in rows]
    panel.plot(layers, foretold, "k:", label="values, as their similarity foretells")
    panel.set(
        xlabel="layer",
        ylabel="cosine of the layer's outputs",
        title="the real model, its KV heads pooled to one",
        ylim=(0, 1.02),
    )
    panel.legend(fontsize="small", title="pooled", loc="upper left", bbox_to_anchor=(1, 1))
