"""What would change the answer: each limit moved over all values at which something changes."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from inferlab.reporting.decision import Case, Option, best
from inferlab.reporting.requirements import LABELS, Requirements

LOADS = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""Traffic that is tried, as a multiple of the user's."""


@dataclass(frozen=True)
class Answer:
    """From `low` (included) to `high` (excluded; None: without end) the answer is `option`."""

    low: float
    high: float | None
    option: Option | None
    now: bool


def along(name: str, case: Case, wanted: Requirements) -> list[Answer]:
    """The answer for every value of the limit `name`, the others as they are.

    Exact: the answer can only change where the limit passes a candidate's own value.
    """
    floor = 1.0 if name == "perplexity_ratio" else 0.0
    limits = sorted({floor, *(max(floor, getattr(one, name)) for one in case.candidates)})
    found: list[tuple[float, Option | None]] = []
    for limit in limits:
        option = best(case, dataclasses.replace(wanted, **{name: limit}))
        if not found or _point(found[-1][1]) != _point(option):
            found.append((limit, option))
    ends = [low for low, _ in found[1:]] + [None]
    now = getattr(wanted, name)
    return [
        Answer(low, high, option, now is not None and low <= now and (high is None or now < high))
        for (low, option), high in zip(found, ends, strict=True)
    ]


def sensitivities(case: Case, wanted: Requirements) -> dict[str, list[Answer]]:
    """`along` for each limit that is asked for."""
    asked = [name for name in LABELS if getattr(wanted, name) is not None]
    return {name: along(name, case, wanted) for name in asked}


def over_traffic(case: Case, wanted: Requirements) -> list[tuple[int, Option | None]]:
    """The answer at other loads: requests a day, and the option."""
    found = []
    for factor in LOADS:
        requests = max(1, round(factor * case.traffic.requests_per_day))
        traffic = dataclasses.replace(case.traffic, requests_per_day=requests)
        found.append((requests, best(dataclasses.replace(case, traffic=traffic), wanted)))
    return found


def lead(options: Sequence[Option]) -> tuple[Option, bool] | None:
    """The best option of another variant that keeps all limits, and is the first one's lead sure?

    Sure: their throughputs over rounds do not overlap. None when there is no second variant.
    """
    first = options[0]
    for other in options[1:]:
        if not other.missed and other.candidate.variant != first.candidate.variant:
            return other, first.candidate.low > other.candidate.high
    return None


def _point(option: Option | None) -> tuple[str, str, int] | None:
    if option is None:
        return None
    return option.candidate.variant, option.candidate.engine, option.candidate.concurrency
