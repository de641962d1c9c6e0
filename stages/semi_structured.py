"""33.10: 2:4 sparsity against unstructured, by magnitude, activation-aware and SparseGPT."""

from pathlib import Path

from inferlab.calibration.statistics import Calibration
from inferlab.models.loading import load_model
from inferlab.pruning import semi_structured as study
from inferlab.pruning.kernels import two_four_times
from inferlab.pruning.semi_structured_plots import plot_errors
from inferlab.run import stage
from inferlab.store import load_tensors, open_checkpoint


def main() -> None:
    """Prune the base model in memory in every way and score it."""
    with stage("semi_structured", study.SemiStructuredParams) as run:
        checkpoint = open_checkpoint(Path("models/base"))
        calibration = Calibration(Path("data/calibration"))
        group = study.group_of(checkpoint, run.params.layer)
        prepared = load_tensors(Path("data/windows/heldout.safetensors"))["input_ids"]
        windows = study.heldout(prepared, run.params)
        model = load_model(Path("models/base"), run.threads)
        with run.timed("compare"):
            dense, arms = study.compare(checkpoint, calibration, model, windows, run.params)
        weight = group.weights(checkpoint)[0]
        run.timing(**two_four_times(weight, windows.numel()))
        rows = [arm.row(dense) for arm in arms]
        layers = [row for arm in arms for row in arm.layers]
        run.metrics("metrics/semi_structured.json", study.summary(dense, arms, weight))
        run.table("plots/semi_structured/arms.csv", rows)
        run.table("plots/semi_structured/layers.csv", layers)
        figure = run.output("plots/semi_structured/errors.png")
        plot_errors(rows, layers, dense.perplexity, group.name, figure)


if __name__ == "__main__":
    main()
