"""The report as one HTML page: everything that it needs is inside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from inferlab.reporting import chart, decision, requirements
from inferlab.reporting.advice import Advice
from inferlab.reporting.findings import Finding
from inferlab.reporting.launch import shell_command
from inferlab.reporting.results import Picture
from inferlab.reporting.studies import GROUPS, STUDIES
from inferlab.serving.engine import EngineParams

TEMPLATE = "report.html.jinja"


@dataclass(frozen=True)
class Study:
    """A study as the page shows it; `see`: the study that holds the finding of both."""

    stage: str
    title: str
    finding: Markup | None
    see: str | None
    keys: Sequence[str]
    table: Sequence[tuple[str, Sequence[str]]]
    pictures: Sequence[Picture]
    parameters: str


@dataclass(frozen=True)
class Provenance:
    """Versions by package, the machine, and the model's manifest: labels and values."""

    versions: Mapping[str, str]
    machine: Mapping[str, str]
    model: Mapping[str, Any]


def studies(
    metrics: Mapping[str, Mapping[str, Mapping[str, float]]],
    pictures: Mapping[str, Sequence[Picture]],
    findings: Sequence[Finding],
    settings: Mapping[str, Any],
) -> tuple[dict[str, list[Study]], list[str]]:
    """The studies of this run by group, and the stages of those that left no metrics."""
    section_of = {stage: section for section in reversed(findings) for stage in section.stages}
    shown: dict[int, str] = {}
    groups: dict[str, list[Study]] = {}
    for group, members in GROUPS.items():
        for stage, title in members.items():
            if not metrics.get(stage):
                continue
            section = section_of.get(stage)
            first = shown.setdefault(id(section), stage) if section else stage
            keys = list(metrics[stage])
            study = Study(
                stage,
                title,
                section.html if section and first == stage else None,
                first if first != stage else None,
                keys if keys != [stage] else [],
                _table(metrics[stage]),
                pictures.get(stage, ()),
                yaml.safe_dump(settings[stage], sort_keys=False) if stage in settings else "",
            )
            groups.setdefault(group, []).append(study)
    return groups, [stage for stage in STUDIES if not metrics.get(stage)]


def render(
    question: str,
    advice: Advice | str,
    groups: Mapping[str, Sequence[Study]],
    missing: Sequence[str],
    provenance: Provenance,
    settings: Mapping[str, Any],
    engine: EngineParams,
) -> str:
    """The page. `advice` is text when there is none: what is missing for it.

    `engine`: how the benchmark starts its servers.
    """
    environment = Environment(
        loader=PackageLoader("inferlab.reporting", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "money": lambda usd: f"${usd:,.2f}",
        "quantity": lambda value, name: decision.quantity(name, value),
    }
    return environment.get_template(TEMPLATE).render(
        question=question,
        advice=advice if isinstance(advice, Advice) else None,
        problem=advice if isinstance(advice, str) else "",
        groups=groups,
        missing=[(stage, STUDIES[stage]) for stage in missing],
        provenance=provenance,
        load=settings.get("serve_benchmark", {}).get("middle", {}),
        engine=engine,
        shell_command=shell_command,
        labels=requirements.LABELS,
        frame=chart,
    )


def number(value: float) -> str:
    """A figure for reading: whole ones with separators, others with four digits."""
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _table(metrics: Mapping[str, Mapping[str, float]]) -> list[tuple[str, list[str]]]:
    """One row a metric, one cell a key; a dash where a key has no such metric."""
    names = dict.fromkeys(name for values in metrics.values() for name in values)
    return [
        (name, [number(values[name]) if name in values else "–" for values in metrics.values()])
        for name in names
    ]
