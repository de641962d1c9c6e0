"""33.25: costs per million tokens, per day, and break-even, against API prices."""

import logging
from pathlib import Path

import yaml

from inferlab import params as parameters
from inferlab.economics.comparison import CostReportParams, compare, metrics
from inferlab.economics.context import at_context, cache_read_seconds, mean_context
from inferlab.economics.hardware import measured_rates
from inferlab.economics.plots import plot_daily_cost, plot_per_million_tokens
from inferlab.economics.tables import break_evens, daily_costs, per_million_tokens
from inferlab.run import stage

log = logging.getLogger("inferlab.cost_report")


def main() -> None:
    with stage("cost_report", CostReportParams) as run:
        burst = yaml.safe_load(parameters.PARAMS.read_text())["serve_benchmark"]["decode"]
        context = mean_context(burst["input_tokens"], burst["output_tokens"])
        wanted = mean_context(run.params.input_tokens, run.params.output_tokens)
        read_seconds = cache_read_seconds(Path("metrics/step_cost.json"))
        measured, failed = {}, 0
        for variant in run.params.variants:
            path = Path(f"metrics/serve_benchmark/{variant}.json")
            rates, failures = measured_rates(path)
            measured[variant] = at_context(rates, context, wanted, read_seconds)
            failed += failures
            if failures:
                log.warning("%s: %d requests failed; do not trust its cost", path, failures)
        comparison = compare(run.params, measured)
        loads = run.params.requests_per_day
        run.metrics("metrics/cost_report.json", metrics(comparison) | {"failed_requests": failed})
        folder = "plots/cost_report"
        run.table(f"{folder}/per_million_tokens.csv", per_million_tokens(comparison))
        run.table(f"{folder}/daily_cost.csv", daily_costs(comparison, loads))
        run.table(f"{folder}/break_even.csv", break_evens(comparison))
        plot_daily_cost(comparison, loads, run.output(f"{folder}/daily_cost.png"))
        plot_per_million_tokens(comparison, run.output(f"{folder}/per_million_tokens.png"))


if __name__ == "__main__":
    main()
