"""Which loads are put on the servers, and in which order.

One axis at a time around a middle point: concurrency, input length, output length. Their loads are
steady: a closed loop whose clients are all busy and out of step (load.steady_loop). Beside them two
bursts, whose clients start together: prompts that are answered by a single token give the rate of
prefill, and one wave of short prompts that of decoding. Each load is put on one variant after the
other before the next load's turn, and all of it is repeated in rounds, so that a slow minute of
the machine hits every variant alike. Within a round all variants get the same prompts, and no
prompt comes twice.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.run import progress
from inferlab.serving.engine import EngineParams, Server, last_lines
from inferlab.serving.load import (
    Outcome,
    Request,
    Target,
    closed_loop,
    cut_requests,
    steady_loop,
)
from inferlab.serving.metrics import Objective, failures

Axis = Literal["concurrency", "input_tokens", "output_tokens"]
AXES: tuple[Axis, ...] = ("concurrency", "input_tokens", "output_tokens")
Count = Annotated[int, Field(ge=1)]
Some = Field(min_length=1)
WARM_UP_TOKENS = 8
END_SECONDS = 2.0
"""A connection breaks a moment before the process that held it has ended."""


@parameters.section
class Load:
    """So many clients, each with one request in flight, of these lengths in tokens."""

    concurrency: Count
    input_tokens: Count
    output_tokens: Count


@parameters.section
class ServeBenchmarkParams:
    """The section `serve_benchmark`."""

    variants: Annotated[tuple[str, ...], Some]
    concurrency: Annotated[tuple[Count, ...], Some]
    input_tokens: Annotated[tuple[Count, ...], Some]
    output_tokens: Annotated[tuple[Annotated[int, Field(ge=2)], ...], Some]
    middle: Load
    prefill: Load
    decode: Load
    fewest_requests: Count
    requests_per_client: Count
    rounds: Count
    length_rounds: Count
    scored_windows: Annotated[int, Field(ge=0)]
    objective: Objective
    engine: EngineParams

    def __post_init__(self) -> None:
        """Raise ValueError when the loads do not fit each other or the engine's limit."""
        if min(self.middle.output_tokens, self.decode.output_tokens) < 2:
            raise ValueError("middle.output_tokens and decode.output_tokens must be at least 2")
        if self.prefill.output_tokens != 1:
            raise ValueError("prefill.output_tokens must be 1")
        loads = [put.load for put in plan(self)]
        longest = max(load.input_tokens + load.output_tokens for load in loads)
        if longest > self.engine.max_model_len:
            raise ValueError(
                f"a request of {longest} tokens of input and output is longer than "
                f"engine.max_model_len, {self.engine.max_model_len}; shorten it or raise the limit"
            )


@dataclasses.dataclass(frozen=True)
class Put:
    """A load and how it is put on: steady, or its clients' first requests as a burst."""

    load: Load
    steady: bool = True

    @property
    def clients(self) -> int | None:
        """Those that were busy all the while, as `metrics.duration` wants it."""
        return self.load.concurrency if self.steady else None


Outcomes = dict[tuple[str, Put], list[list[Outcome]]]
"""By variant and load, what became of the requests of each round."""


def along(axis: Axis, params: ServeBenchmarkParams) -> list[Put]:
    """The loads of one axis, in rising order; the others stay at the middle point."""
    values = sorted(set(getattr(params, axis)))
    return [Put(dataclasses.replace(params.middle, **{axis: value})) for value in values]


def bursts(params: ServeBenchmarkParams) -> tuple[Put, Put]:
    """Those that the rates of prefill and of decoding come from."""
    return Put(params.prefill, steady=False), Put(params.decode, steady=False)


def plan(params: ServeBenchmarkParams) -> dict[Put, int]:
    """Every load once, and its number of rounds: that of the axis that asks for most."""
    rounds = dict.fromkeys(along("concurrency", params), params.rounds)
    for put in (*along("input_tokens", params), *along("output_tokens", params), *bursts(params)):
        rounds.setdefault(put, params.length_rounds)
    return rounds


def measure(
    servers: Mapping[str, Server], stream: np.ndarray, params: ServeBenchmarkParams, seed: int
) -> Outcomes:
    """Warm every server up, then put every load on each of them, round by round.

    `stream` [tokens] is the text that prompts are cut from, at places that follow from `seed`.
    Raises InferlabError when a request of the warm-up fails, or a server ends.
    """
    warm_up = dataclasses.replace(params.middle, output_tokens=WARM_UP_TOKENS)
    for name, server in servers.items():
        _check_warm(name, _run(server, Put(warm_up, False), stream, params, [seed]))
    turns = [
        (turn, place, put)
        for turn in range(max(params.rounds, params.length_rounds))
        for place, (put, rounds) in enumerate(plan(params).items())
        if turn < rounds
    ]
    outcomes: Outcomes = {(name, put): [] for name in servers for put in plan(params)}
    for turn, place, put in progress(turns, "loads"):
        for name, server in servers.items():
            done = _run(server, put, stream, params, [seed, turn, place])
            outcomes[name, put].append(done)
    return outcomes


def require_alive(server: Server, outcomes: Sequence[Outcome]) -> None:
    """Raise InferlabError, with the log's last lines, if requests failed because the server ended.

    What a living server refuses or cuts is counted, and is the caller's to judge.
    """
    failed = failures(outcomes)
    if not failed:
        return
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(END_SECONDS)
        raise InferlabError(
            f"the server of {server.name!r} died, and of {len(outcomes)} requests failed "
            f"{in_words(failed)}{last_lines(server.log)}"
        )


def in_words(failed: Counter[str]) -> str:
    """`3 cut, 1 connect`."""
    return ", ".join(f"{count} {kind}" for kind, count in failed.items())


def _run(
    server: Server, put: Put, stream: np.ndarray, params: ServeBenchmarkParams, seed: list[int]
) -> list[Outcome]:
    load, target = put.load, Target(server.url, server.name)
    count = load.concurrency
    if put.steady:
        count = max(params.fewest_requests, params.requests_per_client * count)
    lengths = load.input_tokens, load.output_tokens
    requests = cut_requests(stream, count, *lengths, seed)
    if put.steady:
        others = _endless(stream, load, seed)
        outcomes = asyncio.run(steady_loop(target, requests, others, load.concurrency))
    else:
        outcomes = asyncio.run(closed_loop(target, requests, load.concurrency))
    require_alive(server, outcomes)
    return outcomes


def _endless(stream: np.ndarray, load: Load, seed: list[int]) -> Iterator[Request]:
    """Requests of the load's lengths that no figure is computed from."""
    lengths = load.input_tokens, load.output_tokens
    for number in itertools.count():
        yield from cut_requests(stream, load.concurrency, *lengths, [*seed, number])


def _check_warm(name: str, outcomes: list[Outcome]) -> None:
    """Raise InferlabError when requests of the warm-up failed: what follows would fail too."""
    if failed := failures(outcomes):
        kinds = in_words(failed)
        raise InferlabError(f"the server of {name!r} failed requests of the warm-up: {kinds}")
