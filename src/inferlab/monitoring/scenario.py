"""The scenario: phases of load on a server, and a scrape of it at every tick meanwhile.

Load and scrapes share one event loop and one clock. Requests of a phase that are still in flight
when it ends run on into the next one, as they do in life. A scrape that does not succeed before
the next tick is a gap.
"""

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import psutil

from inferlab.errors import InferlabError
from inferlab.monitoring.settings import MonitoringParams, Phase
from inferlab.profiling.processes import Meter, Reading, descendants
from inferlab.serving.engine import Server
from inferlab.serving.load import (
    Outcome,
    Request,
    Target,
    closed_loop,
    cut_requests,
    open_loop,
)

WARM_UP_REQUESTS = 2
CHUNK = 16
"""How many prompts a client's loop cuts at a time."""


@dataclass(frozen=True)
class Sent:
    """A request's outcome, the phase it started in, and its error in words, None if none.

    Kinds: `too_long` (refused by the server as it should be), `cut` (left by its client), and
    what else the load generator tells apart.
    """

    phase: str
    outcome: Outcome
    error: str | None


@dataclass(frozen=True)
class Tick:
    """A scrape (None: it failed), the seconds until it came or was given up, and the use then."""

    text: str | None
    seconds: float
    usage: Reading


@dataclass(frozen=True)
class Observed:
    """What a scenario left: what was read at every tick, and the requests."""

    ticks: Sequence[Tick]
    sent: Sequence[Sent]


def scrape(url: str, timeout_s: float = 10.0) -> str:
    """One answer of /metrics. Raises InferlabError naming the URL when there is none."""
    try:
        answer = httpx.get(f"{url}/metrics", timeout=timeout_s, trust_env=False)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise InferlabError(
            f"nothing to scrape at {url}/metrics ({type(error).__name__}: {error}); "
            f"is the server running there?"
        ) from None
    return answer.text


def warm_up(server: Server, stream: np.ndarray, params: MonitoringParams, seed: int) -> str:
    """Send some requests, and one that is refused; what the server exports afterwards.

    The refused one is not idle: a counter that is born by the first error has no rate of it, so
    that an alert would miss it. Raises InferlabError when a good request fails.
    """
    target = Target(server.url, server.name)
    first = next(iter(params.phases.values()))
    good = cut_requests(stream, WARM_UP_REQUESTS, first.input_tokens, 8, [seed])
    for outcome in asyncio.run(closed_loop(target, good, WARM_UP_REQUESTS)):
        if outcome.error:
            raise InferlabError(f"a request of the warm-up failed: {outcome.error}")
    asyncio.run(closed_loop(target, _too_long(stream, 1, params, [seed]), 1))
    return scrape(server.url)


def run(server: Server, stream: np.ndarray, params: MonitoringParams, seed: int) -> Observed:
    """Put all phases on the server, one after the other, and watch it from start to end."""
    return asyncio.run(_run(server, stream, params, seed))


async def _run(server: Server, stream: np.ndarray, params: MonitoringParams, seed: int) -> Observed:
    seconds = sum(phase.seconds for phase in params.phases.values())
    ticks = math.ceil(seconds / params.scrape_s) + 1
    async with httpx.AsyncClient(trust_env=False) as client:
        begin = time.perf_counter()
        watched = watch(client, server.url, server.pid, params.scrape_s, ticks, begin)
        watcher = asyncio.create_task(watched)
        sent = await _load(server, stream, params, seed, begin, watcher)
        return Observed(await watcher, sent)


async def _load(
    server: Server,
    stream: np.ndarray,
    params: MonitoringParams,
    seed: int,
    begin: float,
    watcher: "asyncio.Task[list[Tick]]",
) -> list[Sent]:
    """All phases from `begin` on, until the last request has ended; by the requests' start."""
    load, start = [], 0.0
    for number, (name, phase) in enumerate(params.phases.items()):
        loops = _loops(server, stream, phase, params, [seed, number], begin + start + phase.seconds)
        load += [asyncio.create_task(_labelled(name, kind, begin, loop)) for kind, loop in loops]
        start += phase.seconds
        with _frozen(server.pid) if phase.frozen else contextlib.nullcontext():
            await asyncio.sleep(begin + start - time.perf_counter())
        for task in (watcher, *load):
            if task.done():
                task.result()  # raises what it failed by, rather than at the very end
    sent = [one for task in load for one in await task]
    return sorted(sent, key=lambda one: one.outcome.start)


async def watch(
    client: httpx.AsyncClient, url: str, pid: int, scrape_s: float, ticks: int, begin: float
) -> list[Tick]:
    """Scrape and read the use at every tick. `begin`: when tick 0 is, on time.perf_counter."""
    meter = Meter(pid)
    found = []
    for tick in range(ticks):
        await asyncio.sleep(begin + tick * scrape_s - time.perf_counter())
        start = time.perf_counter()
        text = await _scrape(client, url, begin + (tick + 1) * scrape_s - start)
        now = time.perf_counter()
        found.append(Tick(text, now - start, meter.read(now - begin)))
    return found


async def _scrape(client: httpx.AsyncClient, url: str, timeout_s: float) -> str | None:
    """The text, or None when it did not come whole and in time."""
    try:
        async with asyncio.timeout(timeout_s):
            answer = await client.get(f"{url}/metrics", timeout=None)
        return answer.text if answer.is_success else None
    except (TimeoutError, httpx.HTTPError):
        return None


def _loops(
    server: Server,
    stream: np.ndarray,
    phase: Phase,
    params: MonitoringParams,
    seed: list[int],
    end: float,
) -> list[tuple[str, Any]]:
    """The phase's loads as coroutines, each with the kind of error it is meant to bring."""
    target = Target(server.url, server.name)
    impatient = dataclasses.replace(target, timeout_s=params.cut_after_s)
    lengths = (phase.input_tokens, phase.output_tokens)

    def arrivals(rate: float) -> list[float]:
        return [n / rate for n in range(math.ceil(phase.seconds * rate))] if rate else []

    loops: list[tuple[str, Any]] = []
    if phase.clients:
        requests = _until(end, stream, *lengths, [*seed, 0])
        loops.append(("", closed_loop(target, requests, phase.clients)))
    if times := arrivals(phase.requests_per_s):
        requests = cut_requests(stream, len(times), *lengths, [*seed, 1])
        loops.append(("", open_loop(target, requests, times)))
    if times := arrivals(phase.too_long_per_s):
        requests = _too_long(stream, len(times), params, [*seed, 2])
        loops.append(("too_long", open_loop(target, requests, times)))
    if times := arrivals(phase.cut_per_s):
        lengths = (phase.input_tokens, params.cut_output_tokens)
        requests = cut_requests(stream, len(times), *lengths, [*seed, 3])
        loops.append(("cut", open_loop(impatient, requests, times)))
    return loops


def _until(
    end: float, stream: np.ndarray, input_tokens: int, output_tokens: int, seed: list[int]
) -> Iterator[Request]:
    """Requests for as long as the clock (time.perf_counter) is before `end`."""
    number = 0
    while True:
        for request in cut_requests(stream, CHUNK, input_tokens, output_tokens, [*seed, number]):
            if time.perf_counter() >= end:
                return
            yield request
        number += 1


def _too_long(
    stream: np.ndarray, count: int, params: MonitoringParams, seed: list[int]
) -> list[Request]:
    return cut_requests(stream, count, params.engine.max_model_len, 8, seed)


async def _labelled(phase: str, kind: str, begin: float, loop: Any) -> list[Sent]:
    """The outcomes of a loop, on the scenario's clock, errors by the kind they were meant as."""
    offset = time.perf_counter() - begin
    meant = {("too_long", "http_4xx"): "too_long", ("cut", "timeout"): "cut"}
    return [
        Sent(
            phase,
            dataclasses.replace(
                one,
                due=one.due + offset,
                start=one.start + offset,
                end=one.end + offset,
                chunks=tuple(chunk + offset for chunk in one.chunks),
            ),
            meant.get((kind, one.error), one.error) if one.error else None,
        )
        for one in await loop
    ]


@contextlib.contextmanager
def _frozen(pid: int) -> Iterator[None]:
    """Stop the server's processes for a while, as a machine that hangs does.

    Not their head, the watchdog: it must go on to end them if this process dies meanwhile.
    """
    processes = descendants(psutil.Process(pid))[1:]
    try:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
