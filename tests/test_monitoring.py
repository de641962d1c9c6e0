"""Measures and alerts over recordings, by hand and against promtool; dashboards; bad input."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.monitoring import grafana, promtool, results, study, synthetic
from inferlab.monitoring.evaluation import (
    Episode,
    bucket_quantile,
    episodes,
    rate,
    values,
)
from inferlab.monitoring.measures import Latest, Quantile, Rate, Ratio, expression
from inferlab.monitoring.recording import Recording, Series, exported, record, recording
from inferlab.monitoring.settings import Alert, MonitoringParams, phase_at

ROOT = Path(__file__).parent.parent
SECTION = yaml.safe_load((ROOT / "params.yaml").read_text())["monitoring"]
SCRAPED = (ROOT / "tests/fixtures/vllm_metrics.txt").read_text()
"""What vLLM 0.32 exported after 8 requests, 3 refused ones and 2 whose client left."""
NAN = math.nan


def read(folder: Path, **changes: object) -> MonitoringParams:
    file = folder / "params.yaml"
    file.write_text(yaml.safe_dump({"monitoring": {**SECTION, **changes}}, sort_keys=False))
    return parameters.load("monitoring", MonitoringParams, file)


@pytest.fixture
def params(tmp_path: Path) -> MonitoringParams:
    return read(tmp_path)


@pytest.fixture
def needs_promtool() -> None:
    if shutil.which("promtool") is None:
        pytest.skip(f"needed {promtool.NEEDED}; found none on the PATH")


def gauge(*level: float, name: str = "queue", **labels: str) -> Series:
    return Series(name, labels, np.array(level, dtype=float))


def alert(**changes: Any) -> Alert:
    known = {
        "value": Latest("latest", "queue"),
        "for_s": 2.0,
        "severity": "warning",
        "summary": "text",
    }
    return Alert(
        **{**known, **({} if {"above", "below"} & set(changes) else {"above": 4.0})} | changes
    )


# Rates and quantiles, worked out by hand.


def test_rate_of_a_steady_counter_is_its_slope() -> None:
    counter = 100.0 + 3.0 * np.arange(20)
    assert rate(counter, 1.0, 15, 10.0) == pytest.approx(3.0)


def test_rate_takes_resets_out() -> None:
    """10, 12, 14, 1, 3: grows by 2, 2, 1 (from zero) and 2 in four seconds."""
    counter = np.array([10.0, 12.0, 14.0, 1.0, 3.0])
    assert rate(counter, 1.0, 4, 4.0) == pytest.approx(7 / 4)


def test_rate_is_extrapolated_half_a_step_beyond_a_gap() -> None:
    """Samples at 0 and 1 s of a window of 10 s: growth 2 over 1 + 0.5 seconds at its end."""
    counter = np.array([50.0, 52.0] + [NAN] * 9)
    assert rate(counter, 1.0, 10, 10.0) == pytest.approx(2 * (1 + 0 + 0.5) / 10)


def test_rate_is_not_extrapolated_to_before_a_counters_birth() -> None:
    """1, 3 at 9 and 10 s: it was zero half a second before the first sample, at this slope."""
    counter = np.array([NAN] * 9 + [1.0, 3.0])
    assert rate(counter, 1.0, 10, 10.0) == pytest.approx(2 * 1.5 / 10)


@pytest.mark.parametrize("counter", [[NAN] * 11, [NAN] * 10 + [5.0]])
def test_one_sample_has_no_rate(counter: list[float]) -> None:
    assert math.isnan(rate(np.array(counter), 1.0, 10, 10.0))


def test_windows_of_prometheus_3_leave_their_first_moment_out() -> None:
    """A jump between the samples at 0 and 1 s is in the window of 10 s at 10 s only when closed."""
    counter = np.array([100.0] + [200.0] * 10)
    assert rate(counter, 1.0, 10, 10.0, closed=True) == pytest.approx(10.0)
    assert rate(counter, 1.0, 10, 10.0, closed=False) == 0.0


def test_quantile_is_linear_within_its_bucket() -> None:
    """Of 10, the 9.5th lies three quarters into the bucket (1, 2] that holds the last two."""
    counts = {0.5: 2.0, 1.0: 8.0, 2.0: 10.0, math.inf: 10.0}
    assert bucket_quantile(0.95, counts) == pytest.approx(1.75)
    assert bucket_quantile(0.1, counts) == pytest.approx(0.25)


def test_quantile_beyond_the_last_bound_is_that_bound() -> None:
    assert bucket_quantile(0.95, {1.0: 1.0, 2.0: 1.0, math.inf: 10.0}) == 2.0


@pytest.mark.parametrize("counts", [{}, {1.0: 0.0, math.inf: 0.0}, {1.0: 3.0, 2.0: 4.0}])
def test_quantile_of_nothing_or_without_its_last_bucket(counts: dict[float, float]) -> None:
    assert math.isnan(bucket_quantile(0.5, counts))


def test_latest_value_joins_the_series_that_are_there() -> None:
    two = recording([gauge(1, NAN, 3, engine="0"), gauge(4, NAN, NAN, engine="1")], 1.0)
    for aggregate, expected in (("sum", [5, NAN, 3]), ("min", [1, NAN, 3]), ("max", [4, NAN, 3])):
        measure = Latest("latest", "queue", aggregate=aggregate)
        np.testing.assert_array_equal(values(measure, two), expected)
    only = Latest("latest", "queue", {"engine": "1"})
    np.testing.assert_array_equal(values(only, two), [4, NAN, NAN])


def test_a_tie_falls_on_the_side_on_which_prometheus_has_it() -> None:
    """12 of 15 is 0.8000000000000002 there, not below 0.8: a tenth of 12 is taken by a product."""
    growth = np.linspace(0, 1, 11)
    some = recording(
        [Series("part", {}, 100 + 12 * growth), Series("whole", {}, 100 + 15 * growth)], 1.0
    )
    assert values(Ratio("ratio", "part", "whole", 10.0), some)[-1] == 12 * 0.1 / 1.5 > 0.8


def test_ratio_of_rates_and_of_nothing() -> None:
    ticks = np.arange(6.0)
    some = recording(
        [
            Series("part", {}, 100 + ticks),
            Series("whole", {}, 100 + 4 * ticks),
            Series("still", {}, 100 + 0 * ticks),
        ],
        1.0,
    )
    assert values(Ratio("ratio", "part", "whole", 3.0), some)[-1] == pytest.approx(0.25)
    assert math.isnan(values(Ratio("ratio", "still", "still", 3.0), some)[-1])
    assert values(Ratio("ratio", "part", "still", 3.0), some)[-1] == math.inf
    assert math.isnan(values(Ratio("ratio", "part", "absent", 3.0), some)[-1])


# Alerts.


def test_alert_fires_after_its_time_and_clears_when_the_condition_ends() -> None:
    measured = np.array([5, 5, 5, 5, 4, 9, 9, 0, 6, 6, 6], dtype=float)
    assert episodes("Q", alert(), measured, 1.0) == [
        Episode("Q", 0.0, 2.0, 4.0),
        Episode("Q", 5.0, None, 7.0),  # true for two seconds only
        Episode("Q", 8.0, 10.0, None),  # never cleared
    ]


def test_gap_ends_the_pending_time() -> None:
    assert episodes("Q", alert(), np.array([5, 5, NAN, 5, 5.0]), 1.0) == [
        Episode("Q", 0.0, None, 2.0),
        Episode("Q", 3.0, None, None),
    ]


def test_alert_without_pending_time_fires_at_once_on_the_side_it_names() -> None:
    low = alert(above=None, below=1.0, for_s=0.0)
    assert episodes("Q", low, np.array([1.0, 0.5, 1.0]), 0.5) == [Episode("Q", 0.5, 0.5, 1.0)]


def test_target_gone_is_a_gap_and_an_alert() -> None:
    down = recorded_alerts([SCRAPED, SCRAPED, None, None, "no metrics <", SCRAPED])
    assert down == [Episode("ServerDown", 2.0, 4.0, 5.0)]


def recorded_alerts(scrapes: list[str | None]) -> list[Episode]:
    rules = parameters.load("monitoring", MonitoringParams, ROOT / "params.yaml").alerts
    return results.alert_episodes(record(scrapes, 1.0), rules, closed=True)


def test_scrape_gaps_are_counted_and_leave_other_series_empty() -> None:
    gaps = record([None, SCRAPED, None, SCRAPED], 1.0)
    assert gaps.gaps == 2
    (running,) = gaps.named("vllm:num_requests_running", {})
    np.testing.assert_array_equal(running.values, [NAN, 0, NAN, 0])
    assert dict(running.labels)["model_name"] == "int8"


def test_missed_and_unexpected_alerts(params: MonitoringParams) -> None:
    """Phases begin at 0, 18, 40, 58 and 64 s."""
    assert [phase_at(second, params.phases) for second in (0, 18, 57.9, 64, 1000)] == [
        *("normal", "overload", "errors", "recovery", "recovery"),
    ]
    found = [
        Episode("QueueGrows", 19.0, 24.0, 40.0),
        Episode("ServerDown", 2.0, 4.0, 5.0),
        Episode("ServerDown", 58.0, None, 59.0),
        Episode("SlowFirstToken", 65.0, 69.0, None),
    ]
    assert set(results.missed(found, params)) == {
        *(("ServerDown", "outage"), ("SlowFirstToken", "overload")),
        *(("RefusedRequests", "errors"), ("CutConnections", "errors")),
    }
    assert results.unexpected(found, params) == [found[1]]
    table = {(row["alert"], row["since_s"]): row for row in results.alert_table(found, params)}
    assert table["QueueGrows", 19.0]["as_expected"] == 1
    assert table["ServerDown", 2.0]["as_expected"] == 0
    assert table["CutConnections", ""]["as_expected"] == 0
    assert table["CacheFull", ""]["as_expected"] == 1


# Against Prometheus itself.


def test_promql_of_each_form() -> None:
    assert expression(Latest("latest", "up", aggregate="min")) == "min(up)"
    assert expression(Rate("rate", "a_total", 1.5, {"b": 'c"'})) == (
        'sum(rate(a_total{b="c\\""}[1500ms]))'
    )
    ratio = Ratio("ratio", "a", "b", 10.0, {}, {"s": "2xx"})
    assert expression(ratio) == 'sum(rate(a[10s])) / sum(rate(b{s="2xx"}[10s]))'
    assert expression(Quantile("quantile", "h", 0.95, 10.0), "$__rate_interval") == (
        "histogram_quantile(0.95, sum by (le) (rate(h_bucket[$__rate_interval])))"
    )


def threshold_cases(params: MonitoringParams) -> list[promtool.Case]:
    first = record([SCRAPED], params.scrape_s)
    return [
        case
        for name, one in params.alerts.items()
        for case in synthetic.threshold_cases(
            name, one, synthetic.bucket_bounds(first, one), params.scrape_s
        )
    ]


def test_every_rule_fires_beyond_its_threshold_and_is_silent_within(
    params: MonitoringParams,
) -> None:
    cases = threshold_cases(params)
    assert len(cases) >= 2 * len(params.alerts)
    for case in cases:
        (tick, firing), (name,) = next(iter(case.firing.items())), case.alerts
        found = results.alert_episodes(case.recording, {name: params.alerts[name]}, closed=True)
        now = tick * case.recording.interval_s
        on = [one for one in found if one.fired is not None and one.cleared is None]
        assert [one.alert for one in on if one.fired <= now] == firing, case.name


@pytest.mark.usefixtures("needs_promtool")
def test_promtool_confirms_the_rules_and_their_cases(params: MonitoringParams) -> None:
    verdict = promtool.check(params.alerts, threshold_cases(params), params.scrape_s)
    assert verdict.passed and verdict.checked, verdict.output
    assert f"{len(params.alerts)} rules found" in verdict.output


@pytest.mark.usefixtures("needs_promtool")
def test_promtool_sees_what_is_wrong(params: MonitoringParams) -> None:
    """The judge must be able to say no: the same cases with every expectation turned round."""
    name = next(iter(params.alerts))
    for case in threshold_cases(params):
        if case.alerts == [name]:
            turned = {tick: [] if firing else [name] for tick, firing in case.firing.items()}
            wrong = promtool.Case(case.name, case.recording, turned, case.alerts)
            verdict = promtool.check(params.alerts, [wrong], params.scrape_s)
            assert verdict.checked and not verdict.passed
            assert "FAILED" in verdict.output


def random_recording(seed: int) -> Recording:
    """Counters that rest, jump and reset, a gauge, a histogram, all with gaps; 40 ticks."""
    random = np.random.default_rng(seed)

    def holes(level: np.ndarray) -> np.ndarray:
        return np.where(random.random(40) < random.choice([0, 0.1, 0.5]), NAN, level)

    def counter(name: str, **labels: str) -> Series:
        steps = random.poisson(random.choice([0.3, 3.0]), 40)
        level = np.cumsum(steps).astype(float)
        level[30:] -= level[30] * (random.random() < 0.5)
        return Series(name, labels, holes(level))

    buckets = np.cumsum(random.poisson(1.0, (3, 40)), axis=0).cumsum(axis=1).astype(float)
    gap = random.random(40) < 0.1
    return recording(
        [
            gauge(*holes(random.integers(0, 8, 40).astype(float)), engine="0"),
            gauge(*holes(random.integers(0, 8, 40).astype(float)), engine="1"),
            counter("a_total", status="2xx"),
            counter("a_total", status="4xx"),
            *(
                Series("h_bucket", {"le": le}, np.where(gap, NAN, buckets[place]))
                for place, le in enumerate(("0.5", "2.0", "+Inf"))
            ),
        ],
        1.0,
    )


# No threshold is a value that occurs: the last digit of a sum may differ between two programs.
RANDOM_ALERTS = {
    "Queue": alert(above=7.5),
    "Low": alert(value=Latest("latest", "queue", aggregate="min"), above=None, below=1.5),
    "Rate": alert(value=Rate("rate", "a_total", 7.0), above=2.003, for_s=0.0),
    "Share": alert(value=Ratio("ratio", "a_total", "a_total", 5.0, {"status": "4xx"}), above=0.413),
    "Slow": alert(value=Quantile("quantile", "h", 0.9, 6.0), above=1.7, for_s=1.0),
}


@pytest.mark.usefixtures("needs_promtool")
def test_promtool_fires_and_clears_at_the_same_ticks() -> None:
    closed, cases, fired = promtool.closed_windows(), [], set()
    for seed in range(40):
        one = random_recording(seed)
        found = results.alert_episodes(one, RANDOM_ALERTS, closed)
        fired |= {episode.alert for episode in found if episode.fired is not None}
        cases.append(promtool.firing_ticks(one, found, RANDOM_ALERTS))
    assert fired == set(RANDOM_ALERTS)
    verdict = promtool.check(RANDOM_ALERTS, cases, 1.0)
    assert verdict.passed and verdict.checked, verdict.output[:2000]


def test_without_promtool_it_says_what_was_needed(
    params: MonitoringParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    verdict = promtool.check(params.alerts, [], params.scrape_s)
    assert not verdict.checked
    assert verdict.output == f"not checked: needed {promtool.NEEDED}; found none on the PATH"


@settings(max_examples=50, deadline=None)
@given(
    steps=st.lists(st.integers(0, 9), min_size=12, max_size=12),
    factor=st.integers(2, 5),
)
def test_rate_grows_with_its_counter(steps: list[int], factor: int) -> None:
    counter = 1000.0 + np.cumsum(steps)
    once, more = (rate(one, 1.0, 11, 8.0) for one in (counter, counter * factor))
    assert more == pytest.approx(factor * once)
    assert once >= 0


# Dashboards.


def test_every_query_of_the_dashboard_names_what_vllm_exports(params: MonitoringParams) -> None:
    dashboard = json.loads(grafana.dump(study.prepare(SCRAPED, params)))
    named = grafana.series_names(dashboard)
    assert named <= exported(SCRAPED)
    assert {"up", "vllm:time_to_first_token_seconds_bucket", "http_requests_total"} <= named
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["targets"] for panel in dashboard["panels"])


def test_panel_shows_the_threshold_of_its_alert(params: MonitoringParams) -> None:
    panels = study.prepare(SCRAPED, params)["panels"]
    (queue,) = [one for one in panels if one["title"] == "Requests running and waiting"]
    steps = queue["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert steps[1] == {"color": "red", "value": params.alerts["QueueGrows"].above}


def test_metric_without_an_event_yet_counts_as_exported() -> None:
    text = "# TYPE http_requests_total counter\n# TYPE wait_seconds histogram\n# TYPE load gauge\n"
    assert exported(text) == {
        *("up", "http_requests_total", "load"),
        *("wait_seconds_bucket", "wait_seconds_sum", "wait_seconds_count"),
    }


# Bad input.


def changed_alert(name: str, **changes: object) -> dict[str, object]:
    kept = {key: one for key, one in SECTION["alerts"][name].items() if key not in changes}
    return {"alerts": {**SECTION["alerts"], name: {**kept, **changes}}}


def test_alert_on_an_unknown_metric_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    value = {"kind": "latest", "metric": "vllm:num_request_waiting"}
    params = read(tmp_path, **changed_alert("QueueGrows", value=value))
    with pytest.raises(InferlabError) as caught:
        study.prepare(SCRAPED, params)
    message = str(caught.value)
    assert message.startswith(
        "monitoring.alerts.QueueGrows: the server exports no metric 'vllm:num_request_waiting'; "
        "did you mean vllm:num_requests_waiting?"
    )
    assert len(message.splitlines()) == 1


def test_threshold_that_a_histogram_cannot_tell(tmp_path: Path) -> None:
    params = read(tmp_path, **changed_alert("SlowFirstToken", above=4000.0))
    with pytest.raises(InferlabError, match=r"SlowFirstToken: 4000 lies outside the buckets of"):
        study.prepare(SCRAPED, params)


QUEUE = SECTION["alerts"]["QueueGrows"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scrape_s": 0.0}, "monitoring.scrape_s must be greater than or equal to 0.1; got 0.0"),
        ({"windows_s": 1.0}, "did you mean window_s?"),
        ({"window_s": 2.0}, "window_s: a window of 2 s holds fewer than three scrapes"),
        ({"phases": {}}, "monitoring.phases"),
        (
            {"phases": {**SECTION["phases"], "normal": {"seconds": 1, "input_tokens": 1020,
                                                         "output_tokens": 8}}},
            "a request of phase normal has 1028 tokens, engine.max_model_len is 1024",
        ),
        (changed_alert("QueueGrows", expected=["overlaod"]), "did you mean overload?"),
        (changed_alert("QueueGrows", below=1.0), "give exactly one of above, below"),
        (changed_alert("QueueGrows", for_s=-1.0), "for_s must be greater than or equal to 0"),
        (changed_alert("QueueGrows", severity="bad"), "severity must be one of"),
        (changed_alert("QueueGrows", value={"kind": "mean", "metric": "a"}), "kind"),
        (changed_alert("QueueGrows", value={"kind": "latest", "metric": "a b"}), "metric"),
        (
            changed_alert("QueueGrows", value={"kind": "rate", "metric": "a", "window_s": 1.0}),
            "alert QueueGrows: a window of 1 s holds fewer than three scrapes, one every 1 s",
        ),
    ],
)  # fmt: skip
def test_bad_parameters_are_told_before_any_work(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InferlabError) as caught:
        read(tmp_path, **changes)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_machine_costs_what_the_cost_report_says() -> None:
    whole = yaml.safe_load((ROOT / "params.yaml").read_text())
    assert SECTION["usd_per_hour"] == whole["cost_report"]["usd_per_hour"]["this_machine"]
