"""Perplexity against bits a weight: round-to-nearest and GPTQ over widths, groups and grids."""

from pathlib import Path

from inferlab.calibration.statistics import Calibration
from inferlab.quantization.sweep import QuantizeSweepParams, summary, sweep, with_ratios
from inferlab.quantization.sweep_plots import plot_sweep
from inferlab.run import stage
from inferlab.store import load_tensors


def main() -> None:
    """Write the table and the figure of all points."""
    with stage("quantize_sweep", QuantizeSweepParams) as run:
        windows = load_tensors(Path("data/windows/heldout.safetensors"))
        calibration = Calibration(Path("data/calibration"))
        with run.timed("sweep"):
            rows = sweep(Path("models/base"), calibration, windows, run.params, run.threads)
        run.timing(seconds_a_point=run.seconds("sweep") / len(rows))
        rows = with_ratios(rows)
        run.metrics("metrics/quantize_sweep.json", summary(rows, run.params))
        run.table("plots/quantize_sweep/points.csv", rows)
        plot_sweep(rows, run.output("plots/quantize_sweep/bits.png"))


if __name__ == "__main__":
    main()
