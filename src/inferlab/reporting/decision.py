"""The recommendation: the cheapest candidate within all limits, and why the others are not it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inferlab.reporting.requirements import (
    LABELS,
    QUALITY_LIMITS,
    Candidate,
    Requirements,
    Traffic,
    machines,
    overshoots,
    usd_per_day,
)


@dataclass(frozen=True)
class Case:
    """What there is to choose from, for which traffic, at what price of a machine's hour."""

    candidates: Sequence[Candidate]
    traffic: Traffic
    usd_per_hour: float


@dataclass(frozen=True)
class Option:
    """The best that a variant on an engine can do: its operating point, or its nearest miss.

    `missed`: the limits that it misses there and by how much; none when it keeps them.
    """

    candidate: Candidate
    machines: int
    usd_per_day: float
    missed: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """`options`: one a variant and engine, best first. `winner` is None when none keeps all.

    `binds`: without a winner the limits that stand in the way: each alone when lifting it is
    enough, else those that the nearest candidate misses. With a winner: what its next point,
    of more throughput, would miss; empty when there is none.
    """

    options: Sequence[Option]
    winner: Option | None
    binds: Sequence[str]


def decide(case: Case, wanted: Requirements) -> Decision:
    """Choose among the candidates.

    A variant on an engine runs at its operating point, the highest throughput that keeps the
    limits; among these the lowest cost a day wins, then the lowest perplexity, then throughput.
    """
    groups: dict[tuple[str, str], list[Candidate]] = {}
    for candidate in case.candidates:
        groups.setdefault((candidate.variant, candidate.engine), []).append(candidate)
    options = sorted((_option(group, case, wanted) for group in groups.values()), key=_rank)
    winner = options[0] if options and not options[0].missed else None
    if winner:
        binds = _beyond(winner, groups[winner.candidate.variant, winner.candidate.engine], wanted)
    else:
        binds = _in_the_way(options, case, wanted)
    return Decision(options, winner, binds)


def best(case: Case, wanted: Requirements) -> Option | None:
    """The winner alone."""
    return decide(case, wanted).winner


def reason(option: Option, winner: Option | None) -> str:
    """Why an option is not the winner, in words."""
    if option is winner:
        return "recommended"
    if option.missed:
        where = "even where it comes nearest" if _by_load(option.missed) else "at any load"
        missed = ", ".join(_miss(option.candidate, name) for name in option.missed)
        return f"{where}: {missed}"
    assert winner is not None
    more = option.usd_per_day - winner.usd_per_day
    if more > 0:
        return (
            f"keeps every limit, but needs {option.machines:,} machines instead of "
            f"{winner.machines:,}: ${more:,.2f} a day more"
        )
    if option.candidate.perplexity_ratio > winner.candidate.perplexity_ratio:
        return "keeps every limit and costs the same, at a higher perplexity"
    return "keeps every limit and costs the same, with less throughput to spare"


def pareto(candidates: Sequence[Candidate]) -> list[bool]:
    """Is each on the front of quality, latency and cost? No other is as good in all.

    Quality is the perplexity ratio, latency both times, and cost goes with one over throughput.
    """
    points = [
        (one.perplexity_ratio, one.ttft_ms, one.tpot_ms, -one.requests_per_s) for one in candidates
    ]
    return [
        not any(
            other != point and all(a <= b for a, b in zip(other, point, strict=True))
            for other in points
        )
        for point in points
    ]


def _option(group: Sequence[Candidate], case: Case, wanted: Requirements) -> Option:
    """The operating point of one variant on one engine, or its nearest miss."""
    within = [one for one in group if not overshoots(one, wanted)]
    if within:
        chosen = max(within, key=lambda one: one.requests_per_s)
    else:
        chosen = min(
            group, key=lambda one: (*_distance(overshoots(one, wanted)), -one.requests_per_s)
        )
    return Option(
        chosen,
        machines(chosen, case.traffic),
        usd_per_day(chosen, case.traffic, case.usd_per_hour),
        overshoots(chosen, wanted),
    )


def _distance(missed: Mapping[str, float]) -> tuple[float, int]:
    """How near a miss is: the largest overshoot, then how many limits are missed."""
    return max(missed.values(), default=0.0), len(missed)


def _rank(option: Option) -> tuple[float, ...]:
    one = option.candidate
    distance = _distance(option.missed)
    return (*distance, option.usd_per_day, one.perplexity_ratio, -one.requests_per_s)


def _beyond(winner: Option, group: Sequence[Candidate], wanted: Requirements) -> list[str]:
    chosen = winner.candidate
    faster = [one for one in group if one.requests_per_s > chosen.requests_per_s]
    if not faster:
        return []
    return list(overshoots(min(faster, key=lambda one: one.requests_per_s), wanted))


def _in_the_way(options: Sequence[Option], case: Case, wanted: Requirements) -> list[str]:
    missed = [overshoots(one, wanted) for one in case.candidates]
    alone = [name for name in LABELS if any(set(found) == {name} for found in missed)]
    return alone or (list(options[0].missed) if options else [])


def _by_load(missed: dict[str, float]) -> bool:
    return not set(missed) <= set(QUALITY_LIMITS)


def _miss(candidate: Candidate, name: str) -> str:
    return f"{LABELS[name]} {quantity(name, getattr(candidate, name))}"


def quantity(name: str, value: float) -> str:
    """A value of a limit with its unit."""
    match name:
        case "perplexity_ratio":
            return f"× {value:.3f}"
        case "accuracy_loss":
            return f"{100 * value:.1f} points"
        case _:
            return f"{value:,.0f} ms"
