"""33.30: a real server watched through a bad day: series, alerts, dashboards, advice."""

import logging
import os
from pathlib import Path

from inferlab.monitoring import grafana, page, promtool, results, scenario, study
from inferlab.monitoring.advice import advice
from inferlab.monitoring.plots import plot_timeline
from inferlab.monitoring.settings import MonitoringParams
from inferlab.run import stage
from inferlab.serving.engine import serve
from inferlab.store import load_tensors

log = logging.getLogger("inferlab.monitoring")


def main() -> None:
    """Run the scenario, then judge what it left."""
    with stage("monitoring", MonitoringParams) as run:
        params = run.params
        windows = load_tensors(Path("data/windows/training.safetensors"))
        stream = windows["input_ids"].numpy().reshape(-1)
        with serve({params.variant: Path("models", params.variant)}, params.engine) as servers:
            server = servers[params.variant]
            run.timing(start_seconds=server.start_seconds)
            dashboard = study.prepare(scenario.warm_up(server, stream, params, run.seed), params)
            with run.timed("scenario"):
                observed = scenario.run(server, stream, params, run.seed)
        with run.timed("evaluation"):
            seen = study.judge(observed, params, len(os.sched_getaffinity(0)))
        if not seen.verdict.checked or not seen.verdict.passed:
            log.warning("alert rules: %s", seen.verdict.output)

        alerts, found = results.alert_table(seen.episodes, params), advice(seen)
        run.metrics("metrics/monitoring.json", study.metrics(seen))
        run.table("plots/monitoring/series.csv", seen.rows)
        run.table("plots/monitoring/phases.csv", seen.phases)
        run.table("plots/monitoring/alerts.csv", alerts)
        plot_timeline(seen.rows, alerts, params, run.output("plots/monitoring/timeline.png"))
        folder = run.folder("reports/monitoring")
        rules = promtool.dump(promtool.rules(params.alerts, params.scrape_s))
        (folder / "rules.yml").write_text(rules)
        (folder / "promtool.txt").write_text(seen.verdict.output + "\n")
        (folder / "grafana.json").write_text(grafana.dump(dashboard))
        html = page.render(seen, alerts, found)
        (folder / "index.html").write_text(html, encoding="utf-8")


if __name__ == "__main__":
    main()
