"""Calibration text through the model, and its gradients back: what every method reads."""

from pathlib import Path

from inferlab.calibration.capture import CalibrateParams, calibrate
from inferlab.calibration.statistics import Calibration, summary
from inferlab.errors import InferlabError
from inferlab.models.loading import quieten
from inferlab.run import stage
from inferlab.store import load_tensors, open_checkpoint


def main() -> None:
    """Write data/calibration, one file a block."""
    with stage("calibrate", CalibrateParams) as run:
        quieten()
        checkpoint = open_checkpoint(Path("models/base"))
        prepared = load_tensors(Path("data/windows/calibration.safetensors"))["input_ids"]
        if len(prepared) < run.params.windows:
            raise InferlabError(
                f"calibrate.windows is {run.params.windows}, but only {len(prepared)} were "
                "prepared; raise prepare.calibration_windows (params.yaml)"
            )
        windows = prepared[: run.params.windows]
        calibration = Calibration(run.folder("data/calibration"))
        with run.timed("forward"):
            rows = calibrate(checkpoint, windows, run.params, calibration)
        run.table("plots/calibrate/inputs.csv", rows)
        run.metrics("metrics/calibrate.json", summary(rows))


if __name__ == "__main__":
    main()
