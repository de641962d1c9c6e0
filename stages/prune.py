"""Make one pruned variant of the language model."""

import sys
from pathlib import Path

from inferlab.calibration.statistics import Calibration
from inferlab.errors import InferlabError, lookup
from inferlab.pruning.checkpoint import METHODS, prune_checkpoint
from inferlab.run import stage
from inferlab.store import open_checkpoint, write_card


def main(variant: str) -> None:
    """Write models/<variant> and its metrics."""
    try:
        params = lookup(METHODS, variant, "variant")
    except InferlabError as error:
        sys.exit(f"inferlab: {error}")
    with stage("prune", params, variant) as run:
        checkpoint = open_checkpoint(Path("models/base"))
        calibration = Calibration(Path("data/calibration"))
        output = run.folder(f"models/{variant}")
        with run.timed("prune"):
            report = prune_checkpoint(checkpoint, calibration, run.params, output)
        write_card(output, report.bits_per_weight, packed=False)
        run.metrics(f"metrics/prune/{variant}.json", report.metrics())


if __name__ == "__main__":
    main(sys.argv[1])
