"""A load generator: streamed completions over HTTP, in a closed loop, steady or not, or at times.

The prompts are token ids, so that their length is exact; decoding is greedy and never stops early,
so that the output's length is too. Token counts come from the engine's usage report, since one
chunk of the stream may carry several tokens. A request that fails is kept with its kind of error
and no latency is ever computed from it.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import numpy as np

from inferlab.errors import InferlabError

ErrorKind = Literal["connect", "timeout", "http_4xx", "http_5xx", "cut", "short", "other"]


@dataclass(frozen=True)
class Target:
    """Where requests go: the server's root URL and the model's name there."""

    url: str
    model: str
    timeout_s: float = 300.0


@dataclass(frozen=True)
class Request:
    """`prompt`: token ids, `output_tokens`: how many to generate."""

    prompt: Sequence[int]
    output_tokens: int


@dataclass(frozen=True)
class Outcome:
    """What became of one request. Times are seconds since the load began.

    `due` is when it should have started and `start` when it did (the same in a closed loop);
    `chunks` are the arrivals of the stream's chunks that carry tokens, the first of them the first
    token. `error` is None for a request that got every token it asked for:

    | connect | no connection | timeout | not finished in time |
    | http_4xx, http_5xx | refused | cut | the stream broke off |
    | short | fewer tokens than asked for | other | an error in the stream, or none of these |
    """

    due: float
    start: float
    end: float
    chunks: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    error: ErrorKind | None


def cut_requests(
    stream: np.ndarray, count: int, input_tokens: int, output_tokens: int, seed: Sequence[int]
) -> list[Request]:
    """`count` requests whose prompts are cut from `stream` [tokens] at random places.

    Raises InferlabError if the stream is not longer than a prompt.
    """
    if len(stream) <= input_tokens:
        raise InferlabError(
            f"a prompt of {input_tokens} tokens cannot be cut from {len(stream)} tokens of text; "
            f"shorten input_tokens or prepare more text"
        )
    # numpy takes no notice of zeros at the end of a seed, so its length ends it.
    rng = np.random.default_rng([*seed, len(seed)])
    starts = rng.integers(0, len(stream) - input_tokens, count)
    return [Request(stream[at : at + input_tokens].tolist(), output_tokens) for at in starts]


async def closed_loop(
    target: Target, requests: Iterable[Request], concurrency: int
) -> list[Outcome]:
    """`concurrency` clients, each sending its next request when its last one has ended.

    The next request is taken when a client is free, so that a generator may end the load by time.
    """
    waiting = iter(requests)
    outcomes: list[Outcome] = []
    async with _client() as client:
        begin = time.perf_counter()

        async def work() -> None:
            for request in waiting:
                outcomes.append(await _send(client, target, request, begin))

        await asyncio.gather(*(work() for _ in range(concurrency)))
    return outcomes


async def steady_loop(
    target: Target, requests: Sequence[Request], others: Iterator[Request], concurrency: int
) -> list[Outcome]:
    """The outcomes of `requests` in a closed loop that is full and out of step all the while.

    Clients that start together and ask for the same lengths stay together: a burst, wave after
    wave. So each first sends one of `others` that is cut to another share of its tokens, more of
    them until all clients have had a first token, then its share of `requests`, and again others,
    without an end, until the last of `requests` is answered. What is then in flight is dropped. A
    lone client sends `requests` alone.
    """
    if concurrency == 1:
        return await closed_loop(target, requests, 1)
    waiting = iter(requests)
    outcomes: list[Outcome] = []
    begun: set[int] = set()
    async with _client() as client:
        begin = time.perf_counter()

        async def work(place: int) -> None:
            first = next(others)
            cut = max(1, first.output_tokens * (place + 1) // concurrency)
            short = Request(first.prompt, cut)
            await _send(client, target, short, begin, on_token=lambda: begun.add(place))
            begun.add(place)
            while len(outcomes) < len(requests):
                request = next(waiting, None) if len(begun) == concurrency else None
                outcome = await _send(client, target, request or next(others), begin)
                if request:
                    outcomes.append(outcome)

        clients = [asyncio.create_task(work(place)) for place in range(concurrency)]
        ended, busy = await asyncio.wait(clients, return_when=asyncio.FIRST_COMPLETED)
        for one in busy:
            one.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        for one in ended:
            one.result()
    return outcomes


async def open_loop(
    target: Target, requests: Sequence[Request], arrivals: Sequence[float]
) -> list[Outcome]:
    """Send each request at its arrival (seconds from now), however many are still in flight."""
    async with _client() as client:
        begin = time.perf_counter()

        async def send(request: Request, arrival: float) -> Outcome:
            await asyncio.sleep(arrival - (time.perf_counter() - begin))
            return await _send(client, target, request, begin, arrival)

        pairs = zip(requests, arrivals, strict=True)
        return list(await asyncio.gather(*(send(*pair) for pair in pairs)))


def _client() -> httpx.AsyncClient:
    """A client that never queues a request itself, and keeps no connection the server closes."""
    return httpx.AsyncClient(
        limits=httpx.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0
        ),
        timeout=httpx.Timeout(None),
        trust_env=False,
    )


async def _send(
    client: httpx.AsyncClient,
    target: Target,
    request: Request,
    begin: float,
    due: float | None = None,
    on_token: Callable[[], None] = lambda: None,
) -> Outcome:
    start = time.perf_counter() - begin
    chunks: list[float] = []
    usage: dict[str, int] = {}
    error: ErrorKind | None = None
    try:
        async with asyncio.timeout(target.timeout_s):
            async for event in _events(client, target, request):
                if event.get("choices"):
                    on_token()
                    chunks.append(time.perf_counter() - begin)
                usage = event.get("usage") or usage
        if usage.get("completion_tokens", 0) < request.output_tokens:
            error = "short"
    except (TimeoutError, httpx.HTTPError, _StreamError) as failure:
        error = _kind(failure)
    return Outcome(
        due=start if due is None else due,
        start=start,
        end=time.perf_counter() - begin,
        chunks=tuple(chunks),
        prompt_tokens=usage.get("prompt_tokens", 0),
        output_tokens=usage.get("completion_tokens", 0),
        error=error,
    )


class _StreamError(Exception):
    """The stream carried an error, or ended without its end mark. `args[0]` is the kind."""


async def _events(
    client: httpx.AsyncClient, target: Target, request: Request
) -> AsyncIterator[dict[str, Any]]:
    """The server-sent events of one completion, up to the end mark."""
    body = {
        "model": target.model,
        "prompt": list(request.prompt),
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with client.stream("POST", f"{target.url}/v1/completions", json=body) as response:
        response.raise_for_status()
        rest = b""
        async for data in response.aiter_raw():
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                payload = event.removeprefix(b"data: ")
                if payload == b"[DONE]":
                    return
                content = json.loads(payload)
                if "error" in content:
                    raise _StreamError("other")
                yield content
    raise _StreamError("cut")


def _kind(failure: Exception) -> ErrorKind:
    match failure:
        case TimeoutError() | httpx.TimeoutException():
            return "timeout"
        case httpx.HTTPStatusError(response=response):
            return "http_4xx" if response.status_code < 500 else "http_5xx"
        case httpx.ConnectError():
            return "connect"
        case httpx.NetworkError() | httpx.ProtocolError():
            return "cut"
        case _StreamError(args=(kind,)):
            return kind
        case _:
            return "other"
