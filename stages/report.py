"""One page: what to serve, why, what would change it, every study, and where it comes from."""

from pathlib import Path

import yaml

from inferlab import params as parameters
from inferlab.reporting import advice, page, provenance, results, summary
from inferlab.reporting.findings import findings
from inferlab.reporting.requirements import ReportParams
from inferlab.reporting.studies import STUDIES
from inferlab.run import stage
from inferlab.serving.engine import EngineParams


def main() -> None:
    with stage("report", ReportParams) as run:
        settings = yaml.safe_load(parameters.PARAMS.read_text())
        metrics = {name: results.read_metrics(Path("metrics"), name) for name in STUDIES}
        pictures = {name: results.read_pictures(Path("plots"), name) for name in STUDIES}
        notes = findings(Path("docs/studies.md").read_text(encoding="utf-8"))
        groups, missing = page.studies(metrics, pictures, notes, settings)
        measured = advice.measured(metrics, Path("plots"), settings)
        answer = advice.advise_or_say(run.params, measured)
        model = results.read_manifest(Path("models/base/manifest.json"))
        origin = page.Provenance(provenance.versions(), provenance.machine(), model)
        engine = parameters.load("serve_benchmark.engine", EngineParams)
        html = page.render(run.params.question, answer, groups, missing, origin, settings, engine)
        run.output("reports/index.html").write_text(html, encoding="utf-8")
        counts = {"studies": len(STUDIES) - len(missing), "studies_missing": len(missing)}
        run.metrics("metrics/report.json", summary.metrics(answer) | counts)
        run.table("plots/report/candidates.csv", summary.table(answer))


if __name__ == "__main__":
    main()
