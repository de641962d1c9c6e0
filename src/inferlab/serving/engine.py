"""Real vLLM servers on loopback, each with all its processes gone when the context ends."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import httpx
from pydantic import Field

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.serving import watchdog
from inferlab.serving.unpacked import servable
from inferlab.store import open_checkpoint

HOST = "127.0.0.1"
LOG_LINES = 12
GRACE_SECONDS = 10.0


@parameters.section
class EngineParams:
    """How the server is started. `0` means "the engine's choice" where a field allows it."""

    port: Annotated[int, Field(ge=0, le=65535)]
    threads: Annotated[int, Field(ge=0)]
    kv_cache_gib: Annotated[float, Field(ge=0)]
    max_model_len: Annotated[int, Field(ge=2)]
    max_num_seqs: Annotated[int, Field(ge=1)]
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    prefix_caching: bool
    enforce_eager: bool
    int4_activation_bits: Literal[8, 16]
    tensor_parallel: Annotated[int, Field(ge=1)]
    pipeline_parallel: Annotated[int, Field(ge=1)]
    start_timeout_s: Annotated[float, Field(gt=0)]
    extra_arguments: tuple[str, ...]


@dataclass(frozen=True)
class Server:
    """One server that answers. `name` is the model's name in requests, `pid` its group's head.

    `process` is that head, which ends when the server does, and `log` what both have printed.
    """

    name: str
    url: str
    pid: int
    start_seconds: float
    process: "subprocess.Popen[bytes]" = field(repr=False)
    log: Path


@dataclass(frozen=True)
class _Launch:
    name: str
    port: int
    process: "subprocess.Popen[bytes]"
    log: Path
    started: float


@contextlib.contextmanager
def serve(
    models: Mapping[str, Path],
    engine: EngineParams,
    more_arguments: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Iterator[dict[str, Server]]:
    """Start one server for each name and checkpoint folder; yield them when all of them answer.

    A start is mostly imports, on one core a server, so starting together is the quickest way.
    `more_arguments` are those that single servers get after `engine.extra_arguments`, by name.
    Raises InferlabError when a folder holds no checkpoint, a model's context is shorter than
    `engine.max_model_len`, a port is taken (the first server gets `engine.port`, the next ones
    the ports after it; 0: any free ones), or a server dies while loading or is not ready in time.
    """
    for model in models.values():
        require_context(model, engine.max_model_len)
    ports = _ports(engine.port, len(models))
    launches: list[_Launch] = []
    with tempfile.TemporaryDirectory(prefix="inferlab-") as folder:
        try:
            for (name, model), port in zip(models.items(), ports, strict=True):
                own = (*engine.extra_arguments, *more_arguments.get(name, ()))
                settings = dataclasses.replace(engine, extra_arguments=own)
                weights = servable(name, model, Path(folder, name))
                log = Path(folder, f"{name}.log")
                launches.append(_launch(name, weights, port, settings, log))
            yield {launch.name: _ready(launch, engine.start_timeout_s) for launch in launches}
        finally:
            _stop([launch.process for launch in launches])


def require_context(model: Path, tokens: int) -> None:
    """Raise InferlabError unless `model` is a checkpoint whose context holds `tokens` tokens."""
    config = open_checkpoint(model, quantized=True).config
    context = config.get("max_position_embeddings") or config.get("n_positions") or tokens
    if tokens > context:
        raise InferlabError(
            f"{tokens} tokens of input and output do not fit {model}, whose context is {context}; "
            f"lower max_model_len and the lengths of the requests"
        )


def command(name: str, model: Path, port: int, engine: EngineParams) -> list[str]:
    """The server's command line."""
    settings = {
        "host": HOST,
        "port": port,
        "model": model,
        "served-model-name": name,
        "max-model-len": engine.max_model_len,
        "max-num-seqs": engine.max_num_seqs,
        "dtype": engine.dtype,
        "tensor-parallel-size": engine.tensor_parallel,
        "pipeline-parallel-size": engine.pipeline_parallel,
        "uvicorn-log-level": "warning",
    }
    if engine.kv_cache_gib:
        settings["kv-cache-memory-bytes"] = int(engine.kv_cache_gib * 2**30)
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *(f"--{option}={value}" for option, value in settings.items()),
        "--enable-prefix-caching" if engine.prefix_caching else "--no-enable-prefix-caching",
        *(["--enforce-eager"] if engine.enforce_eager else []),
        *engine.extra_arguments,
    ]


def environment(engine: EngineParams) -> dict[str, str]:
    """The server's environment: loopback only, no telemetry, as many threads as were asked for.

    By itself vLLM keeps one core from its CPU workers and binds them to the rest, so servers that
    stand side by side would all be bound to the same cores: binding is off, and the count is ours.
    Threads that wait sleep rather than spin: two spinning ones on cores that others use as well
    were seen to slow decoding down ten times.
    """
    added = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": HOST,
        "OMP_NUM_THREADS": str(engine.threads or max(1, len(os.sched_getaffinity(0)) - 1)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_INT4_W4A8": str(int(engine.int4_activation_bits == 8)),
    }
    if engine.tensor_parallel * engine.pipeline_parallel == 1:
        # A single worker then lives in the engine's process: one process and its imports less.
        added["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return {**os.environ, **added}


def _launch(name: str, model: Path, port: int, engine: EngineParams, log: Path) -> _Launch:
    guarded = [sys.executable, "-m", watchdog.__name__, str(GRACE_SECONDS)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*guarded, *command(name, model, port, engine)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(engine),
            start_new_session=True,
        )
    return _Launch(name, port, process, log, time.monotonic())


def _ready(launch: _Launch, timeout_s: float) -> Server:
    """Wait until the server answers. Raises InferlabError with its last log lines if it dies."""
    url = f"http://{HOST}:{launch.port}"
    while (seconds := time.monotonic() - launch.started) < timeout_s:
        if launch.process.poll() is not None:
            raise InferlabError(
                f"the server of {launch.name!r} died while loading{last_lines(launch.log)}"
            )
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5.0).is_success:
                process = launch.process
                return Server(launch.name, url, process.pid, seconds, process, launch.log)
        time.sleep(0.2)
    raise InferlabError(
        f"the server of {launch.name!r} was not ready in {timeout_s:g} s; "
        f"raise start_timeout_s{last_lines(launch.log)}"
    )


def last_lines(log: Path) -> str:
    """The end of a message about a process: the last lines of its log."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n  | ".join(["; its last log lines:", *lines])


def _stop(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Close the watchdogs' pipes, which ends the servers; then make sure of the whole groups."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS + 5.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ports(first: int, count: int) -> list[int]:
    """`count` ports from `first` on, or any free ones for 0. Raises InferlabError if one is taken.

    The probes stay bound until all are found, so that no port is handed out twice.
    """
    with contextlib.ExitStack() as stack:
        ports = []
        for wanted in [first + i if first else 0 for i in range(count)]:
            probe = stack.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, wanted))
            except OSError as error:
                raise InferlabError(
                    f"port {wanted} on {HOST} is taken ({error.strerror}); "
                    f"name a free one, or 0 for any"
                ) from None
            ports.append(int(probe.getsockname()[1]))
        return ports
