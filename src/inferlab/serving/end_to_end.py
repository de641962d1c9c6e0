"""33.29: whole configurations, each an engine, a checkpoint and a way to decode, side by side.

In each round every configuration has its turn with the same fresh prompts: requests of one client
first, then as many clients at once as asked for. vLLM serves them over HTTP. transformers and the
lean runtime have no server: they take the requests of all clients as one batch, and with
speculation one after the other. While one is measured the others wait, asleep.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from inferlab import params as parameters
from inferlab.errors import InferlabError, suggestion
from inferlab.profiling.processes import Usage, Watch
from inferlab.run import progress
from inferlab.serving.engine import EngineParams, Server, require_context, serve
from inferlab.serving.experiment import in_words, require_alive
from inferlab.serving.load import Outcome, Request, Target, closed_loop, cut_requests
from inferlab.serving.metrics import failures
from inferlab.serving.worker import Worker, start_workers

WARM_UP_TOKENS = 4
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]


@parameters.section
class Configuration:
    """What would be deployed: `variant` is a checkpoint under models/."""

    engine: Literal["transformers", "vllm", "runtime"]
    variant: str
    speculative: bool

    def __post_init__(self) -> None:
        """Raise ValueError for an engine that is not measured with speculation."""
        if self.speculative and self.engine == "transformers":
            raise ValueError("speculative must be false with transformers; use vllm or runtime")


@parameters.section
class Speculation:
    """Prompt lookup: `length` tokens that followed the last `shortest` to `longest` before."""

    length: Annotated[int, Field(ge=1, le=7)]
    longest: Count
    shortest: Count

    def __post_init__(self) -> None:
        """Raise ValueError when nothing could match."""
        if self.shortest > self.longest:
            raise ValueError(
                f"shortest must be at most longest; got {self.shortest} and {self.longest}"
            )


@parameters.section
class EndToEndParams:
    """The section `end_to_end`. Ratios are to the configuration named `reference`."""

    configurations: Annotated[dict[Name, Configuration], Field(min_length=2)]
    reference: str
    speculation: Speculation
    input_tokens: Count
    output_tokens: Annotated[int, Field(ge=2)]
    single_requests: Count
    clients: Annotated[int, Field(ge=2)]
    rounds: Count
    device: Literal["cpu", "cuda"]
    engine: EngineParams

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown reference, and a request that would not fit a server."""
        if self.reference not in self.configurations:
            raise ValueError(
                f"reference {self.reference!r} is no configuration; "
                f"{suggestion(self.reference, self.configurations)}"
            )
        if self.tokens > self.engine.max_model_len:
            raise ValueError(
                f"a request of {self.tokens} tokens of input and output is longer than "
                f"engine.max_model_len, {self.engine.max_model_len}; shorten it or raise the limit"
            )

    @property
    def tokens(self) -> int:
        """Of a request, input and output."""
        return self.input_tokens + self.output_tokens

    def of_engine(self, *engines: str) -> dict[str, Configuration]:
        """The configurations on these engines."""
        return {name: own for name, own in self.configurations.items() if own.engine in engines}


@dataclass(frozen=True)
class Running:
    """A configuration that is ready. `put` sends requests all at once and waits for them."""

    pid: int
    put: Callable[[Sequence[Request]], list[Outcome]]


@dataclass(frozen=True)
class Round:
    """Of one configuration: requests of one client, of all clients at once, and what these took."""

    single: list[Outcome]
    together: list[Outcome]
    usage: Usage


@contextlib.contextmanager
def start(
    params: EndToEndParams, folders: Mapping[str, Path], threads: int
) -> Iterator[dict[str, Running]]:
    """Start every configuration, all at once; yield them, warm, in the order of the parameters.

    `folders`: the checkpoint of each; `threads`: of each, unless `params.engine` says it. Raises
    InferlabError when a folder holds no checkpoint, a context is too short, or one does not start.
    """
    for folder in folders.values():
        require_context(folder, params.tokens)
    engine = replace(params.engine, threads=params.engine.threads or threads)
    served = {name: folders[name] for name in params.of_engine("vllm")}
    own = {
        name: _worker_settings(configuration, folders[name], params)
        for name, configuration in params.of_engine("transformers", "runtime").items()
    }
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(start_workers(own, engine.threads))
        servers = stack.enter_context(serve(served, engine, _more_arguments(params)))
        running = {name: _running_worker(worker) for name, worker in workers.items()}
        running |= {name: _running_server(server) for name, server in servers.items()}
        yield {name: running[name] for name in params.configurations}


def measure(
    running: Mapping[str, Running], stream: np.ndarray, params: EndToEndParams, seed: int
) -> dict[str, list[Round]]:
    """Warm everything up, then give each configuration its turn, round by round.

    `stream` [tokens] is the text that prompts are cut from. Raises InferlabError when a request of
    the warm-up fails, or a configuration's process dies.
    """
    for name, one in running.items():
        outcomes = one.put(_requests(stream, params.clients, params, WARM_UP_TOKENS, [seed, 0]))
        if failed := failures(outcomes):
            raise InferlabError(f"{name!r} failed requests of the warm-up: {in_words(failed)}")
    found: dict[str, list[Round]] = {name: [] for name in running}
    turns = [(turn, name) for turn in range(1, params.rounds + 1) for name in running]
    for turn, name in progress(turns, "configurations"):
        found[name].append(_round(running[name], stream, params, [seed, turn]))
    return found


def _round(running: Running, stream: np.ndarray, params: EndToEndParams, seed: list[int]) -> Round:
    output = params.output_tokens
    singles = _requests(stream, params.single_requests, params, output, [*seed, 0])
    crowd = _requests(stream, params.clients, params, output, [*seed, 1])
    single = [outcome for request in singles for outcome in running.put([request])]
    watch = Watch(running.pid)
    together = running.put(crowd)
    return Round(single, together, watch.stop())


def _requests(
    stream: np.ndarray, count: int, params: EndToEndParams, output_tokens: int, seed: list[int]
) -> list[Request]:
    return cut_requests(stream, count, params.input_tokens, output_tokens, seed)


def _worker_settings(
    configuration: Configuration, folder: Path, params: EndToEndParams
) -> dict[str, Any]:
    settings: dict[str, Any] = {"engine": configuration.engine, "model": str(folder)}
    if configuration.speculative:
        look = params.speculation
        kept = {"length": look.length, "longest": look.longest, "shortest": look.shortest}
        return settings | {"engine": "speculative", **kept}
    return settings | {"device": params.device}


def _more_arguments(params: EndToEndParams) -> dict[str, list[str]]:
    """What the speculative ones of the servers are started with."""
    method = {
        "method": "ngram",
        "num_speculative_tokens": params.speculation.length,
        "prompt_lookup_max": params.speculation.longest,
        "prompt_lookup_min": params.speculation.shortest,
    }
    return {
        name: [f"--speculative-config={json.dumps(method)}"]
        for name, configuration in params.of_engine("vllm").items()
        if configuration.speculative
    }


def _running_worker(worker: Worker) -> Running:
    worker.answer()
    return Running(worker.pid, worker.put)


def _running_server(server: Server) -> Running:
    target = Target(server.url, server.name)

    def put(requests: Sequence[Request]) -> list[Outcome]:
        outcomes = asyncio.run(closed_loop(target, requests, len(requests)))
        require_alive(server, outcomes)
        return outcomes

    return Running(server.pid, put)
