"""Engines without a server, each in a process of its own, that answer like one under load."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferlab.errors import InferlabError
from inferlab.serving import in_process
from inferlab.serving.engine import GRACE_SECONDS, last_lines
from inferlab.serving.load import Outcome, Request


@dataclass(frozen=True)
class Worker:
    """One engine's process."""

    name: str
    process: "subprocess.Popen[str]"
    log: Path

    @property
    def pid(self) -> int:
        """The process."""
        return self.process.pid

    def put(self, requests: Sequence[Request]) -> list[Outcome]:
        """Hand over requests of one length at once, and wait until all are answered.

        Raises InferlabError with the last lines of its log when the process dies.
        """
        assert self.process.stdin is not None
        asked = {
            "prompts": [list(request.prompt) for request in requests],
            "new_tokens": requests[0].output_tokens,
        }
        with contextlib.suppress(BrokenPipeError):  # what follows notices that nobody answers
            print(json.dumps(asked), file=self.process.stdin, flush=True)
        times = self.answer()["times"]
        return [
            Outcome(
                due=0.0,
                start=0.0,
                end=own[-1],
                chunks=tuple(own),
                prompt_tokens=len(request.prompt),
                output_tokens=request.output_tokens,
                error=None,
            )
            for request, own in zip(requests, times, strict=True)
        ]

    def answer(self) -> dict[str, Any]:
        """Its next line; the first comes when it has loaded. Raises InferlabError as `put`."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise InferlabError(f"the process of {self.name!r} died{last_lines(self.log)}")
        return json.loads(line)


@contextlib.contextmanager
def start_workers(
    settings: Mapping[str, Mapping[str, Any]], threads: int
) -> Iterator[dict[str, Worker]]:
    """Start a process for each name and yield at once, while they load; end them afterwards.

    `settings`: of each, the engine of in_process and what it reads. The first `answer` of a worker
    tells that it has loaded. Threads that wait sleep, as the servers' do: two that spin on cores
    that others use as well slow decoding down many times.
    """
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory(prefix="inferlab-") as folder:
        try:
            for name, own in settings.items():
                whole = {**own, "threads": threads}
                workers[name] = _start(name, whole, threads, Path(folder, f"{name}.log"))
            yield workers
        finally:
            for worker in workers.values():
                _stop(worker.process)


def _start(name: str, settings: Mapping[str, Any], threads: int, log: Path) -> Worker:
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", in_process.__name__, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"},
            text=True,
        )
    return Worker(name, process, log)


def _stop(process: "subprocess.Popen[str]") -> None:
    with process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
