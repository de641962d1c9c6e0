"""33.20: scheduling policies, simulated with the measured engine's step cost."""

from pathlib import Path

from inferlab.run import stage
from inferlab.simulation import scheduling_study as study
from inferlab.simulation.cost import load_cost
from inferlab.simulation.scheduling_plots import plot_policies


def main() -> None:
    with stage("scheduling", study.SchedulingParams) as run:
        study.check_policies(run.params)
        cost = load_cost(Path("data/step_cost/costs.json"), run.params.hardware)
        rate = study.capacity(run.params, cost, run.seed)
        rows = study.policy_table(run.params, cost, rate, run.seed, run.threads)
        run.metrics("metrics/scheduling.json", study.metrics(rows, rate, run.params))
        run.table("plots/scheduling/policies.csv", rows)
        plot_policies(rows, run.output("plots/scheduling/policies.png"))


if __name__ == "__main__":
    main()
