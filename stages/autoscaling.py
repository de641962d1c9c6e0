"""33.24: autoscaling policies over days of load with spikes, against perfect foresight."""

import logging
from pathlib import Path

from inferlab.run import stage
from inferlab.simulation import autoscaling_study as study
from inferlab.simulation.autoscaling_plots import plot_day, plot_front
from inferlab.simulation.autoscaling_settings import AutoscalingParams, make_settings
from inferlab.simulation.cost import load_cost
from inferlab.simulation.instance import simulated_instance

log = logging.getLogger("inferlab.autoscaling")


def main() -> None:
    """Write metrics/autoscaling.json, all settings, the chosen ones, forecasts and one day."""
    with stage("autoscaling", AutoscalingParams) as run:
        params = run.params
        cost = load_cost(Path("data/step_cost/costs.json"), params.instance.hardware)
        instance = simulated_instance(params.instance, cost, run.seed)
        days = study.make_days(params, instance.capacity, run.seed)
        with run.timed("forecast"):
            known, errors = study.make_known(days, params, instance, run.seed)
        settings = make_settings(params, known)
        with run.timed("simulate"):
            outcome = study.run_all(days, settings, known, instance, params, run.threads)
        rows = study.setting_table(settings, outcome)
        chosen = study.choose(settings, outcome, params.target, params.confidence)
        for _, row in chosen:
            if row["at_end"]:
                sweeps, kind = row["at_end"].replace(" ", " and "), row["policy"]
                log.warning("%s: chosen at an end of settings.%s; widen it", kind, sweeps)
        run.metrics("metrics/autoscaling.json", study.metrics(chosen, errors, instance))
        folder, picks = "plots/autoscaling", [row for _, row in chosen]
        run.table(f"{folder}/settings.csv", rows)
        run.table(f"{folder}/chosen.csv", picks)
        run.table(f"{folder}/forecasts.csv", errors)
        plot_front(rows, picks, params.target, run.output(f"{folder}/front.png"))
        ready = {row["policy"]: outcome.ready[place, -1] for place, row in chosen}
        plot_day(known.load[-1], ready, run.output(f"{folder}/day.png"))


if __name__ == "__main__":
    main()
