"""The table of phases and the advice, from a scenario made by hand."""

import math
from pathlib import Path

import pytest

from inferlab.monitoring import study
from inferlab.monitoring.advice import Seen, advice
from inferlab.monitoring.results import usd_per_1000
from inferlab.monitoring.scenario import Observed, Sent, Tick
from inferlab.monitoring.settings import MonitoringParams
from inferlab.params import load
from inferlab.profiling.processes import Reading
from inferlab.serving.load import ErrorKind, Outcome

ROOT = Path(__file__).parent.parent
SCRAPED = (ROOT / "tests/fixtures/vllm_metrics.txt").read_text()
WAITING = 'vllm:num_requests_waiting{engine="0",model_name="int8"} '
TOKENS = 4


@pytest.fixture
def params() -> MonitoringParams:
    return load("monitoring", MonitoringParams, ROOT / "params.yaml")


def sent(
    phase: str, start: float, first: float, error: ErrorKind | None = None, meant: str = ""
) -> Sent:
    """A request whose first token takes `first` seconds and each next one a tenth of a second."""
    chunks = tuple(start + first + 0.1 * n for n in range(TOKENS))
    outcome = Outcome(start, start, chunks[-1], chunks, 8, 0 if error else TOKENS, error)
    return Sent(phase, outcome, meant or error)


def seen(
    params: MonitoringParams, requests: list[Sent], waiting: dict[int, int], gaps: range = range(0)
) -> Seen:
    """Judged as the stage does; the server exports the same at every tick but for the queue."""
    ticks = []
    for second in range(85):
        text = SCRAPED.replace(f"{WAITING}0.0", f"{WAITING}{waiting.get(second, 0)}.0")
        usage = Reading(0.1, 2**31, None, None)
        ticks.append(Tick(None if second in gaps else text, 0.1, usage))
    return study.judge(Observed(ticks, requests), params, cores=2)


def calm(phase: str, start: float) -> list[Sent]:
    return [sent(phase, start + n, 0.1) for n in range(5)]


def test_fixture_has_the_queue_that_the_tests_change() -> None:
    assert f"{WAITING}0.0" in SCRAPED


def test_queue_is_advised_on_with_its_length_and_what_it_did_to_first_tokens(
    params: MonitoringParams,
) -> None:
    slow = [sent("overload", 20.0 + n, 3.0) for n in range(5)]
    result = seen(params, calm("normal", 1.0) + slow, {second: 16 for second in range(19, 40)})
    told = advice(result)
    (queue,) = [one for one in told if "waited while at most" in one.seen]
    assert "in overload (24 clients) up to 16 requests waited" in queue.seen
    assert "TTFT p95 rose from 100 to 3,000 ms" in queue.seen
    assert "start another one" in queue.do
    assert study.metrics(result)["waiting_max"] == 16
    assert any(one.alert == "QueueGrows" and one.fired == 24.0 for one in result.episodes)


def test_errors_are_advised_on_by_kind_with_their_counts(params: MonitoringParams) -> None:
    failed = [sent("errors", 41.0 + n, 0.1, "http_4xx", "too_long") for n in range(3)]
    failed += [sent("errors", 41.0 + n, 0.1, "timeout", "cut") for n in range(2)]
    failed += [sent("errors", 41.0, 0.1, "http_5xx")]
    result = seen(params, calm("normal", 1.0) + failed, {})
    texts = [one.seen for one in advice(result)]
    assert any(text.startswith("3 requests were refused as too long") for text in texts)
    assert any(text.startswith("2 clients left early, after 8 chunks") for text in texts)
    assert "other failed requests: 1 http_5xx" in texts
    values = study.metrics(result)
    kinds = {name: values[f"errors_{name}"] for name in ("too_long", "cut", "other")}
    assert kinds == {"too_long": 3, "cut": 2, "other": 1}


def test_calm_run_gives_no_advice_on_load_and_names_the_silent_alerts(
    params: MonitoringParams,
) -> None:
    told = advice(seen(params, calm("normal", 1.0), {}))
    assert not [one for one in told if "waited" in one.seen or "refused" in one.seen]
    (silent,) = [one for one in told if one.seen.startswith("expected and silent")]
    assert "QueueGrows in overload" in silent.seen and "ServerDown in outage" in silent.seen


def test_gap_is_advised_on_and_hidden_waiting_is_found(params: MonitoringParams) -> None:
    """Clients of the outage wait six seconds; the server's histogram has nothing to say of it."""
    hung = [sent("outage", 58.0, 6.0)]
    result = seen(params, calm("normal", 1.0) + hung, {}, gaps=range(58, 64))
    texts = [one.seen for one in advice(result)]
    assert "6 of 85 scrapes failed, 6 of them while it was frozen" in texts
    assert any("sent during outage was 6,000 ms for their clients" in text for text in texts)
    assert [(one.alert, one.fired, one.cleared) for one in result.episodes] == [
        ("ServerDown", 60.0, 64.0)
    ]


def test_phases_count_requests_by_their_start_and_tokens_by_their_arrival(
    params: MonitoringParams,
) -> None:
    """One request starts in the last moment of normal; its four tokens come in overload."""
    result = seen(params, [*calm("normal", 1.0), sent("normal", 17.9, 0.5)], {})
    normal, overload = result.phases[:2]
    assert (normal["requests"], overload["requests"]) == (6, 0)
    assert normal["output_tokens_per_s"] == pytest.approx(5 * TOKENS / 18, abs=0.01)
    assert overload["output_tokens_per_s"] == pytest.approx(TOKENS / 22, abs=0.01)
    assert normal["tps_p50"] == pytest.approx(10.0)
    assert overload["ttft_ms_p50"] == ""


def test_cost_of_requests_is_the_hour_over_their_rate(params: MonitoringParams) -> None:
    assert usd_per_1000(params, 1.0) == pytest.approx(1000 * params.usd_per_hour / 3600)
    assert usd_per_1000(params, 0.0) is None
    assert usd_per_1000(params, "") is None
    assert math.isclose(2 * (usd_per_1000(params, 2.0) or 0), usd_per_1000(params, 1.0) or 1)
