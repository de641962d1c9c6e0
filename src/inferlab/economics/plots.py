"""The figures of the cost report."""

from pathlib import Path

import matplotlib
import numpy as np

from inferlab.economics.comparison import THIS_MACHINE, Comparison
from inferlab.economics.cost import daily_usd, usd_per_mtok

matplotlib.use("Agg")
from matplotlib import pyplot as plt

POINTS = 400  # loads along the axis; enough for the stairs of whole instances to show


def plot_daily_cost(comparison: Comparison, requests_per_day: tuple[int, ...], path: Path) -> None:
    """Daily cost against requests per day, both logarithmic; API models are straight lines."""
    low, high = min(requests_per_day) / 10, max(requests_per_day) * 10
    loads = np.unique(np.geomspace(max(low, 1), high, POINTS).astype(int))
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    for machine in comparison.machines:
        style = "--" if machine.name.startswith(THIS_MACHINE) else "-"
        usd = [daily_usd(machine, comparison.workload, int(load)) for load in loads]
        axes.step(loads, usd, style, where="post", label=machine.name)
    for api in comparison.apis.values():
        usd = loads * api.usd_per_request(comparison.workload)
        axes.plot(loads, usd, ":", label=f"{api.model} (API)")
    for requests in requests_per_day:
        axes.axvline(requests, color="0.85", zorder=0)
    workload = comparison.workload
    axes.set(
        xscale="log",
        yscale="log",
        xlabel=f"requests a day of {workload.input_tokens} input and {workload.output_tokens} "
        f"output tokens; busiest hour {workload.peak_to_mean:g} times the mean",
        ylabel="US dollars a day, whole instances paid for 24 hours",
        title=f"GPUs serve {comparison.published_model}; {THIS_MACHINE} its own, smaller model",
    )
    axes.legend(fontsize="small")
    _save(figure, path)


def plot_per_million_tokens(comparison: Comparison, path: Path) -> None:
    """Bars of the cost per million input and output tokens, with the sources in the caption."""
    rows = [
        (machine.name, *usd_per_mtok(machine, comparison.workload))
        for machine in comparison.machines
    ]
    rows += [
        (api.model, api.usd_per_mtok_input, api.usd_per_mtok_output)
        for api in comparison.apis.values()
    ]
    names, input_usd, output_usd = zip(*rows, strict=True)
    places = np.arange(len(names))
    sources = [
        f"{machine.name}: {machine.instance_hour.usd:g} USD an hour, "
        f"{machine.instance_hour.date}, {machine.instance_hour.source}"
        for machine in comparison.machines
    ]
    sources += [f"{api.model}: {api.date}, {api.source}" for api in comparison.apis.values()]
    height = 1.5 + 0.55 * len(names)
    figure, axes = plt.subplots(figsize=(11, height), layout="constrained")
    for offset, usd, label in ((-0.2, input_usd, "input"), (0.2, output_usd, "output")):
        bars = axes.barh(places + offset, usd, 0.4, label=f"{label} tokens")
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize="small")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    load = comparison.workload.peak_to_mean
    axes.set(xlabel=f"US dollars per million tokens; instances sized for {load:g} times the mean")
    axes.margins(x=0.1)
    axes.legend(fontsize="small")
    figure.supxlabel("\n".join(sources), fontsize=6, x=0.01, ha="left")
    _save(figure, path)


def _save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
