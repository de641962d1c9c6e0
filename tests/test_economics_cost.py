"""The arithmetic of costs: hand-computed cases, whole instances, and the exact break-even."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlab.economics.cost import (
    Machine,
    Price,
    Rates,
    Workload,
    break_even,
    busy_share,
    daily_usd,
    instances,
    requests_per_instance_day,
    seconds_per_request,
    usd_per_mtok,
)
from inferlab.errors import InferlabError

# 500 / 1000 + 200 / 400 = 1 second a request: 86,400 a day, or 43,200 at a peak of twice the mean.
ONE_SECOND = Rates(1000.0, 400.0, "by hand")
SHAPE = Workload(500, 200, 2.0)


def machine(usd_per_hour: float, replicas: int = 1, rates: Rates = ONE_SECOND) -> Machine:
    return Machine("machine", rates, Price(usd_per_hour, "2026-01-01", "by hand"), replicas)


def slow_machine(requests_a_day: Fraction, usd_a_day: float) -> Machine:
    """One that takes so many one-token requests a day, spent in prefill and decode alike."""
    rate = float(2 * requests_a_day / 86_400)
    return machine(usd_a_day / 24, rates=Rates(rate, rate, "by hand"))


def test_a_request_takes_its_prefill_and_its_decode_seconds() -> None:
    assert seconds_per_request(ONE_SECOND, SHAPE) == 1
    assert requests_per_instance_day(machine(1.0), SHAPE) == 43_200
    assert requests_per_instance_day(machine(1.0, replicas=8), SHAPE) == 8 * 43_200


def test_cost_per_million_tokens_by_hand() -> None:
    """3.6 USD an hour is 0.001 a second: a million input tokens take 1,000 s, output 2,500 s."""
    full = Workload(500, 200, 1.0)
    assert usd_per_mtok(machine(3.6), full) == pytest.approx((1.0, 2.5))
    assert usd_per_mtok(machine(3.6), SHAPE) == pytest.approx((2.0, 5.0))
    assert usd_per_mtok(machine(3.6, replicas=4), full) == pytest.approx((0.25, 0.625))


@pytest.mark.parametrize(
    ("requests", "count"), [(1, 1), (43_200, 1), (43_201, 2), (108_000, 3), (432_000, 10)]
)
def test_instances_are_whole_and_paid_all_day(requests: int, count: int) -> None:
    assert instances(machine(2.0), SHAPE, requests) == count
    assert daily_usd(machine(2.0), SHAPE, requests) == count * 48.0


def test_a_full_instance_is_busy_for_the_mean_over_the_peak() -> None:
    assert busy_share(machine(1.0), SHAPE, 43_200) == 0.5
    assert busy_share(machine(1.0), SHAPE, 43_201) == pytest.approx(0.25, rel=1e-4)


def test_daily_cost_of_full_instances_is_the_cost_of_their_tokens() -> None:
    own = machine(3.6, replicas=2)
    requests = 5 * 2 * 43_200
    input_usd, output_usd = usd_per_mtok(own, SHAPE)
    tokens_usd = requests * (500 * input_usd + 200 * output_usd) / 1e6
    assert daily_usd(own, SHAPE, requests) == pytest.approx(tokens_usd)


def test_break_even_by_hand() -> None:
    """48 USD a day at 0.002 a request is 24,000 requests; one more is cheaper."""
    assert break_even(machine(2.0), SHAPE, 1 / 512) == 24_577  # 48 * 512 = 24,576 exactly
    assert break_even(machine(2.0), SHAPE, 48 / 43_200 * 0.999) is None
    assert break_even(machine(2.0), SHAPE, 0.0) is None


def test_break_even_is_on_a_later_step_when_the_first_instance_is_just_too_small() -> None:
    """2.5 requests a day at a price that needs over 2.25 a day to pay: 5 requests, 2 instances."""
    own = slow_machine(Fraction(5, 2), usd_a_day=2.25)
    shape = Workload(1, 1, 1.0)
    assert requests_per_instance_day(own, shape) == pytest.approx(2.5)
    crossing = break_even(own, shape, 1.0)
    assert crossing == 5
    assert instances(own, shape, crossing) == 2


@settings(max_examples=200, deadline=None)
@given(
    prefill=st.integers(1, 40),
    decode=st.integers(1, 40),
    usd=st.integers(1, 60),
    api=st.integers(1, 60),
)
def test_break_even_equals_brute_force(prefill: int, decode: int, usd: int, api: int) -> None:
    """Days of a few requests make the stairs coarse: the crossing is often not on the first."""
    own = machine(usd / 24, rates=Rates(prefill / 4096, decode / 4096, "by hand"))
    shape = Workload(1, 40, 4.0)
    price = float(api)
    capacity = requests_per_instance_day(own, shape)
    daily = 24 * Fraction(own.instance_hour.usd)
    searched = 1_000
    brute = next(
        (
            requests
            for requests in range(1, searched)
            if math.ceil(requests / capacity) * daily < requests * Fraction(price)
        ),
        None,
    )
    found = break_even(own, shape, price)
    if brute is None:
        assert found is None or found >= searched
    else:
        assert found == brute


@given(requests=st.integers(1, 10**9), peak=st.floats(1, 10), replicas=st.integers(1, 16))
def test_instances_carry_the_peak_with_none_to_spare(
    requests: int, peak: float, replicas: int
) -> None:
    own, shape = machine(1.0, replicas), Workload(500, 200, peak)
    count = instances(own, shape, requests)
    capacity = requests_per_instance_day(own, shape)
    assert (count - 1) * capacity < requests <= count * capacity
    assert busy_share(own, shape, requests) <= 1 / peak + 1e-12


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_that_is_not_above_zero_is_refused(rate: float) -> None:
    with pytest.raises(InferlabError, match=r"^decode_tokens_per_s must be above 0; got .*by hand"):
        Rates(1.0, rate, "by hand")
    with pytest.raises(InferlabError, match=r"^prefill_tokens_per_s must be above 0; got "):
        Rates(rate, 1.0, "by hand")


def test_other_bad_numbers_are_refused() -> None:
    with pytest.raises(InferlabError, match=r"^a price per hour must be above 0; got 0$"):
        Price(0.0, "2026-01-01", "by hand")
    with pytest.raises(InferlabError, match=r"^peak_to_mean must be at least 1; got 0.5$"):
        Workload(1, 1, 0.5)
    with pytest.raises(InferlabError, match=r"^output_tokens must be at least 1; got 0$"):
        Workload(1, 0, 1.0)
    with pytest.raises(InferlabError, match=r"^replicas must be at least 1; got 0$"):
        machine(1.0, replicas=0)
