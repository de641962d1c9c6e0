"""33.18: the simulator judged by the real engine on configurations that were held out."""

from pathlib import Path

from inferlab import params as parameters
from inferlab.run import stage
from inferlab.simulation import validation
from inferlab.simulation.cost import load_cost
from inferlab.simulation.measured import StepCostParams
from inferlab.simulation.validation_plots import plot_validation


def main() -> None:
    with stage("simulator_validation", validation.SimulatorValidationParams) as run:
        source = parameters.load("step_cost", StepCostParams)
        cost = load_cost(Path("data/step_cost/costs.json"), run.params.hardware)
        recorded = validation.read_recorded(Path("data/step_cost/traces.json"))
        judged = validation.judge(cost, source, recorded, run.seed)
        run.metrics("metrics/simulator_validation.json", validation.metrics(judged))
        rows = validation.table(judged)
        run.table("plots/simulator_validation/errors.csv", rows)
        plot_validation(rows, run.output("plots/simulator_validation/errors.png"))


if __name__ == "__main__":
    main()
