"""33.16: the rule of speculative sampling, its speed-up, and whether outputs follow the target."""

import torch

from inferlab.run import stage
from inferlab.speculative import sampling_study as study
from inferlab.speculative.sampling_plots import plot_sampling


def main() -> None:
    """Write metrics/speculative_sampling.json, speed-ups, best draft lengths and p-values."""
    with stage("speculative_sampling", study.SpeculativeSamplingParams) as run:
        params = run.params
        torch.set_num_threads(1)  # steps are small: a second thread would mostly wait
        pairs = study.make_pairs(params, run.seed)
        with run.timed("measure"):
            found = study.measure(pairs, params, run.seed)
        with run.timed("test"):
            tests = study.distribution_tests(pairs, params, run.seed)
        rows = study.speedup_table(found, params.cost_ratios)
        best = study.best_table(rows, params)
        values = study.metrics(found, best, tests, params)
        run.metrics("metrics/speculative_sampling.json", values)
        folder = "plots/speculative_sampling"
        run.table(f"{folder}/speedups.csv", rows)
        run.table(f"{folder}/best.csv", best)
        run.table(f"{folder}/p_values.csv", tests)
        plot_sampling(rows, tests, params, run.output(f"{folder}/sampling.png"))


if __name__ == "__main__":
    main()
