"""The study from what the server exports first to what is made of the whole scenario."""

from typing import Any

from inferlab.monitoring import grafana, promtool, results, synthetic
from inferlab.monitoring.advice import Seen
from inferlab.monitoring.evaluation import Episode
from inferlab.monitoring.measures import names
from inferlab.monitoring.promtool import Case, Verdict
from inferlab.monitoring.recording import Recording, exported, record, require_exported
from inferlab.monitoring.scenario import Observed
from inferlab.monitoring.settings import MonitoringParams, wanted
from inferlab.monitoring.watched import measures, panels


def prepare(scraped: str, params: MonitoringParams) -> dict[str, Any]:
    """The Grafana dashboard, once every alert, column and query is known to have its metrics.

    `scraped`: what the server exports before the scenario begins. Raises InferlabError naming the
    alert, or the part of the study, that reads a metric the server does not export.
    """
    known = exported(scraped)
    dashboard = grafana.dashboard(panels(params.window_s), params.alerts)
    columns = {name: names(one) for name, one in measures(params.window_s).items()}
    require_exported(wanted(params.alerts), known)
    require_exported({f"column {name}": read for name, read in columns.items()}, known)
    require_exported({"the dashboard": sorted(grafana.series_names(dashboard))}, known)
    first = record([scraped], params.scrape_s)
    for name in params.alerts:
        _threshold_cases(name, first, params)
    return dashboard


def judge(observed: Observed, params: MonitoringParams, cores: int) -> Seen:
    """Evaluate all measures and alerts over a scenario, and let promtool repeat the alerts."""
    recording = record([one.text for one in observed.ticks], params.scrape_s)
    closed = promtool.closed_windows()
    episodes = results.alert_episodes(recording, params.alerts, closed)
    rows = results.series_table(recording, observed, params, closed)
    return Seen(
        params,
        recording,
        observed,
        episodes,
        rows,
        results.phase_table(observed, rows, params),
        verdict(recording, episodes, params),
        cores,
    )


def verdict(recording: Recording, episodes: list[Episode], params: MonitoringParams) -> Verdict:
    """promtool on the rules, on cases made from thresholds, and on the recording itself."""
    cases = [case for name in params.alerts for case in _threshold_cases(name, recording, params)]
    cases.append(promtool.firing_ticks(recording, episodes, params.alerts))
    return promtool.check(params.alerts, cases, params.scrape_s)


def metrics(seen: Seen) -> dict[str, float]:
    """The stage's figures: alerts, queue, errors by kind, gaps, and TTFT of each phase."""
    errors = results.error_counts(seen.observed.sent)
    known = ("too_long", "cut")
    return {
        "alerts_fired": len({one.alert for one in seen.episodes if one.fired is not None}),
        "alerts_missed": len(results.missed(seen.episodes, seen.params)),
        "alerts_unexpected": len(results.unexpected(seen.episodes, seen.params)),
        "promtool_checked": int(seen.verdict.checked),
        "promtool_agrees": int(seen.verdict.checked and seen.verdict.passed),
        "requests": len(seen.observed.sent),
        **{f"errors_{kind}": errors[kind] for kind in known},
        "errors_other": sum(errors.values()) - sum(errors[kind] for kind in known),
        "scrape_gaps": seen.recording.gaps,
        "waiting_max": max(row["waiting_max"] for row in seen.phases),
        "kv_cache_share_max": max(row["kv_cache_share_max"] for row in seen.phases),
        **{
            f"ttft_ms_p95_{row['phase']}": row["ttft_ms_p95"]
            for row in seen.phases
            if row["ttft_ms_p95"] != ""
        },
    }


def _threshold_cases(name: str, recording: Recording, params: MonitoringParams) -> list[Case]:
    alert = params.alerts[name]
    bounds = synthetic.bucket_bounds(recording, alert)
    return synthetic.threshold_cases(name, alert, bounds, params.scrape_s)
