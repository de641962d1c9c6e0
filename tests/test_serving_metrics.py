"""Definitions of the serving figures, by hand-computed cases."""

import pytest

from inferlab.errors import InferlabError
from inferlab.serving import metrics
from inferlab.serving.load import ErrorKind, Outcome
from inferlab.serving.metrics import Objective


def outcome(
    start: float, chunks: tuple[float, ...], tokens: int = 0, error: ErrorKind | None = None
) -> Outcome:
    """A request of 10 prompt tokens, one token a chunk unless `tokens` says otherwise."""
    end = chunks[-1] if chunks else start + 1.0
    return Outcome(start, start, end, chunks, 10, tokens or len(chunks), error)


SLOW = outcome(1.0, (1.5, 1.6, 1.8, 2.1))
FAST = outcome(0.0, (0.25, 0.5))
FAILED = outcome(0.0, (), error="cut")


def test_latencies_of_one_request() -> None:
    assert metrics.ttft(SLOW) == pytest.approx(0.5)
    assert metrics.tpot(SLOW) == pytest.approx(0.6 / 3)
    assert metrics.itl(SLOW) == pytest.approx([0.1, 0.2, 0.3])
    assert metrics.e2e(SLOW) == pytest.approx(1.1)


def test_tpot_divides_by_tokens_and_not_by_chunks() -> None:
    assert metrics.tpot(outcome(0.0, (1.0, 2.0), tokens=11)) == pytest.approx(0.1)


def test_one_token_has_no_tpot() -> None:
    assert metrics.tpot(outcome(0.0, (1.0,))) is None
    assert "tpot_ms_p50" not in metrics.summary([outcome(0.0, (1.0,))])


def test_throughput_counts_successes_in_the_whole_time() -> None:
    late_failure = Outcome(0.0, 0.0, 6.0, (0.5,), 10, 1, "timeout")
    assert metrics.output_tokens_per_s([SLOW, FAST]) == pytest.approx(6 / 2.1)
    assert metrics.output_tokens_per_s([SLOW, FAST, late_failure]) == pytest.approx(6 / 6.0)


def test_throughput_of_busy_clients_is_theirs_over_the_time_a_request_takes() -> None:
    """Three clients, 2 s a request: 1.5 requests a second, wherever the measured ones began."""
    taken = [outcome(start, (start + 0.5, start + 2.0)) for start in (0.0, 0.7, 1.1, 9.0)]
    found = metrics.summary(taken, clients=3)
    assert found["requests_per_s"] == pytest.approx(1.5)
    assert found["output_tokens_per_s"] == pytest.approx(3.0)
    objective = metrics.Objective(ttft_ms=1000.0, tpot_ms=2000.0, share=1.0)
    assert metrics.goodput(taken, objective, clients=3) == pytest.approx(1.5)


def test_failures_are_counted_by_kind_and_never_averaged_in() -> None:
    slow_failure = Outcome(0.0, 0.0, 2.0, (1.9,), 10, 1, "timeout")
    mixed = [SLOW, FAILED, slow_failure, FAILED]
    assert metrics.failures(mixed) == {"cut": 2, "timeout": 1}
    latencies = {name for name in metrics.summary([SLOW]) if "_ms_" in name}
    assert {name: metrics.summary(mixed)[name] for name in latencies} == {
        name: metrics.summary([SLOW])[name] for name in latencies
    }


def test_percentiles_interpolate() -> None:
    requests = [outcome(0.0, (seconds, 2.0)) for seconds in (0.1, 0.2, 0.3, 0.4, 0.5)]
    summary = metrics.summary(requests)
    assert summary["ttft_ms_p50"] == pytest.approx(300)
    assert summary["ttft_ms_p95"] == pytest.approx(480)


def test_prefill_rate_is_prompt_tokens_until_the_last_first_token() -> None:
    requests = [outcome(0.0, (1.0,)), outcome(0.5, (2.0,))]
    assert metrics.prefill_tokens_per_s(requests) == pytest.approx(20 / 2.0)


def test_saturated_decode_counts_only_the_time_in_which_all_decode() -> None:
    # Both decode from 2.0 to 4.0: tokens at 3.0 and 4.0 of the one, 2.5, 3.5 and 4.0 of the other.
    one = outcome(0.0, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    other = outcome(0.0, (2.0, 2.5, 3.5, 4.0))
    rate, requests = metrics.saturated_decode([one, other])
    assert (rate, requests) == (pytest.approx(5 / 2.0), 2)


def test_saturated_decode_leaves_out_the_time_of_prefill_and_weighs_chunks_by_tokens() -> None:
    one = outcome(0.0, (1.0, 2.0), tokens=3)  # two tokens in the chunk after the first
    other = outcome(0.0, (3.0, 5.0), tokens=3)
    assert metrics.saturated_decode([one, other]) == (pytest.approx(4 / 3.0), 1)


def test_saturated_decode_ignores_failed_requests() -> None:
    failed = Outcome(0.0, 0.0, 9.0, (1.0, 9.0), 10, 2, "cut")
    assert metrics.saturated_decode([failed, FAST]) == (pytest.approx(4.0), 1)


def test_outputs_of_one_token_have_no_rate_of_decoding() -> None:
    with pytest.raises(InferlabError, match="raise output_tokens"):
        metrics.saturated_decode([outcome(0.0, (1.0,))])


def test_goodput_needs_both_limits_and_failures_count_against_the_share() -> None:
    within = Objective(ttft_ms=300.0, tpot_ms=250.0, share=0.9)
    slow_first = outcome(0.0, (0.4, 0.5))
    slow_rest = outcome(0.0, (0.1, 2.0))
    requests = [FAST, slow_first, slow_rest, FAILED]
    assert metrics.share_within(requests, within) == pytest.approx(1 / 4)
    assert metrics.goodput(requests, within) == pytest.approx(1 / 2.0)


def test_nothing_succeeded_names_the_kinds() -> None:
    with pytest.raises(InferlabError, match=r"no request succeeded \(cut: 2\)"):
        metrics.summary([FAILED, FAILED])
