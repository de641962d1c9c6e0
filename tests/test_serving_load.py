"""The load generator against a small server whose answers and faults are known."""

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator

import numpy as np
import pytest

from inferlab.errors import InferlabError
from inferlab.serving import load
from inferlab.serving.load import Request, Target

OK, CUT, CUT_CHUNKED, BAD, BROKEN, STALLS, SHORT, ERROR_EVENT = range(8)
"""The first token of a prompt tells the server below how to answer it."""


class FakeServer:
    """Speaks just enough HTTP; counts the requests that are in flight at once."""

    def __init__(self, seconds_per_token: float = 0.001) -> None:
        self.seconds_per_token = seconds_per_token
        self.in_flight = self.most_in_flight = 0
        self.bodies: list[dict[str, object]] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self.bodies.append(body)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            await self.answer(writer, body["prompt"][0], body["prompt"], body["max_tokens"])
            self.in_flight -= 1
            await writer.drain()
        writer.close()

    async def answer(
        self, writer: asyncio.StreamWriter, fault: int, prompt: list[int], tokens: int
    ) -> None:
        status = {BAD: "400 Bad Request", BROKEN: "503 Service Unavailable"}.get(fault, "200 OK")
        framing = "transfer-encoding: chunked" if fault == CUT_CHUNKED else "connection: close"
        writer.write(f"HTTP/1.1 {status}\r\n{framing}\r\n\r\n".encode())
        if status != "200 OK":
            return
        for _ in range(tokens // 2 if fault in (CUT, CUT_CHUNKED) else tokens):
            event = self.event({"choices": [{"text": "a"}]})
            if fault == CUT_CHUNKED:
                event = f"{len(event):x}\r\n".encode() + event + b"\r\n"
            # In two halves, since a network may split an event anywhere.
            writer.write(event[:9])
            await writer.drain()
            await asyncio.sleep(self.seconds_per_token)
            writer.write(event[9:])
        if fault == STALLS:
            await asyncio.sleep(60)
        if fault == ERROR_EVENT:
            writer.write(self.event({"error": {"message": "engine is dead"}}))
        if fault in (OK, SHORT):
            made = tokens - 1 if fault == SHORT else tokens
            usage = {"prompt_tokens": len(prompt), "completion_tokens": made}
            writer.write(self.event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")

    @staticmethod
    def event(content: dict[str, object]) -> bytes:
        return b"data: " + json.dumps(content).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def running(server: FakeServer) -> AsyncIterator[Target]:
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0, backlog=512)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        yield Target(f"http://127.0.0.1:{port}", "tiny", timeout_s=3.0)
        listener.close()


def closed(server: FakeServer, requests: list[Request], concurrency: int) -> list[load.Outcome]:
    async def run() -> list[load.Outcome]:
        async with running(server) as target:
            return await load.closed_loop(target, requests, concurrency)

    return asyncio.run(run())


def test_times_and_token_counts_of_a_request() -> None:
    server = FakeServer(seconds_per_token=0.01)
    (outcome,) = closed(server, [Request([OK, 1, 2], 4)], 1)
    assert outcome.error is None
    assert (outcome.prompt_tokens, outcome.output_tokens) == (3, 4)
    assert len(outcome.chunks) == 4
    times = [outcome.start, *outcome.chunks, outcome.end]
    assert times == sorted(times)
    assert outcome.chunks[-1] > outcome.chunks[0]
    assert outcome.due == outcome.start
    body = server.bodies[0]
    assert body["prompt"] == [OK, 1, 2]
    assert body["ignore_eos"] is True and body["temperature"] == 0
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (CUT, "cut"),
        (CUT_CHUNKED, "cut"),
        (BAD, "http_4xx"),
        (BROKEN, "http_5xx"),
        (STALLS, "timeout"),
        (SHORT, "short"),
        (ERROR_EVENT, "other"),
    ],
)
def test_each_fault_has_its_kind_and_spares_the_others(fault: int, kind: str) -> None:
    requests = [Request([OK], 4), Request([fault], 4), Request([OK], 4)]
    outcomes = closed(FakeServer(), requests, 1)
    assert [outcome.error for outcome in outcomes] == [None, kind, None]


def test_nobody_listens() -> None:
    async def run() -> list[load.Outcome]:
        async with running(FakeServer()) as target:
            pass
        return await load.closed_loop(target, [Request([OK], 1)] * 2, 2)

    assert Counter(outcome.error for outcome in asyncio.run(run())) == {"connect": 2}


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_closed_loop_keeps_exactly_so_many_in_flight(concurrency: int) -> None:
    server = FakeServer()
    outcomes = closed(server, [Request([OK], 3)] * 16, concurrency)
    assert len(outcomes) == 16
    assert server.most_in_flight == concurrency


@pytest.mark.parametrize(("concurrency", "measured"), [(1, 3), (3, 3), (8, 11)])
def test_steady_loop_measures_clients_that_are_busy_and_out_of_step(
    concurrency: int, measured: int
) -> None:
    server = FakeServer(seconds_per_token=0.01)
    requests = [Request([OK, 1], 8)] * measured

    async def run() -> list[load.Outcome]:
        async with running(server) as target:
            others = itertools.repeat(Request([OK, 2], 8))
            return await load.steady_loop(target, requests, others, concurrency)

    outcomes = asyncio.run(run())
    assert [(one.error, one.output_tokens) for one in outcomes] == [(None, 8)] * measured
    assert server.most_in_flight == concurrency
    sent = [(body["prompt"][1], body["max_tokens"]) for body in server.bodies]
    assert sent.count((1, 8)) == measured
    if concurrency == 1:
        assert len(sent) == measured
        return
    assert sorted(tokens for _, tokens in sent[:concurrency]) == [
        max(1, 8 * (place + 1) // concurrency) for place in range(concurrency)
    ]
    assert [mark for mark, _ in sent].index(1) >= concurrency
    starts = sorted(one.start for one in outcomes)
    assert starts[-1] - starts[0] > 0.02


def test_steady_loop_ends_when_nobody_listens() -> None:
    async def run() -> list[load.Outcome]:
        async with running(FakeServer()) as target:
            pass
        others = itertools.repeat(Request([OK], 4))
        return await load.steady_loop(target, [Request([OK], 4)] * 2, others, 2)

    assert Counter(one.error for one in asyncio.run(run())) == {"connect": 2}


def test_open_loop_starts_at_the_arrivals_whatever_is_in_flight() -> None:
    arrivals = [0.0, 0.2, 0.05, 0.1]
    server = FakeServer(seconds_per_token=0.1)

    async def run() -> list[load.Outcome]:
        async with running(server) as target:
            return await load.open_loop(target, [Request([OK], 4)] * 4, arrivals)

    outcomes = asyncio.run(run())
    assert [outcome.due for outcome in outcomes] == arrivals
    assert all(outcome.start - outcome.due >= 0 for outcome in outcomes)
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert server.most_in_flight == 4


def test_more_than_a_hundred_requests_do_not_queue_in_the_client() -> None:
    server = FakeServer(seconds_per_token=0.5)
    outcomes = closed(server, [Request([OK], 1)] * 130, 130)
    assert [outcome.error for outcome in outcomes] == [None] * 130
    assert server.most_in_flight == 130


def test_prompts_are_cut_from_the_stream_and_follow_from_the_seed() -> None:
    stream = np.arange(1000)
    requests = load.cut_requests(stream, 5, 16, 8, [0, 1])
    for request in requests:
        first = request.prompt[0]
        assert list(request.prompt) == list(range(first, first + 16))
        assert request.output_tokens == 8
    assert load.cut_requests(stream, 5, 16, 8, [0, 1]) == requests
    assert load.cut_requests(stream, 5, 16, 8, [0, 2]) != requests


def test_stream_shorter_than_a_prompt() -> None:
    with pytest.raises(InferlabError, match="prompt of 100 tokens cannot be cut from 100 tokens"):
        load.cut_requests(np.arange(100), 1, 100, 1, [0])


def test_zeros_at_the_end_of_a_seed_count() -> None:
    stream = np.arange(1000)
    prompts = [
        tuple(load.cut_requests(stream, 1, 4, 2, seed)[0].prompt)
        for seed in ([0], [0, 0], [0, 0, 0])
    ]
    assert len(set(prompts)) == 3
