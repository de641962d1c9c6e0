"""33.21: throughput and latency of the served variants on the real engine."""

import logging
from pathlib import Path

from inferlab.run import stage
from inferlab.serving.engine import serve
from inferlab.serving.experiment import AXES, ServeBenchmarkParams, measure
from inferlab.serving.plots import plot_axis
from inferlab.serving.quality import (
    RATIO,
    evaluated_perplexities,
    perplexity_ratio,
    require_room,
    served_perplexities,
)
from inferlab.serving.results import axis_table, failure_table, variant_metrics
from inferlab.store import load_tensors

log = logging.getLogger("inferlab.serve_benchmark")


def main() -> None:
    """Serve all variants side by side and put the same loads on each, in turn."""
    with stage("serve_benchmark", ServeBenchmarkParams) as run:
        params = run.params
        stream = load_tensors(Path("data/windows/training.safetensors"))["input_ids"].numpy()
        scored = load_tensors(Path("data/windows/heldout.safetensors"))["input_ids"]
        scored = scored[: params.scored_windows]
        evaluated = {}
        if len(scored):
            require_room(scored, params.engine)
            evaluated = {
                variant: evaluated_perplexities(Path(f"plots/evaluate/{variant}.csv"))
                for variant in params.variants
            }
        models = {variant: Path("models", variant) for variant in params.variants}
        with serve(models, params.engine) as servers:
            run.timing(start_seconds=max(server.start_seconds for server in servers.values()))
            with run.timed("measure"):
                outcomes = measure(servers, stream, params, run.seed)
            with run.timed("score"):
                served = {name: served_perplexities(servers[name], scored) for name in evaluated}

        for variant in params.variants:
            values = variant_metrics(outcomes, variant, params)
            if served:
                values[RATIO] = perplexity_ratio(served[variant], evaluated[variant])
            run.metrics(f"metrics/serve_benchmark/{variant}.json", values)
            if values["failed_requests"]:
                log.warning("%s: %d requests failed", variant, values["failed_requests"])
        for axis in AXES:
            rows = axis_table(axis, outcomes, params)
            run.table(f"plots/serve_benchmark/{axis}.csv", rows)
            plot_axis(axis, rows, run.output(f"plots/serve_benchmark/{axis}.png"))
        failures = failure_table(outcomes, params.variants)
        run.table("plots/serve_benchmark/failures.csv", failures)


if __name__ == "__main__":
    main()
