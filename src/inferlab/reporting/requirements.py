"""What the user asks for: the section `report`, and how far a candidate is from it."""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from inferlab.params import section

SECONDS_A_DAY = 86_400
Positive = Annotated[float, Field(gt=0)]


@section
class Slo:
    """Limits on latency, for the 95th percentile of requests."""

    ttft_ms: Positive
    tpot_ms: Positive


@section
class Quality:
    """The floor: how much worse than the base a variant may be."""

    perplexity_ratio: float
    accuracy_loss: float | None

    def __post_init__(self) -> None:
        """Raise ValueError for a floor that lies above the base itself."""
        if self.perplexity_ratio < 1:
            raise ValueError(
                f"perplexity_ratio {self.perplexity_ratio:g} is a floor above the base, whose own "
                "ratio is 1; give 1 or more"
            )
        if self.accuracy_loss is not None and not 0 <= self.accuracy_loss <= 1:
            reason = (
                "is a floor above the base, which loses 0"
                if self.accuracy_loss < 0
                else ("is more than there is to lose")
            )
            raise ValueError(
                f"accuracy_loss {self.accuracy_loss:g} {reason}; give 0 to 1, or null for any loss"
            )


@section
class Traffic:
    """The load that is to be carried."""

    requests_per_day: Annotated[int, Field(ge=1)]
    peak_to_mean: Annotated[float, Field(ge=1)]
    busy_share: Annotated[float, Field(gt=0, le=1)]

    @property
    def peak_requests_per_s(self) -> float:
        """Requests a second in the busiest hour."""
        return self.requests_per_day * self.peak_to_mean / SECONDS_A_DAY


@section
class ReportParams:
    """The section `report`."""

    question: Annotated[str, Field(min_length=1)]
    slo: Slo
    quality: Quality
    traffic: Traffic


@dataclass(frozen=True)
class Candidate:
    """A variant on an engine at a concurrency, as measured; times in milliseconds.

    `ttft_ms` and `tpot_ms`: 95th percentile over the requests of the slowest round.
    `requests_per_s` of one machine, `low` and `high` over rounds. `perplexity_ratio` to the base,
    `accuracy_loss` the largest drop of a task's accuracy below it. `unserved`: without a server,
    one request at a time and so with no queue and no percentile: where the times come from.
    """

    variant: str
    engine: str
    concurrency: int
    ttft_ms: float
    tpot_ms: float
    requests_per_s: float
    low: float
    high: float
    perplexity_ratio: float
    accuracy_loss: float
    unserved: str = ""

    @property
    def name(self) -> str:
        """The variant and its engine."""
        return f"{self.variant} on {self.engine}"


@dataclass(frozen=True)
class Requirements:
    """All limits in one place. None: not asked for."""

    ttft_ms: float
    tpot_ms: float
    perplexity_ratio: float
    accuracy_loss: float | None


LABELS = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "perplexity_ratio": "perplexity over the base's",
    "accuracy_loss": "accuracy lost",
}
"""Each limit in words."""
QUALITY_LIMITS = ("perplexity_ratio", "accuracy_loss")


def requirements(params: ReportParams) -> Requirements:
    """The limits of the section."""
    quality = params.quality
    return Requirements(
        params.slo.ttft_ms, params.slo.tpot_ms, quality.perplexity_ratio, quality.accuracy_loss
    )


def overshoots(candidate: Candidate, wanted: Requirements) -> dict[str, float]:
    """The limits that a candidate misses, and by how much: a share of the limit.

    A loss of accuracy, whose limit may be 0, is counted in the share of questions instead.
    """
    found = {}
    for name in LABELS:
        limit, value = getattr(wanted, name), getattr(candidate, name)
        if limit is not None and value > limit:
            found[name] = value - limit if name == "accuracy_loss" else _share(value, limit)
    return found


def _share(value: float, limit: float) -> float:
    """How far a value lies above its limit; infinitely far above a limit of 0."""
    return value / limit - 1 if limit else math.inf


def machines(candidate: Candidate, traffic: Traffic) -> int:
    """Whole machines for the busiest hour, each planned with `busy_share` of what it can do."""
    return math.ceil(traffic.peak_requests_per_s / (traffic.busy_share * candidate.requests_per_s))


def usd_per_day(candidate: Candidate, traffic: Traffic, usd_per_hour: float) -> float:
    """US dollars a day: every machine is paid for 24 hours."""
    return machines(candidate, traffic) * 24 * usd_per_hour


def usd_per_million_requests(candidate: Candidate, traffic: Traffic, usd_per_hour: float) -> float:
    """US dollars for a million requests on so many machines that wholes do not matter."""
    planned = candidate.requests_per_s * traffic.busy_share / traffic.peak_to_mean
    return usd_per_hour / 3600 / planned * 1e6
