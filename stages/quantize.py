"""Make one quantized variant of the language model."""

import sys
from dataclasses import asdict
from pathlib import Path

from inferlab.calibration.statistics import Calibration
from inferlab.errors import InferlabError, lookup
from inferlab.quantization.driver import Job
from inferlab.quantization.methods import METHODS
from inferlab.run import stage
from inferlab.store import open_checkpoint, write_card


def main(variant: str) -> None:
    """Write models/<variant> and its metrics."""
    try:
        method = lookup(METHODS, variant, "variant")
    except InferlabError as error:
        sys.exit(f"inferlab: {error}")
    with stage("quantize", method.params, variant) as run:
        job = Job(
            checkpoint=open_checkpoint(Path("models/base")),
            calibration=Calibration(Path("data/calibration")),
            windows=Path("data/windows/calibration.safetensors"),
            output=run.folder(f"models/{variant}"),
            threads=run.threads,
        )
        with run.timed("quantize"):
            report = method.run(job, run.params)
        write_card(job.output, report.bits_per_weight, report.packed)
        found = asdict(report) | {"packed": int(report.packed)}
        run.metrics(f"metrics/quantize/{variant}.json", found)


if __name__ == "__main__":
    main(sys.argv[1])
