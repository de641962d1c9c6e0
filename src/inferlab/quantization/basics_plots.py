"""Histograms of the error of linear quantization, on the tensors of `basics`."""

from pathlib import Path

import matplotlib

from inferlab.quantization.basics import BITS, Outcome

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_errors(cases: list[Outcome], path: Path) -> None:
    """One panel an input and width, with the density that the theory expects."""
    sources = list(dict.fromkeys(case.source for case in cases))
    figure, panels = plt.subplots(
        len(BITS), len(sources), figsize=(4.6 * len(sources), 6.4), layout="constrained"
    )
    for case in cases:
        panel = panels[BITS.index(case.bits), sources.index(case.source)]
        half = case.step / 2
        panel.hist(
            case.errors.numpy().ravel(), bins=120, density=True, color="tab:blue", label="measured"
        )
        panel.plot(
            [-half, -half, half, half],
            [0, 1 / case.step, 1 / case.step, 0],
            color="tab:orange",
            label="uniform within half a step",
        )
        panel.set(
            title=f"INT{case.bits}, {case.source}: step {case.step:.3g}, MAE {case.mae:.3g} "
            f"({4 * case.mae / case.step:.2f} of a quarter step)",
            xlabel="error",
            ylabel="density",
        )
        panel.title.set_fontsize("small")
        panel.locator_params(axis="x", nbins=5)
    panels[0, 0].legend(fontsize="small", loc="lower center")
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
