"""33.29: whole configurations on the same prompts: latency, throughput, use, memory, quality."""

import contextlib
import logging
from pathlib import Path

from inferlab.run import stage
from inferlab.serving.end_to_end import EndToEndParams, measure, start
from inferlab.serving.end_to_end_plots import plot_radar
from inferlab.serving.end_to_end_results import ratios, speeds, table
from inferlab.serving.quality import measured_ratio
from inferlab.store import load_tensors, read_json

log = logging.getLogger("inferlab.end_to_end")


def main() -> None:
    with stage("end_to_end", EndToEndParams) as run:
        params = run.params
        folders = {name: Path("models", one.variant) for name, one in params.configurations.items()}
        served = Path("metrics/serve_benchmark")
        perplexities = {
            name: read_json(Path(f"metrics/evaluate/{one.variant}.json"))["token_perplexity"]
            * (measured_ratio(served / f"{one.variant}.json") if one.engine == "vllm" else 1.0)
            for name, one in params.configurations.items()
        }
        stream = load_tensors(Path("data/windows/training.safetensors"))["input_ids"].numpy()
        with contextlib.ExitStack() as stack:
            with run.timed("start"):
                running = stack.enter_context(start(params, folders, run.threads))
            with run.timed("measure"):
                rounds = measure(running, stream, params, run.seed)

        rows = table(rounds, perplexities, params)
        run.metrics("metrics/end_to_end.json", ratios(rows, params.reference))
        run.timing(**speeds(rows))
        run.table("plots/end_to_end/configurations.csv", rows)
        plot_radar(rows, params.reference, run.output("plots/end_to_end/radar.png"))
        for row in rows:
            if row["failed_requests"]:
                log.warning("%(configuration)s: %(failed_requests)d requests failed", row)


if __name__ == "__main__":
    main()
