"""The figure of the engine comparison: published ratios and times, and what was measured here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from inferlab.serving.engine_comparison import Pair

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_engines(pairs: Sequence[Pair], measured: Sequence[dict[str, Any]], path: Path) -> None:
    """TensorRT-LLM over vLLM by batch; first tokens of a burst by length; decoding here."""
    figure, panels = plt.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
    _ratios(panels[0], pairs)
    _first_tokens(panels[1], pairs)
    _here(panels[2], measured)
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def _ratios(panel: plt.Axes, pairs: Sequence[Pair]) -> None:
    series: dict[str, list[tuple[int, float]]] = {}
    for pair in pairs:
        row = pair.vllm
        if row.metric == "total_throughput":
            name = f"{row.gpu.split()[0]}, {row.input_tokens} in and out"
            series.setdefault(name, []).append((int(row.load.split()[-1]), pair.advantage))
    for name, points in series.items():
        panel.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    panel.axhline(1, color="0.5", linewidth=1)
    panel.set_xscale("log", base=2)
    ticks = sorted({batch for points in series.values() for batch, _ in points})
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.set(
        title="Throughput, TensorRT-LLM over vLLM\n(Llama-3-8B, 16 bits, 2024)",
        xlabel="sequences in a static batch",
        ylabel="ratio, above 1: TensorRT-LLM ahead",
    )
    panel.legend(fontsize="small")


def _first_tokens(panel: plt.Axes, pairs: Sequence[Pair]) -> None:
    burst = [
        pair
        for pair in pairs
        if pair.vllm.metric == "ttft_median" and pair.vllm.gpu.startswith("A100")
    ]
    burst.sort(key=lambda pair: float(pair.vllm.input_tokens))
    lengths = [float(pair.vllm.input_tokens) for pair in burst]
    for name, rows in (
        ("vLLM 0.11", [pair.vllm for pair in burst]),
        ("TensorRT-LLM 1.2 rc1", [pair.tensorrt for pair in burst]),
    ):
        panel.plot(lengths, [row.value / 1000 for row in rows], marker="o", label=name)
    panel.set(
        xscale="log",
        yscale="log",
        title="Median first token of a burst on an A100\n(Qwen3-14B, 100 to 1,000 at once, 2025)",
        xlabel="tokens in the prompt",
        ylabel="seconds, queue included",
    )
    panel.legend(fontsize="small")


def _here(panel: plt.Axes, measured: Sequence[dict[str, Any]]) -> None:
    stages = list(dict.fromkeys(row["measured_by"] for row in measured))
    names = [f"{row['engine']}, {row['variant']}" for row in measured]
    colours = [f"C{stages.index(row['measured_by'])}" for row in measured]
    places = range(len(measured))
    bars = panel.barh(places, [row["decode_tokens_per_s"] for row in measured], color=colours)
    panel.bar_label(bars, fmt="%.0f", padding=3, fontsize="small")
    panel.set_yticks(places, names, fontsize="small")
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.set(
        title="Decoding one sequence on this machine\n(compare within a colour only)",
        xlabel="tokens a second",
    )
    handles = [plt.Rectangle((0, 0), 1, 1, color=f"C{place}") for place in range(len(stages))]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": 2}
    panel.legend(handles, stages, fontsize="small", **below)
