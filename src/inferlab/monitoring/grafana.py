"""The Grafana dashboard: panels whose queries are the same measures as the table and the alerts."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from inferlab.monitoring.measures import expression, names
from inferlab.monitoring.settings import Alert
from inferlab.monitoring.watched import Panel

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA = 38
"""Of the dashboard's JSON: Grafana 10; newer ones migrate it by themselves."""
COLUMNS, WIDTH, HEIGHT = 2, 12, 8
WORDS = {"by", "sum", "rate", "min", "max", "histogram_quantile", "le"}


def dashboard(panels: Sequence[Panel], alerts: Mapping[str, Alert]) -> dict[str, Any]:
    """A dashboard to import: Grafana asks for the Prometheus it shall read."""
    return {
        "title": "inferlab: a vLLM server",
        "uid": "inferlab-vllm",
        "tags": ["inferlab", "vllm"],
        "schemaVersion": SCHEMA,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [_panel(number, panel, alerts) for number, panel in enumerate(panels)],
    }


def series_names(content: Mapping[str, Any]) -> set[str]:
    """Every series that a dashboard's queries name, found in their text."""
    queries = [target["expr"] for panel in content["panels"] for target in panel["targets"]]
    return {name for query in queries for name in _names(query)}


def dump(content: Mapping[str, Any]) -> str:
    """The dashboard as JSON text."""
    return json.dumps(content, indent=2) + "\n"


def _names(query: str) -> set[str]:
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", query)
    return set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", bare)) - WORDS


def _panel(number: int, panel: Panel, alerts: Mapping[str, Alert]) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": DATASOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, **_thresholds(panel, alerts)},
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": DATASOURCE,
                "expr": expression(measure, "$__rate_interval"),
                "legendFormat": legend,
            }
            for place, (legend, measure) in enumerate(panel.lines.items())
        ],
    }


def _thresholds(panel: Panel, alerts: Mapping[str, Alert]) -> dict[str, Any]:
    """The threshold of the alert on the same series, if there is one, as a line in the panel."""
    shown = [(type(one), names(one), one.labels) for one in panel.lines.values()]
    for alert in alerts.values():
        value = alert.value
        if (type(value), names(value), value.labels) in shown:
            passed = [{"color": "green", "value": None}, {"color": "red", "value": alert.threshold}]
            if alert.below is not None:
                passed[0]["color"], passed[1]["color"] = "red", "green"
            return {
                "thresholds": {"mode": "absolute", "steps": passed},
                "custom": {"thresholdsStyle": {"mode": "line"}},
            }
    return {}
