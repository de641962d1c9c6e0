"""The context a stage runs in: parameters, seed, threads, log, clock, and publishing.

A stage writes every output aside and the context renames it into place once the whole stage has
succeeded, so that nothing half-written is ever taken for finished.
"""

import contextlib
import csv
import errno
import json
import logging
import math
import os
import random
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from tqdm import tqdm

from inferlab import params as parameters
from inferlab.errors import InferlabError

Config = TypeVar("Config")
Item = TypeVar("Item")
log = logging.getLogger("inferlab")


@parameters.section
class RunParams:
    """The section `run`, which every stage reads."""

    seed: int
    threads: int


@dataclass
class Run(Generic[Config]):
    """What a stage is handed. `params` is its own section, already checked."""

    name: str
    key: str | None
    params: Config
    seed: int
    threads: int
    started: float = field(default_factory=time.perf_counter)
    _staged: dict[Path, Path] = field(default_factory=dict)
    _timing: dict[str, float] = field(default_factory=dict)

    def output(self, path: str) -> Path:
        """Where to write the output `path` for now: a sibling that is renamed on success."""
        final = Path(path)
        aside = final.with_name(f".{final.name}.partial")
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove(aside)
        self._staged[final] = aside
        return aside

    def folder(self, path: str) -> Path:
        """Like `output`, for a folder, which is made."""
        aside = self.output(path)
        aside.mkdir()
        return aside

    def metrics(self, path: str, values: Mapping[str, float]) -> None:
        """Write a flat metrics file of finite numbers. Raises InferlabError on anything else."""
        self.output(path).write_text(json.dumps(checked(values, path), indent=2) + "\n")

    def table(self, path: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows (all with the same columns) as CSV, the data of a DVC plot."""
        if not rows:
            raise InferlabError(f"{path}: a table without rows")
        with self.output(path).open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    def timing(self, **values: float) -> None:
        """Add what the stage measures of speed to `metrics/timing/<stage>[/<key>].json`."""
        self._timing.update(values)

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Record the seconds that the body takes as `<what>_seconds`."""
        start = time.perf_counter()
        yield
        self.timing(**{f"{what}_seconds": round(time.perf_counter() - start, 3)})

    def seconds(self, what: str) -> float:
        """What `timed(what)` has measured."""
        return self._timing[f"{what}_seconds"]

    def publish(self) -> None:
        """Rename everything that was written aside into place."""
        self._timing["seconds"] = round(time.perf_counter() - self.started, 3)
        name = f"{self.name}/{self.key}" if self.key else self.name
        self.metrics(f"metrics/timing/{name}.json", self._timing)
        missing = [str(final) for final, aside in self._staged.items() if not aside.exists()]
        if missing:
            raise InferlabError(f"stage {self.name} did not write {', '.join(missing)}")
        for final, aside in self._staged.items():
            _remove(final)
            aside.rename(final)

    def discard(self) -> None:
        """Remove everything that was written aside."""
        for aside in self._staged.values():
            _remove(aside)


@contextlib.contextmanager
def stage(
    name: str, config: type[Config], key: str | None = None, section: str | None = None
) -> Iterator[Run[Config]]:
    """Run the body as the stage `name` (with `key`, one item of its matrix).

    Reads the section `section` of params.yaml; by default `name`, or `name.key` with a key.
    Publishes its outputs when the body succeeds. On an InferlabError prints its one line and
    exits with status 1; on anything else removes what was written and lets the traceback show.
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    log.setLevel(logging.INFO)
    try:
        common = parameters.load("run", RunParams)
        section = section or (f"{name}.{key}" if key else name)
        threads = common.threads or len(os.sched_getaffinity(0))
        run = Run(name, key, parameters.load(section, config), common.seed, threads)
    except InferlabError as error:
        sys.exit(f"inferlab: {error}")
    _prepare_process(run.seed, run.threads)
    try:
        yield run
        run.publish()
    except InferlabError as error:
        run.discard()
        sys.exit(f"inferlab: {error}")
    except BaseException as error:
        run.discard()
        if _is_full(error):
            reason = " ".join(str(error).split())
            sys.exit(f"inferlab: no space left for the outputs of stage {name}: {reason}")
        raise


def progress(items: Iterable[Item], what: str, total: int | None = None) -> Iterable[Item]:
    """A progress bar that stays quiet where nobody watches."""
    return tqdm(items, desc=what, total=total, disable=not sys.stderr.isatty(), leave=False)


def checked(values: Mapping[str, float], where: str) -> dict[str, float]:
    """The metrics as plain finite numbers. Raises InferlabError naming the first that is not."""
    plain = {}
    for name, value in values.items():
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, int | float):
            kind = type(value).__name__
            raise InferlabError(f"{where}: {name} must be a number; got {kind} {value!r}")
        if not math.isfinite(value):
            raise InferlabError(f"{where}: {name} must be finite; got {value}")
        plain[name] = value
    return plain


def _is_full(error: BaseException) -> bool:
    """Whether a disk is full: libraries that write in Rust or C++ say so in words only."""
    words = "No space left on device", "Disk quota exceeded", "Not enough free space"
    return isinstance(error, Exception) and any(
        getattr(one, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        or any(word in str(one) for word in words)
        for one in (error, error.__cause__, error.__context__)
    )


def _prepare_process(seed: int, threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    random.seed(seed)
    np.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
        torch.set_num_threads(threads)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
