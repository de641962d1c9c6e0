"""The most memory that a process of its own holds, what is its own and what lies in files apart.

Anonymous memory belongs to the process and can only be swapped out. Pages of a mapped file are the
operating system's: it shares them among processes, drops them when memory is short and reads them
again. Adding the two up would hide what memory mapping is for. Linux only.
"""

import multiprocessing
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from inferlab.errors import InferlabError

KIB = 1024
SAMPLE_SECONDS = 0.002
RESIDENT = re.compile(r"^Rss:\s+(\d+)", re.MULTILINE)
FILES_EVERY = 50
"""Samples of anonymous memory for each one of the files', which takes the kernel milliseconds."""


@dataclass(frozen=True)
class Residence:
    """Bytes in memory: `anonymous` of the process alone, `file_backed` of the files looked at."""

    anonymous: int
    file_backed: int


def peak_residence(
    files: Sequence[Path],
    prepare: Callable[..., Callable[[], Any]],
    *arguments: Any,
    preload: Iterable[str] = (),
) -> tuple[Residence, Any]:
    """What an operation adds to a fresh process, each kind at its own peak, and its result.

    `prepare(*arguments)` runs in the child, imports and warms up what shall not count, and returns
    the operation; it and its arguments must be importable there. Of mapped files only `files`
    count, not the code of libraries. `preload` names modules to import once for all children. The
    child is watched from outside, every 2 ms. Raises what the operation raises, and InferlabError
    when the child dies.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    here, there = context.Pipe()
    child = context.Process(target=_work, args=(there, prepare, arguments))
    child.start()
    there.close()
    try:
        _received(here, child)
        paths = {str(file.resolve()) for file in files}
        before = anonymous_bytes(child.pid)
        here.send("go")
        peak = _watch(here, child.pid, paths)
        result = _received(here, child)
        here.send("done")
    finally:
        here.close()
        child.join()
    return Residence(peak.anonymous - before, peak.file_backed), result


def anonymous_bytes(pid: int) -> int:
    """Bytes of a process's own in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return KIB * int(re.search(r"^RssAnon:\s+(\d+)", status, re.MULTILINE)[1])


def file_bytes(pid: int, paths: set[str]) -> int:
    """Bytes of mapped files in memory, of those whose resolved paths are given."""
    content = Path(f"/proc/{pid}/smaps").read_text()
    found = (re.finditer(rf" {re.escape(path)}\n", content) for path in paths)
    # Searched for and not read line by line: the process that is watched needs the processor.
    sizes = (RESIDENT.search(content, one.end()) for each in found for one in each)
    return sum(KIB * int(size[1]) for size in sizes)


def _watch(connection: Connection, pid: int, paths: set[str]) -> Residence:
    """Peaks until the child has something to say; it then still holds what it had at the end."""
    anonymous = files = turn = 0
    while True:
        finished = connection.poll(SAMPLE_SECONDS)
        try:
            anonymous = max(anonymous, anonymous_bytes(pid))
            if finished or turn % FILES_EVERY == 0:
                files = max(files, file_bytes(pid, paths))
        except (OSError, TypeError):  # it died between two samples, which the reader will notice
            finished = True
        if finished:
            return Residence(anonymous, files)
        turn += 1


def _received(connection: Connection, child: Any) -> Any:
    try:
        answer = connection.recv()
    except EOFError:
        child.join()
        raise InferlabError(
            f"the process whose memory was measured died with exit code {child.exitcode}"
        ) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _work(connection: Connection, prepare: Callable[..., Callable[[], Any]], given: tuple) -> None:
    try:
        operation = prepare(*given)
        connection.send("ready")
        connection.recv()
        connection.send(operation())
        connection.recv()
    except (EOFError, BrokenPipeError):  # nobody watches any more
        return
    except Exception as error:
        connection.send(error)
