"""Real vLLM servers under loads to fit a step's cost to, and under traces to judge by.

Both are put on in turn and in rounds, so that a slow minute of the machine hits both. The traces
run on a server with other limits, with other lengths and at other rates than those fitted to.
"""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.run import progress
from inferlab.serving.engine import EngineParams, Server, serve
from inferlab.serving.experiment import Load, in_words, require_alive
from inferlab.serving.load import Outcome, Request, Target, closed_loop, cut_requests, open_loop
from inferlab.serving.metrics import failures
from inferlab.simulation.cost import PICOSECONDS
from inferlab.simulation.limits import Count, Limits
from inferlab.simulation.steps import Window, read_window
from inferlab.simulation.workload import Lengths, Workload, make_workload

if TYPE_CHECKING:
    from inferlab.simulation.recorder import RecordingScheduler as RecordingScheduler

SCHEDULER = "inferlab.simulation.recorder.RecordingScheduler"
WARM_UP = Load(concurrency=2, input_tokens=64, output_tokens=4)


@parameters.section
class Trace:
    """A held-out configuration: so many requests a second, of these lengths.

    One whose rate is `beyond_saturation` is judged apart: its latencies grow with its length.
    """

    name: str
    requests: Count
    rate: Annotated[float, Field(gt=0)]
    variation: Annotated[float, Field(ge=0)]
    beyond_saturation: bool
    lengths: Lengths


@parameters.section
class StepCostParams:
    """The section `step_cost`."""

    variant: str
    rounds: Count
    fitted_limits: Limits
    loads: Annotated[tuple[Load, ...], Field(min_length=1)]
    heldout_limits: Limits
    traces: tuple[Trace, ...]
    engine: EngineParams

    def __post_init__(self) -> None:
        """Raise ValueError when a request would not fit its server."""
        for load in self.loads:
            self._require("loads", load.input_tokens, load.output_tokens, self.fitted_limits)
        for trace in self.traces:
            most = trace.lengths.prompts.most, trace.lengths.outputs.most
            self._require(f"traces: {trace.name}", *most, self.heldout_limits)

    def _require(self, where: str, prompt: int, output: int, limits: Limits) -> None:
        if prompt + output > self.engine.max_model_len or not limits.fits(prompt, output):
            raise ValueError(
                f"{where}: a request of {prompt} and {output} tokens does not fit max_model_len "
                f"or the blocks of its server; shorten it or raise the limit"
            )


@dataclass(frozen=True)
class Measured:
    """Round by round: of each fitted load and each trace, its outcomes and the engine's steps."""

    loads: list[list[tuple[list[Outcome], Window]]]
    traces: list[list[tuple[list[Outcome], Window]]]


def trace_workload(trace: Trace, seed: int) -> Workload:
    """The requests of a held-out configuration, the same for the engine and the simulator."""
    return make_workload(trace.lengths, trace.requests, trace.rate, trace.variation, seed).at_rate(
        trace.rate
    )


def measure(
    model: Path, stream: np.ndarray, params: StepCostParams, seed: int, logs: Path
) -> Measured:
    """Serve `model` under both limits and put loads and traces on, in turn, in rounds.

    `stream` [tokens] is text that prompts are cut from; `logs` is a folder for the steps' logs.
    Raises InferlabError when a server does not start or a request fails.
    """
    limits = {"fitted": params.fitted_limits, "heldout": params.heldout_limits}
    found = Measured([], [])
    with _servers(model, limits, params.engine, logs) as servers:
        for name in limits:
            _put(servers[name], logs / name, _burst(WARM_UP, stream, [seed]))
        for turn in progress(range(params.rounds), "rounds"):
            loads, traces = [], []
            for place in range(max(len(params.loads), len(params.traces))):
                if place < len(params.loads):
                    work = _burst(params.loads[place], stream, [seed, turn, place])
                    loads.append(_put(servers["fitted"], logs / "fitted", work))
                if place < len(params.traces):
                    work = _replay(params.traces[place], stream, seed, turn)
                    traces.append(_put(servers["heldout"], logs / "heldout", work))
            found.loads.append(loads)
            found.traces.append(traces)
    return found


@dataclass(frozen=True)
class _Work:
    """Requests, and their arrivals in seconds or the clients of a closed loop."""

    requests: Sequence[Request]
    arrivals: Sequence[float] | None = None
    clients: int = 1


def _burst(load: Load, stream: np.ndarray, seed: list[int]) -> _Work:
    lengths = load.input_tokens, load.output_tokens
    return _Work(cut_requests(stream, load.concurrency, *lengths, seed), clients=load.concurrency)


def _replay(trace: Trace, stream: np.ndarray, seed: int, turn: int) -> _Work:
    """The same arrivals and lengths in every round, but fresh text."""
    workload = trace_workload(trace, seed)
    lengths = zip(workload.prompts.tolist(), workload.outputs.tolist(), strict=True)
    requests = [
        cut_requests(stream, 1, prompt, output, [seed, turn, place])[0]
        for place, (prompt, output) in enumerate(lengths)
    ]
    return _Work(requests, (workload.arrivals / PICOSECONDS).tolist())


def _put(server: Server, log: Path, work: _Work) -> tuple[list[Outcome], Window]:
    target = Target(server.url, server.name)
    begin = time.perf_counter()
    if work.arrivals is None:
        outcomes = asyncio.run(closed_loop(target, work.requests, work.clients))
    else:
        outcomes = asyncio.run(open_loop(target, work.requests, work.arrivals))
    require_alive(server, outcomes)
    if failed := failures(outcomes):
        raise InferlabError(f"the server of {server.name!r} failed requests: {in_words(failed)}")
    return outcomes, read_window(log, begin, time.perf_counter())


@contextlib.contextmanager
def _servers(
    model: Path, limits: Mapping[str, Limits], engine: EngineParams, logs: Path
) -> Iterator[dict[str, Server]]:
    """One server for each set of limits, started together."""
    contexts = {
        name: serve({name: model}, with_limits(engine, one, logs / name))
        for name, one in limits.items()
    }
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(contexts)) as pool:
        entering = {name: pool.submit(one.__enter__) for name, one in contexts.items()}
        for name, one in contexts.items():
            if entering[name].exception() is None:
                stack.push(one)
        yield {name: entered.result()[name] for name, entered in entering.items()}


def with_limits(engine: EngineParams, limits: Limits, log: Path) -> EngineParams:
    """The engine's parameters for a server that keeps these limits and logs its steps.

    vLLM keeps one block of its pool for itself, hence one more.
    """
    arguments = [
        f"--max-num-batched-tokens={limits.token_budget}",
        f"--num-gpu-blocks-override={limits.blocks + 1}",
        f"--block-size={limits.block_size}",
        f"--scheduler-cls={SCHEDULER}",
        f"--additional-config={json.dumps({'step_log': str(log)})}",
        "--enable-chunked-prefill" if limits.chunked_prefill else "--no-enable-chunked-prefill",
        *([f"--long-prefill-token-threshold={limits.chunk}"] if limits.chunk else []),
    ]
    return dataclasses.replace(
        engine,
        port=0,
        max_num_seqs=limits.max_num_seqs,
        prefix_caching=False,
        extra_arguments=(*engine.extra_arguments, *arguments),
    )
