"""What a scenario shows: a table with a row a tick, figures by phase, and the stage's metrics."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inferlab.monitoring.evaluation import Episode, episodes, values
from inferlab.monitoring.measures import Measure, Rate
from inferlab.monitoring.recording import UP, Recording
from inferlab.monitoring.scenario import Observed, Sent
from inferlab.monitoring.settings import Alert, MonitoringParams, phase_at, spans
from inferlab.monitoring.watched import measures
from inferlab.serving.load import Outcome
from inferlab.serving.metrics import tpot, ttft

Row = dict[str, Any]


def series_table(
    recording: Recording, observed: Observed, params: MonitoringParams, closed: bool
) -> list[Row]:
    """One row a tick: what the server exported, what its clients saw, what it used and cost.

    `client_…` are of the requests whose first (TTFT) or last token (TPS) came in the window; TPS
    is a request's output tokens a second after its first. Empty where there is nothing to tell.
    """
    columns = {
        name: _filled(measure, values(measure, recording, closed), params)
        for name, measure in measures(params.window_s).items()
    }
    up = recording.series[UP][0].values
    rows = []
    for tick, one in enumerate(observed.ticks):
        now = tick * params.scrape_s
        server = {name: _cell(column[tick]) for name, column in columns.items()}
        rows.append(
            {
                "seconds": round(now, 3),
                "phase": phase_at(now, params.phases),
                "up": int(up[tick]),
                "scrape_s": round(one.seconds, 3),
                **server,
                **_clients(observed.sent, now - params.window_s, now),
                "cpu_cores": round(one.usage.cores, 3),
                "memory_gib": round(one.usage.memory_bytes / 2**30, 4),
                "gpu_share": _cell(one.usage.gpu),
                "gpu_memory_gib": _cell(one.usage.gpu_bytes and one.usage.gpu_bytes / 2**30),
                "usd_per_1000_requests": _cell(usd_per_1000(params, server["finished_per_s"])),
            }
        )
    return rows


def usd_per_1000(params: MonitoringParams, requests_per_s: float | str) -> float | None:
    """What 1,000 requests cost at this rate; None at no rate: it then has no bound."""
    if not requests_per_s:
        return None
    return 1000 * params.usd_per_hour / 3600 / float(requests_per_s)


def alert_episodes(
    recording: Recording, alerts: Mapping[str, Alert], closed: bool
) -> list[Episode]:
    """Every time that any alert's condition held over the recording, by its beginning."""
    found = [
        one
        for name, alert in alerts.items()
        for one in episodes(
            name, alert, values(alert.value, recording, closed), recording.interval_s
        )
    ]
    return sorted(found, key=lambda one: one.since)


def alert_table(found: Sequence[Episode], params: MonitoringParams) -> list[Row]:
    """One row an alert that fired, and one with empty times for each that never did."""
    rows = []
    for one in found:
        if one.fired is not None:
            phase = phase_at(one.since, params.phases)
            rows.append(_alert_row(one.alert, params, one, phase))
    silent = set(params.alerts) - {row["alert"] for row in rows}
    return rows + [_alert_row(name, params, None, "") for name in params.alerts if name in silent]


def missed(found: Sequence[Episode], params: MonitoringParams) -> list[tuple[str, str]]:
    """The alerts and phases where one was expected to begin and none that fired did."""
    began = {
        (one.alert, phase_at(one.since, params.phases)) for one in found if one.fired is not None
    }
    return [
        (name, phase)
        for name, alert in params.alerts.items()
        for phase in alert.expected
        if (name, phase) not in began
    ]


def unexpected(found: Sequence[Episode], params: MonitoringParams) -> list[Episode]:
    """What fired and began in a phase where it was neither expected nor tolerated."""
    return [
        one
        for one in found
        if one.fired is not None
        and phase_at(one.since, params.phases)
        not in (*params.alerts[one.alert].expected, *params.alerts[one.alert].tolerated)
    ]


def phase_table(observed: Observed, rows: Sequence[Row], params: MonitoringParams) -> list[Row]:
    """One row a phase: its requests by their start, errors by kind, latencies, use and cost."""
    table = []
    for name, (start, end) in spans(params.phases).items():
        sent = [one for one in observed.sent if one.phase == name]
        done = [one.outcome for one in sent if one.error is None]
        first = [1000 * ttft(one) for one in done]
        speed = [1 / pace for one in done if (pace := tpot(one))]
        ended = [one for one in observed.sent if start <= one.outcome.end < end and not one.error]
        tokens = sum(_tokens_within(one.outcome, start, end) for one in observed.sent)
        own = [row for row in rows if start < row["seconds"] <= end]
        table.append(
            {
                "phase": name,
                "seconds": end - start,
                "requests": len(sent),
                "failed": sum(one.error is not None for one in sent),
                "ttft_ms_p50": _percentile(first, 50),
                "ttft_ms_p95": _percentile(first, 95),
                "tps_p5": _percentile(speed, 5),
                "tps_p50": _percentile(speed, 50),
                "output_tokens_per_s": round(tokens / (end - start), 2),
                "waiting_max": max((row["requests_waiting"] or 0 for row in own), default=0),
                "kv_cache_share_max": max((row["kv_cache_share"] or 0 for row in own), default=0),
                "cpu_cores_mean": _mean([row["cpu_cores"] for row in own]),
                "usd_per_1000_requests": _cell(usd_per_1000(params, len(ended) / (end - start))),
            }
        )
    return table


def error_counts(sent: Sequence[Sent]) -> Counter[str]:
    """Failed requests by kind, as their clients saw them."""
    return Counter(one.error for one in sent if one.error is not None)


def growth(recording: Recording, name: str, labels: Mapping[str, str] | None = None) -> float:
    """How much counters of this name grew over the whole recording, all series together."""
    total = 0.0
    for one in recording.named(name, labels or {}):
        present = one.values[~np.isnan(one.values)]
        if len(present):
            total += float(present[-1] - present[0])
    return total


def _tokens_within(outcome: Outcome, start: float, end: float) -> float:
    """Tokens that arrived in a stretch of time; a chunk of a request left early counts as one."""
    arrived = sum(start <= chunk < end for chunk in outcome.chunks)
    return arrived * (outcome.output_tokens or len(outcome.chunks)) / max(1, len(outcome.chunks))


def _filled(measure: Measure, column: np.ndarray, params: MonitoringParams) -> np.ndarray:
    """A rate from its first whole window on: before, it divides by seconds nobody has seen."""
    if isinstance(measure, Rate):
        column[: math.ceil(params.window_s / params.scrape_s)] = math.nan
    return column


def _clients(sent: Sequence[Sent], after: float, until: float) -> Row:
    good = [one.outcome for one in sent if one.error is None]
    first = [ttft(one) for one in good if after < one.chunks[0] <= until]
    speed = [1 / pace for one in good if after < one.chunks[-1] <= until and (pace := tpot(one))]
    ended = [one for one in sent if after < one.outcome.end <= until]
    return {
        "client_ttft_p50_s": _percentile(first, 50),
        "client_ttft_p95_s": _percentile(first, 95),
        "client_tps_p5": _percentile(speed, 5),
        "client_tps_p50": _percentile(speed, 50),
        "client_errors": sum(one.error is not None for one in ended),
        "client_requests": len(ended),
    }


def _alert_row(name: str, params: MonitoringParams, one: Episode | None, phase: str) -> Row:
    alert = params.alerts[name]
    expected = one is None or phase in (*alert.expected, *alert.tolerated)
    return {
        "alert": name,
        "severity": alert.severity,
        "phase": phase,
        "since_s": one.since if one else "",
        "fired_s": one.fired if one else "",
        "cleared_s": "" if one is None or one.cleared is None else one.cleared,
        "as_expected": int(expected if one else not alert.expected),
    }


def _percentile(sample: Sequence[float], percent: float) -> float | str:
    return round(float(np.percentile(sample, percent)), 4) if sample else ""


def _mean(sample: Sequence[float]) -> float | str:
    return round(float(np.mean(sample)), 3) if sample else ""


def _cell(value: float | None) -> float | str:
    """A number for a table; empty where there is none."""
    return "" if value is None or not math.isfinite(value) else round(float(value), 6)
