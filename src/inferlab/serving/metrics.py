"""What is counted, and how: the definitions of every serving figure.

For a request that starts at s, whose first token arrives at f and last at l, n tokens in all:
TTFT = f - s; TPOT = (l - f) / (n - 1); ITL = the gaps between the arrivals of chunks; end to end
(E2E) = l - s. The same names and definitions as in vLLM's own benchmark and in guidellm's inter
token latency. Only requests without an error are measured.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.serving.load import Outcome

PERCENTILES = (50, 95)


@parameters.section
class Objective:
    """The service level objective: `share` of the requests within both limits."""

    ttft_ms: Annotated[float, Field(gt=0)]
    tpot_ms: Annotated[float, Field(gt=0)]
    share: Annotated[float, Field(gt=0, le=1)]


def succeeded(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The requests that got every token they asked for."""
    return [outcome for outcome in outcomes if outcome.error is None]


def failures(outcomes: Iterable[Outcome]) -> Counter[str]:
    """How many requests failed, by kind of error."""
    return Counter(outcome.error for outcome in outcomes if outcome.error is not None)


def ttft(outcome: Outcome) -> float:
    """Seconds from the start to the first token."""
    return outcome.chunks[0] - outcome.start


def tpot(outcome: Outcome) -> float | None:
    """Mean seconds between tokens after the first; None for an output of one token."""
    if outcome.output_tokens < 2:
        return None
    return (outcome.chunks[-1] - outcome.chunks[0]) / (outcome.output_tokens - 1)


def itl(outcome: Outcome) -> list[float]:
    """Seconds between the arrivals of successive chunks."""
    return list(np.diff(outcome.chunks))


def e2e(outcome: Outcome) -> float:
    """Seconds from the start to the last token."""
    return outcome.chunks[-1] - outcome.start


def duration(outcomes: Sequence[Outcome], clients: int | None = None) -> float:
    """Seconds that throughput is over, failed requests included.

    From the first start to the last end, ramp and drain with it; or, of so many `clients` that
    were busy all the while (a steady loop), the seconds that the requests took over the clients.
    That is the interactive response time law without thinking, X = N / R (Denning and Buzen 1978,
    "The Operational Analysis of Queueing Network Models", section 4).
    """
    if clients:
        return sum(outcome.end - outcome.start for outcome in outcomes) / clients
    return max(outcome.end for outcome in outcomes) - min(outcome.start for outcome in outcomes)


def output_tokens_per_s(outcomes: Sequence[Outcome], clients: int | None = None) -> float:
    """Output tokens of the successful requests over `duration`."""
    tokens = sum(outcome.output_tokens for outcome in succeeded(outcomes))
    return tokens / duration(outcomes, clients)


def prefill_tokens_per_s(outcomes: Sequence[Outcome]) -> float:
    """Prompt tokens in the time from the first start to the last first token.

    Meant for outputs of one token, where that time holds no decoding.
    """
    done = _some(outcomes)
    last = max(outcome.chunks[0] for outcome in done)
    first = min(outcome.start for outcome in done)
    return sum(outcome.prompt_tokens for outcome in done) / (last - first)


def saturated_decode(outcomes: Sequence[Outcome]) -> tuple[float, int]:
    """Tokens per second while the most requests are past their first token, and how many those are.

    In a closed loop with one wave of requests they are all of its clients, unless some failed; no
    prompt is processed in that time, so that this is the rate of decoding alone. Raises
    InferlabError if no request has two chunks.
    """
    done = _some(outcomes)
    arrivals = np.sort(np.concatenate([outcome.chunks[1:] for outcome in done]))
    if not len(arrivals):
        raise InferlabError("outputs of one token have no rate of decoding; raise output_tokens")
    per_chunk = sum(outcome.output_tokens - 1 for outcome in done) / len(arrivals)
    changes = [(outcome.chunks[0], 1) for outcome in done]
    changes += [(outcome.chunks[-1], -1) for outcome in done]
    times, steps = np.array(sorted(changes)).T
    decoding = np.cumsum(steps)[:-1]
    most = decoding.max()
    tokens = np.diff(np.searchsorted(arrivals, times, side="right"))[decoding == most]
    seconds = np.diff(times)[decoding == most]
    return float(tokens.sum() * per_chunk / seconds.sum()), int(most)


def share_within(outcomes: Sequence[Outcome], objective: Objective) -> float:
    """The share of all requests that succeeded within both limits; failed ones count against it."""
    return len(_within(outcomes, objective)) / len(outcomes)


def goodput(outcomes: Sequence[Outcome], objective: Objective, clients: int | None = None) -> float:
    """Requests per second of `duration` that succeeded within both limits."""
    return len(_within(outcomes, objective)) / duration(outcomes, clients)


def summary(outcomes: Sequence[Outcome], clients: int | None = None) -> dict[str, float]:
    """Throughput (tokens and requests per second) and latency percentiles (milliseconds).

    `clients`: of a steady loop, as in `duration`.
    """
    done = _some(outcomes)
    samples = {
        "ttft": [ttft(outcome) for outcome in done],
        "tpot": [value for outcome in done if (value := tpot(outcome)) is not None],
        "itl": [gap for outcome in done for gap in itl(outcome)],
        "e2e": [e2e(outcome) for outcome in done],
    }
    return {
        "output_tokens_per_s": output_tokens_per_s(outcomes, clients),
        "requests_per_s": len(done) / duration(outcomes, clients),
        **{
            f"{name}_ms_p{percent}": 1000 * float(np.percentile(values, percent))
            for name, values in samples.items()
            if values
            for percent in PERCENTILES
        },
    }


def _within(outcomes: Sequence[Outcome], objective: Objective) -> list[Outcome]:
    return [
        outcome
        for outcome in succeeded(outcomes)
        if 1000 * ttft(outcome) <= objective.ttft_ms
        and 1000 * (tpot(outcome) or 0.0) <= objective.tpot_ms
    ]


def _some(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The successful requests. Raises InferlabError, with the kinds of error, if there is none."""
    done = succeeded(outcomes)
    if not done:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in failures(outcomes).items())
        raise InferlabError(
            f"no request succeeded ({kinds or 'none was sent'}); nothing to measure"
        )
    return done
