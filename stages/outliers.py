"""33.3: where outliers live, what they cost in INT8, and what 16-bit layers and smoothing buy."""

from pathlib import Path

from inferlab.calibration.statistics import Calibration
from inferlab.models.loading import load_model
from inferlab.quantization import outlier_plots as plots
from inferlab.quantization.outlier_study import study
from inferlab.quantization.outliers import OutliersParams, correlation_table, metrics
from inferlab.run import stage
from inferlab.store import load_tensors, open_checkpoint


def main() -> None:
    """Write metrics/outliers.json, the tables of layers, rules and mixtures, and their pictures."""
    with stage("outliers", OutliersParams) as run:
        base = Path("models/base")
        windows = {
            name: load_tensors(Path(f"data/windows/{name}.safetensors"))["input_ids"]
            for name in ("calibration", "heldout")
        }
        checkpoint, calibration = open_checkpoint(base), Calibration(Path("data/calibration"))
        model = load_model(base, run.threads).float()
        found = study(model, checkpoint, calibration, windows, run.params, run.seed)
        folder = "plots/outliers"
        run.table(f"{folder}/layers.csv", found.layers)
        run.table(f"{folder}/correlations.csv", correlation_table(found.layers))
        run.table(f"{folder}/curve.csv", found.curves)
        run.table(f"{folder}/mixtures.csv", found.mixtures)
        plots.plot_layers(found.layers, run.output(f"{folder}/layers.png"))
        plots.plot_smoothing(found.layers, run.output(f"{folder}/smoothing.png"))
        plots.plot_curves(found.curves, found.mixtures, run.output(f"{folder}/curve.png"))
        values = metrics(found.layers, found.curves, found.mixtures, run.params.remaining)
        run.metrics("metrics/outliers.json", values)


if __name__ == "__main__":
    main()
