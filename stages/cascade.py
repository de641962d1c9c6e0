"""33.23: a small model first and a large one below a threshold, measured and simulated."""

from pathlib import Path

from inferlab.run import stage
from inferlab.simulation import cascade_study as study
from inferlab.simulation.cascade_pair import pair_costs, pair_table
from inferlab.simulation.cascade_plots import plot_cascade, plot_pair
from inferlab.simulation.cascade_scores import load_scores, measured_cost_ratio
from inferlab.store import read_json

TIMING = Path("metrics/timing/distill.json")


def main() -> None:
    """Write metrics/cascade.json, curves, chosen thresholds and reliability, and the pair's."""
    with stage("cascade", study.CascadeParams) as run:
        params = run.params
        costs = pair_costs(params.pair)
        scores = load_scores(Path("data/student_logits"), Path("data/teacher_logits"))
        ratio = params.cost_ratio or measured_cost_ratio(
            read_json(TIMING), params.latency_batch, TIMING
        )
        rows = study.judge(scores, params, run.seed)
        curve = study.curve_table(rows, params.thresholds, ratio)
        choices = study.choice_table(rows, ratio, params.accuracy_loss)
        bins = study.reliability_table(scores, rows, params.bins)
        settings = (params.thresholds, params.accuracy_loss, run.seed)
        simulated = pair_table(params.pair, costs, *settings)
        values = study.metrics(scores, choices, simulated[1])
        run.metrics("metrics/cascade.json", values)
        tables = {"curve": curve, "choices": choices, "reliability": bins}
        tables |= {"pair_curve": simulated[0], "pair_choices": simulated[1]}
        for name, table in tables.items():
            run.table(f"plots/cascade/{name}.csv", table)
        image = run.output("plots/cascade/cascade.png")
        plot_cascade(curve, choices, bins, ratio, values, image)
        plot_pair(*simulated, costs, params.pair, run.output("plots/cascade/pair.png"))


if __name__ == "__main__":
    main()
