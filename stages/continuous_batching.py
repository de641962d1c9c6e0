"""33.18: static against continuous batching, simulated with the measured engine's step cost."""

from pathlib import Path

from inferlab.run import stage
from inferlab.simulation import continuous_study as study
from inferlab.simulation.continuous_plots import plot_rates
from inferlab.simulation.cost import load_cost
from inferlab.simulation.prefix_study import gain, prefix_table


def main() -> None:
    with stage("continuous_batching", study.ContinuousBatchingParams) as run:
        params, seed = run.params, run.seed
        cost = load_cost(Path("data/step_cost/costs.json"), params.hardware)
        capacities = study.capacities(params, cost, seed, run.threads)
        capacity = capacities[study.CONTINUOUS]
        rows = study.rates_table(params, cost, capacity, seed, run.threads)
        workload = study.workload_of(params, capacity, seed)
        prefixed = prefix_table(
            params.prefixes, workload, cost, params.limits, params.workers, seed, run.threads
        )
        values = study.metrics(rows, capacities, workload, params)
        values["prefix_cache_capacity_ratio"] = gain(prefixed, min(params.prefixes.groups))
        run.metrics("metrics/continuous_batching.json", values)
        run.table("plots/continuous_batching/rates.csv", rows)
        run.table("plots/continuous_batching/prefixes.csv", prefixed)
        plot_rates(rows, run.output("plots/continuous_batching/rates.png"))
        for name, serve in study.speeds(params, cost, 0.9 * capacity, seed).items():
            with run.timed(name):
                serve()
            rate = round(len(workload) / run.seconds(name))
            run.timing(**{f"simulated_requests_per_s_{name}": rate})


if __name__ == "__main__":
    main()
