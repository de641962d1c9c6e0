"""The answer of the report: the decision with everything that the page says about it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferlab.errors import InferlabError
from inferlab.reporting.candidates import (
    Rows,
    as_served,
    in_runtime,
    in_transformers,
    losses,
    served,
)
from inferlab.reporting.chart import Chart, charts
from inferlab.reporting.decision import Case, Decision, Option, decide, pareto, reason
from inferlab.reporting.requirements import (
    Candidate,
    ReportParams,
    Requirements,
    machines,
    requirements,
    usd_per_million_requests,
)
from inferlab.reporting.results import read_table
from inferlab.reporting.sensitivity import Answer, lead, over_traffic, sensitivities

THIS_MACHINE = "this_machine"
log = logging.getLogger("inferlab.report")


@dataclass(frozen=True)
class Measured:
    """What the decision rests on.

    `quality`, `serving`: metrics of evaluate and serve_benchmark by variant; `concurrency`,
    `formats`, `configurations`, `prices`: the tables of serve_benchmark, format_comparison,
    end_to_end and cost_report; lengths: of the requests that were served, and
    `configuration_input_tokens` of those of end_to_end.
    """

    quality: Mapping[str, Mapping[str, float]]
    serving: Mapping[str, Mapping[str, float]]
    concurrency: Rows
    formats: Rows
    configurations: Rows
    prices: Rows
    input_tokens: int
    output_tokens: int
    configuration_input_tokens: int


def measured(
    metrics: Mapping[str, Mapping[str, Mapping[str, float]]],
    plots: Path,
    settings: Mapping[str, Any],
) -> Measured:
    """Read the tables below `plots`.

    `metrics`: of all studies, by stage and key; `settings`: the whole params.yaml, for the lengths.
    """
    middle = settings["serve_benchmark"]["middle"]
    return Measured(
        quality=metrics["evaluate"],
        serving=metrics["serve_benchmark"],
        concurrency=read_table(plots / "serve_benchmark/concurrency.csv"),
        formats=read_table(plots / "format_comparison/formats.csv"),
        configurations=read_table(plots / "end_to_end/configurations.csv"),
        prices=read_table(plots / "cost_report/per_million_tokens.csv"),
        input_tokens=middle["input_tokens"],
        output_tokens=middle["output_tokens"],
        configuration_input_tokens=settings["end_to_end"]["input_tokens"],
    )


@dataclass(frozen=True)
class Rival:
    """The same traffic at the cheapest API: another model. `even`: the machine's price an hour."""

    name: str
    usd_per_day: float
    even: float


@dataclass(frozen=True)
class Advice:
    """Everything that the page says; `busy`: the share of throughput used in the busiest hour."""

    case: Case
    wanted: Requirements
    decision: Decision
    reasons: Sequence[tuple[Option, str]]
    unmeasured: Sequence[str]
    busy: float
    lead: tuple[Option, bool] | None
    rival: Rival | None
    sensitivities: Mapping[str, Sequence[Answer]]
    traffic: Sequence[tuple[int, Option | None, float | None]]
    charts: Sequence[Chart]
    front: Sequence[tuple[Candidate, float]]


def advise(params: ReportParams, measured: Measured) -> Advice:
    """Decide and explain.

    Raises InferlabError, naming what is missing, when nothing can be compared: no base, no
    measured speed, or no price of this machine.
    """
    found = losses(measured.quality)
    longer = measured.input_tokens / measured.configuration_input_tokens
    candidates = [
        *served(measured.concurrency, as_served(found, measured.serving)),
        *in_transformers(measured.formats, found, measured.input_tokens, measured.output_tokens),
        *in_runtime(measured.configurations, measured.quality, longer, measured.output_tokens),
    ]
    if not candidates:
        raise InferlabError(
            "no variant has a measured speed: plots/serve_benchmark/concurrency.csv, "
            "plots/format_comparison/formats.csv and plots/end_to_end/configurations.csv are "
            "missing; run dvc repro serve_benchmark"
        )
    case = Case(candidates, params.traffic, _price(measured.prices))
    wanted = requirements(params)
    decision = decide(case, wanted)
    winner = decision.winner
    apis = _usd_per_request(measured)
    cheapest = min(apis.values(), default=None)
    return Advice(
        case=case,
        wanted=wanted,
        decision=decision,
        reasons=[(option, reason(option, winner)) for option in decision.options],
        unmeasured=sorted(set(found) - {one.variant for one in candidates}),
        busy=_busy(winner, case) if winner else 0.0,
        lead=lead(decision.options) if winner else None,
        rival=_rival(apis, winner, case) if apis and winner else None,
        sensitivities=sensitivities(case, wanted),
        traffic=[
            (requests, option, None if cheapest is None else requests * cheapest)
            for requests, option in over_traffic(case, wanted)
        ],
        charts=charts(case, wanted, decision),
        front=_front(case),
    )


def advise_or_say(params: ReportParams, measured: Measured) -> Advice | str:
    """`advise`, or in one line what is missing for it: the rest of a page stands without."""
    try:
        return advise(params, measured)
    except InferlabError as error:
        log.warning("no recommendation: %s", error)
        return str(error)


def _price(prices: Rows) -> float:
    """US dollars an hour of this machine, as the cost report took it."""
    for row in prices:
        if row["name"].startswith(THIS_MACHINE) and row["usd_per_instance_hour"]:
            return float(row["usd_per_instance_hour"])
    raise InferlabError(
        f"no price for {THIS_MACHINE}: plots/cost_report/per_million_tokens.csv has none; set "
        f"cost_report.usd_per_hour.{THIS_MACHINE} (params.yaml) and run dvc repro cost_report"
    )


def _usd_per_request(measured: Measured) -> dict[str, float]:
    """US dollars for one request of the measured lengths, by API model."""
    inside, outside = measured.input_tokens / 1e6, measured.output_tokens / 1e6
    return {
        row["name"]: inside * float(row["usd_per_mtok_input"])
        + outside * float(row["usd_per_mtok_output"])
        for row in measured.prices
        if not row["usd_per_instance_hour"]
    }


def _front(case: Case) -> list[tuple[Candidate, float]]:
    """The candidates on the Pareto front, and what a million requests cost on each."""
    return [
        (one, usd_per_million_requests(one, case.traffic, case.usd_per_hour))
        for one, on in zip(case.candidates, pareto(case.candidates), strict=True)
        if on
    ]


def _busy(winner: Option, case: Case) -> float:
    capacity = machines(winner.candidate, case.traffic) * winner.candidate.requests_per_s
    return case.traffic.peak_requests_per_s / capacity


def _rival(apis: Mapping[str, float], winner: Option, case: Case) -> Rival:
    name = min(apis, key=lambda one: apis[one])
    usd = apis[name] * case.traffic.requests_per_day
    return Rival(name, usd, usd / (24 * winner.machines))
