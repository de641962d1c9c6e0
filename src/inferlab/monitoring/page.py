"""The dashboard as one HTML page: summary, advice, alerts and charts; needs no network."""

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from inferlab.monitoring import chart
from inferlab.monitoring.advice import Advice, Seen
from inferlab.monitoring.results import error_counts

TEMPLATES = "templates"
PAGE = "dashboard.html.jinja"
CHARTS = {
    "Time to first token, seconds": {
        "ttft_p50_s": "p50, server",
        "ttft_p95_s": "p95, server",
        "client_ttft_p95_s": "p95, clients",
    },
    "Tokens a second of one request": {
        "client_tps_p50": "p50, clients",
        "client_tps_p5": "slowest 5 %, clients",
    },
    "Time per output token, seconds": {"tpot_p50_s": "p50, server", "tpot_p95_s": "p95, server"},
    "Requests at once": {"requests_running": "running", "requests_waiting": "waiting"},
    "Tokens a second, all requests": {
        "output_tokens_per_s": "output",
        "prompt_tokens_per_s": "prompt",
    },
    "KV cache in use, share": {"kv_cache_share": "all engines"},
    "Processors busy": {"cpu_cores": "all processes", "front_end_cores": "front end, exported"},
    "Memory, GiB": {"memory_gib": "all processes"},
    "Requests a second": {
        "finished_per_s": "finished",
        "answered_per_s": "accepted",
        "refused_per_s": "refused",
    },
    "US dollars per 1,000 requests": {"usd_per_1000_requests": "at this rate"},
    "Time of a scrape, seconds": {"scrape_s": "until it came or was given up"},
}


def render(seen: Seen, alerts: Sequence[dict[str, Any]], found: Sequence[Advice]) -> str:
    """The page. `alerts`: the rows of the alert table."""
    environment = Environment(
        loader=PackageLoader("inferlab.monitoring", TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    charts = [chart.chart(title, lines, seen.rows, seen.params) for title, lines in CHARTS.items()]
    return environment.get_template(PAGE).render(
        seen=seen,
        params=seen.params,
        charts=charts,
        frame=chart,
        alerts=alerts,
        advice=found,
        errors=error_counts(seen.observed.sent),
        end=seen.rows[-1]["seconds"],
        cell=_cell,
    )


def _cell(value: Any) -> str:
    """A table's cell: numbers short, a dash for nothing."""
    if isinstance(value, str):
        return value or "–"
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
