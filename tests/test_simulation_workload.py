"""Requests: drawn lengths and arrivals, trace files, and their bad input."""

from pathlib import Path

import numpy as np
import pytest

from inferlab.errors import InferlabError
from inferlab.simulation.cost import PICOSECONDS
from inferlab.simulation.workload import (
    Lengths,
    Normal,
    draw,
    gamma_arrivals,
    make_workload,
    read_trace,
)

EXERCISE = Lengths(Normal(500.0, 200.0, 1, 2000), Normal(200.0, 100.0, 1, 1000))


def test_lengths_below_one_are_clipped_and_counted() -> None:
    """Of N(200, 100) 2.3 % lie below 1; clipping them raises the mean a little."""
    rng = np.random.default_rng(0)
    lengths, clipped = draw(EXERCISE.outputs, 100_000, rng)
    assert lengths.min() == 1
    assert clipped == pytest.approx(2300, rel=0.05)
    assert clipped <= (lengths == 1).sum() < clipped + 100
    assert 200 < lengths.mean() < 202
    narrow, moved = draw(Normal(5.0, 100.0, 2, 3), 1000, np.random.default_rng(1))
    assert set(narrow.tolist()) == {2, 3} and moved > 980


def test_realised_means_are_those_of_the_requests() -> None:
    work = make_workload(EXERCISE, 20_000, 2.0, 1.0, seed=0)
    assert work.prompts.mean() == pytest.approx(500, rel=0.02)
    assert work.outputs.mean() == pytest.approx(200.6, rel=0.02)
    assert work.clipped == pytest.approx(20_000 * (0.0062 + 0.0228), rel=0.15)


@pytest.mark.parametrize("variation", [0.0, 0.5, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_variation(variation: float) -> None:
    arrivals = gamma_arrivals(4.0, variation, 50_000, np.random.default_rng(0)) / PICOSECONDS
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05, abs=1e-6)
    assert (gaps >= 0).all()


def test_two_rates_see_the_same_requests() -> None:
    slow, fast = (make_workload(EXERCISE, 100, rate, 1.0, seed=4) for rate in (1.0, 2.0))
    assert (slow.prompts == fast.prompts).all() and (slow.outputs == fast.outputs).all()
    assert np.abs(slow.arrivals - 2 * fast.arrivals).max() <= 2
    assert not (slow.prompts == make_workload(EXERCISE, 100, 1.0, 1.0, seed=5).prompts).all()


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(InferlabError, match="rate must be above 0 requests a second; got"):
        gamma_arrivals(rate, 1.0, 5, np.random.default_rng(0))
    work = make_workload(EXERCISE, 5, 1.0, 1.0, 0)
    with pytest.raises(InferlabError, match="rate must be above 0 requests a second; got"):
        work.at_rate(rate)


def test_variation_must_not_be_negative() -> None:
    with pytest.raises(InferlabError, match="variation must be at least 0; got -1"):
        gamma_arrivals(1.0, -1.0, 5, np.random.default_rng(0))


def test_trace_is_read_and_stretched(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("timestamp,input_tokens,output_tokens,note\n10,5,1,a\n10.5,7,2,b\n12,9,3,\n")
    work = read_trace(file)
    assert (work.arrivals / PICOSECONDS).tolist() == [0, 0.5, 2]
    assert work.prompts.tolist() == [5, 7, 9] and work.outputs.tolist() == [1, 2, 3]
    assert (work.at_rate(0.5).arrivals / PICOSECONDS).tolist() == [0, 1, 4]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["0,5,1", "2,5,1", "1,5,1"], "line 4: timestamp 1 is before 2 of the line above; sort"),
        (["0,5,1", "1,,1"], "line 3: input_tokens is missing; give a number"),
        (["0,5"], "line 2: output_tokens is missing; give a number"),
        (["0,5,one"], "line 2: output_tokens must be a whole number; got 'one'"),
        (["noon,5,1"], "line 2: timestamp must be a number of seconds; got 'noon'"),
        (["0,5,1", "1,0,1"], "line 3: input_tokens must be finite, a length at least 1; got 0"),
        (["0,5,-2"], "line 2: output_tokens must be finite, a length at least 1; got -2"),
        (["nan,5,1"], "line 2: timestamp must be finite"),
        (["0,5.5,1"], "line 2: input_tokens must be a whole number; got '5.5'"),
        ([], "holds no request; give one line a request"),
    ],
)
def test_traces_that_are_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(["timestamp,input_tokens,output_tokens", *lines]) + "\n")
    with pytest.raises(InferlabError) as caught:
        read_trace(file)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(file))


def test_trace_without_a_column_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("timestamp,input_tokens\n0,5\n")
    with pytest.raises(InferlabError, match="line 1: no column 'output_tokens'; the columns are"):
        read_trace(file)


def test_range_of_lengths_must_not_be_empty() -> None:
    with pytest.raises(ValueError, match="most must be at least least, 5; got 4"):
        Normal(3.0, 1.0, 5, 4)
