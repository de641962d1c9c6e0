"""`inferlab monitor`: the same rules and dashboard for a server of one's own."""

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.monitoring import grafana, promtool
from inferlab.monitoring.scenario import scrape
from inferlab.monitoring.settings import MonitoringParams
from inferlab.monitoring.study import prepare

RULES, CONFIG, DASHBOARD = "rules.yml", "prometheus.yml", "grafana.json"


def monitor(
    url: Annotated[
        str, typer.Option(help="Where the vLLM server answers.")
    ] = "http://127.0.0.1:8000",
    folder: Annotated[
        Path, typer.Option(help="Where rules, configuration and dashboard go.")
    ] = Path("reports/monitor"),
    port: Annotated[int, typer.Option(help="Of Prometheus, on loopback.")] = 9090,
    start: Annotated[bool, typer.Option(help="Start Prometheus, until Ctrl-C.")] = True,
) -> None:
    """Watch a vLLM server by the alert rules of params.yaml (section monitoring).

    Raises InferlabError when nobody answers at `url`, an alert reads a metric that the server
    does not export, promtool finds fault with a rule, or Prometheus is wanted and not installed.
    """
    params = parameters.load("monitoring", MonitoringParams)
    url = url.rstrip("/")
    dashboard = prepare(scrape(url), params)
    verdict = promtool.check(params.alerts, [], params.scrape_s)
    if verdict.checked and not verdict.passed:
        raise InferlabError(f"promtool refuses the rules: {verdict.output}")
    folder.mkdir(parents=True, exist_ok=True)
    rules = promtool.rules(params.alerts, params.scrape_s)
    (folder / RULES).write_text(promtool.dump(rules))
    (folder / CONFIG).write_text(promtool.dump(configuration(url, params.scrape_s)))
    (folder / DASHBOARD).write_text(grafana.dump(dashboard))
    print(f"{len(params.alerts)} alert rules, all on metrics that {url} exports: {folder / RULES}")
    print(f"Grafana: Dashboards, New, Import, {folder / DASHBOARD}")
    if not verdict.checked:
        print(f"rules {verdict.output}")
    if start:
        _start(folder, port)


def configuration(url: str, scrape_s: float) -> dict[str, object]:
    """Prometheus' configuration for one server, at the interval of the params."""
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest:
        raise InferlabError(f"--url must be as http://127.0.0.1:8000; got {url!r}")
    host, _, path = rest.partition("/")
    interval = promtool.duration(scrape_s)
    return {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [RULES],
        "scrape_configs": [
            {
                "job_name": "vllm",
                "scheme": scheme,
                "metrics_path": f"/{path}/metrics".replace("//", "/"),
                "static_configs": [{"targets": [host]}],
            }
        ],
    }


def _start(folder: Path, port: int) -> None:
    """Become Prometheus. Raises InferlabError when it is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        raise InferlabError(
            "needed prometheus (Debian: apt-get install prometheus; make tools does it); "
            f"found none on the PATH. The files in {folder} serve any Prometheus"
        )
    print(f"Prometheus: http://127.0.0.1:{port}/alerts, until Ctrl-C", flush=True)
    os.execv(
        program,
        [
            program,
            f"--config.file={folder / CONFIG}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ],
    )
