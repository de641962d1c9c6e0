"""What a step of the real engine costs: measured on vLLM, fitted, and traces to judge by."""

import json
import tempfile
from pathlib import Path

from inferlab.run import stage
from inferlab.simulation import cost_study
from inferlab.simulation.cost import save_costs
from inferlab.simulation.cost_plots import plot_steps
from inferlab.simulation.measured import StepCostParams, measure
from inferlab.store import load_tensors


def main() -> None:
    """Fit a step's cost to loads, and record traces on another server between them."""
    with stage("step_cost", StepCostParams) as run:
        params = run.params
        stream = load_tensors(Path("data/windows/training.safetensors"))["input_ids"].numpy()
        with tempfile.TemporaryDirectory() as logs, run.timed("measure"):
            model = Path("models", params.variant)
            measured = measure(model, stream.reshape(-1), params, run.seed, Path(logs))
        fit, steps, front_end = cost_study.fit_measured(measured)
        costs, published = cost_study.all_costs(fit, front_end)
        factors = cost_study.round_factors(measured, fit)
        values = cost_study.metrics(fit, front_end, published, factors)
        run.metrics("metrics/step_cost.json", values)

        folder = run.folder("data/step_cost")
        save_costs(folder / "costs.json", costs)
        traces = cost_study.replay_records(measured, params)
        recorded = {"traces": traces, "factors": factors}
        (folder / "traces.json").write_text(json.dumps(recorded) + "\n")
        rows = cost_study.step_table(steps, fit)
        run.table("plots/step_cost/steps.csv", rows)
        run.table("plots/step_cost/loads.csv", cost_study.load_table(measured, params, fit))
        plot_steps(rows, run.output("plots/step_cost/steps.png"))


if __name__ == "__main__":
    main()
