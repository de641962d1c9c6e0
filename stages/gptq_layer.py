"""GPTQ on one linear layer, step by step and option by option."""

from pathlib import Path

from inferlab.calibration.statistics import Calibration
from inferlab.quantization import gptq_study as study
from inferlab.quantization.gptq_plots import plot_columns
from inferlab.run import stage
from inferlab.store import open_checkpoint


def main() -> None:
    """Write metrics/gptq_layer.json and what happens to a row, to the columns, to the error."""
    with stage("gptq_layer", study.GptqLayerParams) as run:
        layer, params = run.params.layer, run.params.gptq
        subject = study.load_subject(
            open_checkpoint(Path("models/base")),
            Calibration(Path("data/calibration")),
            layer,
            params,
        )
        run.table("plots/gptq_layer/steps.csv", study.step_table(subject, params, run.params.row))
        run.table("plots/gptq_layer/options.csv", study.option_table(subject, params))
        columns = study.column_table(subject, study.column_results(subject, params))
        run.table("plots/gptq_layer/columns.csv", columns)
        plot_columns(columns, layer, run.output("plots/gptq_layer/columns.png"))
        run.metrics("metrics/gptq_layer.json", study.summary(subject, params))


if __name__ == "__main__":
    main()
