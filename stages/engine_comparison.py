"""33.22: vLLM against TensorRT-LLM from published figures, and the engines measured here."""

import csv
import json
from pathlib import Path

import yaml

from inferlab.params import PARAMS
from inferlab.run import stage
from inferlab.serving.engine_comparison import (
    EngineComparisonParams,
    match,
    mismatch_table,
    pair_table,
)
from inferlab.serving.engine_findings import answer, finding_table, metrics
from inferlab.serving.engine_measured import measured_table, prompt_tokens
from inferlab.serving.engine_plots import plot_engines
from inferlab.serving.published import read_published


def main() -> None:
    with stage("engine_comparison", EngineComparisonParams) as run:
        tolerance, margin = run.params.length_tolerance, run.params.margin
        rows = read_published()
        pairs, alone = match(rows, tolerance)
        findings = answer(pairs)
        served = {
            file.stem: json.loads(file.read_text())
            for file in sorted(Path("metrics/serve_benchmark").glob("*.json"))
        }
        formats = table(Path("plots/format_comparison/formats.csv"))
        arms = table(Path("plots/memory_efficient/arms.csv"))
        prompts = prompt_tokens(yaml.safe_load(PARAMS.read_text()))
        configurations = table(Path("plots/end_to_end/configurations.csv"))
        measured = measured_table(served, formats, arms, configurations, prompts)

        run.metrics("metrics/engine_comparison.json", metrics(rows, pairs, findings))
        folder = "plots/engine_comparison"
        run.table(f"{folder}/findings.csv", finding_table(findings, margin))
        run.table(f"{folder}/pairs.csv", pair_table(pairs))
        run.table(f"{folder}/mismatches.csv", mismatch_table(alone, rows, tolerance))
        run.table(f"{folder}/measured.csv", measured)
        plot_engines(pairs, measured, run.output(f"{folder}/engines.png"))


def table(file: Path) -> list[dict[str, str]]:
    """The rows of a table; none where the stage that writes it has not run."""
    if not file.is_file():
        return []
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


if __name__ == "__main__":
    main()
