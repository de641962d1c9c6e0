"""Runs one command for as long as the process that started it lives, and not a moment longer.

The starter holds the other end of this process's standard input. However the starter ends,
SIGKILL included, the kernel closes that pipe, and the command goes with it. Run as
`python -m inferlab.serving.watchdog <grace seconds> <command> ...`, at the head of a process group
of its own.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys

POLL_SECONDS = 0.2


def main(grace: float, command: list[str]) -> None:
    """Run `command` until it ends or standard input closes; then end the whole process group.

    SIGTERM goes first and SIGKILL after `grace` seconds. The group is this process, the command
    and whatever the command left behind, so this function does not return.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while process.poll() is None and not _closed():
        pass
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    else:
        print(f"exit status {process.returncode}", flush=True)
    os.killpg(0, signal.SIGKILL)


def _closed() -> bool:
    """Whether standard input reached its end; waits a moment for it."""
    readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
