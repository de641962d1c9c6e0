"""The arithmetic of serving costs: seconds of an instance, whole instances, break-even.

A request occupies its model replica for `input / prefill rate + output / decode rate` seconds, so
the two kinds of token are told apart by the rates alone. Instances are whole and paid all day.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from inferlab.errors import InferlabError

HOURS_A_DAY = 24
SECONDS_AN_HOUR = 3600
MILLION = 1_000_000


@dataclass(frozen=True)
class Workload:
    """The shape of a request in tokens, and the busiest hour's load over the mean hour's."""

    input_tokens: int
    output_tokens: int
    peak_to_mean: float

    def __post_init__(self) -> None:
        _at_least("input_tokens", self.input_tokens, 1)
        _at_least("output_tokens", self.output_tokens, 1)
        _at_least("peak_to_mean", self.peak_to_mean, 1)


@dataclass(frozen=True)
class Price:
    """US dollars (per hour of an instance), the day of the price, and who says so."""

    usd: float
    date: str
    source: str

    def __post_init__(self) -> None:
        _above_zero("a price per hour", self.usd)


@dataclass(frozen=True)
class Rates:
    """Tokens per second of one saturated model replica, in prefill alone and in decode alone.

    `fit_error` is the root mean square relative error of the fit behind them, 0 when measured.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    source: str
    fit_error: float = 0.0

    def __post_init__(self) -> None:
        _above_zero("prefill_tokens_per_s", self.prefill_tokens_per_s, self.source)
        _above_zero("decode_tokens_per_s", self.decode_tokens_per_s, self.source)


@dataclass(frozen=True)
class Machine:
    """What can be rented: an instance that runs `replicas` independent copies of the model."""

    name: str
    rates: Rates
    instance_hour: Price
    replicas: int = 1

    def __post_init__(self) -> None:
        _at_least("replicas", self.replicas, 1)


def seconds_per_request(rates: Rates, workload: Workload) -> Fraction:
    """Seconds that one request occupies a replica."""
    prefill = workload.input_tokens / Fraction(rates.prefill_tokens_per_s)
    return prefill + workload.output_tokens / Fraction(rates.decode_tokens_per_s)


def requests_per_instance_day(machine: Machine, workload: Workload) -> Fraction:
    """Requests a day that one instance takes when it must also carry the busiest hour."""
    busy = HOURS_A_DAY * SECONDS_AN_HOUR / Fraction(workload.peak_to_mean)
    return machine.replicas * busy / seconds_per_request(machine.rates, workload)


def instances(machine: Machine, workload: Workload, requests_per_day: int) -> int:
    """Whole instances for the busiest hour of a day with that many requests."""
    return math.ceil(requests_per_day / requests_per_instance_day(machine, workload))


def daily_usd(machine: Machine, workload: Workload, requests_per_day: int) -> float:
    """US dollars a day: every instance is paid for 24 hours, idle or not."""
    instance_day = HOURS_A_DAY * machine.instance_hour.usd
    return instances(machine, workload, requests_per_day) * instance_day


def busy_share(machine: Machine, workload: Workload, requests_per_day: int) -> float:
    """The part of the paid replica seconds in which requests are served."""
    replicas = machine.replicas * instances(machine, workload, requests_per_day)
    needed = requests_per_day * seconds_per_request(machine.rates, workload)
    return float(needed / (replicas * HOURS_A_DAY * SECONDS_AN_HOUR))


def usd_per_mtok(machine: Machine, workload: Workload) -> tuple[float, float]:
    """US dollars per million input and output tokens, at a mean load of 1 / peak_to_mean."""
    second = machine.instance_hour.usd * workload.peak_to_mean / SECONDS_AN_HOUR / machine.replicas
    rates = machine.rates
    return (
        second / rates.prefill_tokens_per_s * MILLION,
        second / rates.decode_tokens_per_s * MILLION,
    )


def break_even(machine: Machine, workload: Workload, usd_per_request: float) -> int | None:
    """The smallest number of requests a day at which the instances cost less than an API.

    None when there is none. With capacity C and daily price D of an instance and API price a,
    R requests on n instances are cheaper when R <= nC and nD < aR, that is D/a < R/n <= C. The
    smallest such R is the numerator of the simplest fraction in that interval, which has the
    smallest numerator and the smallest denominator of all fractions there (Graham, Knuth,
    Patashnik, Concrete Mathematics, section 4.5). Exact: every number is a rational one.
    """
    if usd_per_request <= 0:
        return None
    highest = requests_per_instance_day(machine, workload)
    lowest = HOURS_A_DAY * Fraction(machine.instance_hour.usd) / Fraction(usd_per_request)
    return _simplest(lowest, highest, closed_above=True).numerator if lowest < highest else None


def _simplest(low: Fraction, high: Fraction | None, closed_above: bool) -> Fraction:
    """The simplest fraction in (low, high], or in [low, high) when not `closed_above`.

    A `high` of None is infinity. Without an integer inside, every fraction has the same integer
    part, and the reciprocals of the rests lie in an interval with its ends exchanged.
    """
    whole = math.floor(low)
    first = whole + 1 if closed_above or low > whole else whole
    if high is None or first < high or (closed_above and first == high):
        return Fraction(first)
    above = 1 / (low - whole) if low > whole else None
    return whole + 1 / _simplest(1 / (high - whole), above, not closed_above)


def _at_least(name: str, value: float, least: int) -> None:
    if not (math.isfinite(value) and value >= least):
        raise InferlabError(f"{name} must be at least {least}; got {value:g}")


def _above_zero(name: str, value: float, source: str = "") -> None:
    if not (math.isfinite(value) and value > 0):
        where = f" ({source})" if source else ""
        raise InferlabError(f"{name} must be above 0; got {value:g}{where}")
