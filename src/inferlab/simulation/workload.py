"""Requests: when they arrive, how long they are, and which class they belong to."""

import csv
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.simulation.cost import PICOSECONDS

COLUMNS = ("timestamp", "input_tokens", "output_tokens")


@parameters.section
class Normal:
    """Lengths in tokens: normal, rounded, and clipped at `least` and `most`."""

    mean: Annotated[float, Field(gt=0)]
    std: Annotated[float, Field(ge=0)]
    least: Annotated[int, Field(ge=1)]
    most: Annotated[int, Field(ge=1)]

    def __post_init__(self) -> None:
        """Raise ValueError when nothing lies between the two ends."""
        if self.most < self.least:
            raise ValueError(f"most must be at least least, {self.least}; got {self.most}")


@parameters.section
class Lengths:
    """Of prompts and outputs, independent of each other."""

    prompts: Normal
    outputs: Normal


@dataclass(frozen=True)
class Prefixes:
    """Requests of one `group` [requests] have their first `tokens` tokens in common."""

    group: np.ndarray
    tokens: int


@dataclass(frozen=True)
class Workload:
    """`arrivals` [requests] in rising picoseconds; `prompts`, `outputs` [requests] in tokens.

    `classes` [requests]: 0 is the most urgent. With `clients` the loop is closed: so many clients
    each send the next request when their last one has ended, and `arrivals` says nothing.
    `clipped` counts drawn lengths that were moved to an end of their range.
    """

    arrivals: np.ndarray
    prompts: np.ndarray
    outputs: np.ndarray
    classes: np.ndarray
    clients: int | None = None
    clipped: int = 0
    prefixes: Prefixes | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def closed(self, clients: int) -> "Workload":
        """The same requests from `clients` clients in a closed loop."""
        if clients < 1:
            raise InferlabError(f"clients must be at least 1; got {clients}")
        return replace(self, clients=clients)

    def prefixed(self, groups: int, tokens: int, seed: int) -> "Workload":
        """The same requests, each after one of `groups` common texts of `tokens` tokens."""
        if groups < 1 or tokens < 1:
            raise InferlabError(f"groups and tokens must be at least 1; got {groups} and {tokens}")
        group = np.random.default_rng([seed, groups]).integers(0, groups, len(self))
        return replace(self, prompts=self.prompts + tokens, prefixes=Prefixes(group, tokens))

    def at_once(self) -> "Workload":
        """The same requests, all there from the start: an engine then serves as fast as it can."""
        return replace(self, arrivals=np.zeros_like(self.arrivals))

    def at_rate(self, rate: float) -> "Workload":
        """The same requests, their arrivals stretched to `rate` requests a second."""
        _positive("rate", rate)
        span = float(self.arrivals[-1] - self.arrivals[0]) or 1.0
        wanted = (len(self) - 1) / rate * PICOSECONDS
        moved = (self.arrivals - self.arrivals[0]) * (wanted / span)
        return replace(self, arrivals=np.rint(moved).astype(np.int64))


def draw(normal: Normal, count: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """`count` lengths [count], and how many of them were clipped."""
    drawn = np.rint(rng.normal(normal.mean, normal.std, count)).astype(np.int64)
    kept = drawn.clip(normal.least, normal.most)
    return kept, int((kept != drawn).sum())


def gamma_arrivals(
    rate: float, variation: float, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Arrivals [count] in picoseconds, gaps Gamma with this coefficient of variation.

    1 is Poisson, above it they come in bursts, 0 is a steady beat. Raises InferlabError for a rate
    that is not positive or a variation below 0.
    """
    _positive("rate", rate)
    if variation < 0:
        raise InferlabError(f"variation must be at least 0; got {variation:g}")
    if variation == 0:
        gaps = np.full(count, 1 / rate)
    else:
        shape = 1 / variation**2
        gaps = rng.gamma(shape, 1 / (rate * shape), count)
    return np.rint(np.cumsum(gaps) * PICOSECONDS).astype(np.int64)


def make_workload(
    lengths: Lengths, count: int, rate: float, variation: float, seed: int
) -> Workload:
    """Requests of these lengths at `rate` requests a second.

    Lengths depend on the seed alone, and so do the gaps but for their scale: two rates, or two
    policies, see the same requests in the same order.
    """
    rng = np.random.default_rng(seed)
    prompts, short = draw(lengths.prompts, count, rng)
    outputs, shorter = draw(lengths.outputs, count, rng)
    arrivals = gamma_arrivals(rate, variation, count, rng)
    classes = np.zeros(count, dtype=np.int64)
    return Workload(arrivals, prompts, outputs, classes, clipped=short + shorter)


def read_trace(path: Path) -> Workload:
    """A CSV file with the columns timestamp (seconds), input_tokens and output_tokens.

    Raises InferlabError when there is no such file, and naming the line for a field that is missing
    or no number, a length below 1, or a time before the line above it.
    """
    rows: list[tuple[float, int, int]] = []
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InferlabError(f"{path} cannot be read as a trace: {error}") from None
    with io.StringIO(text, newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise InferlabError(
                f"{path}, line 1: no column {missing[0]!r}; the columns are {', '.join(COLUMNS)}"
            )
        for row in reader:
            rows.append(_parsed(row, f"{path}, line {reader.line_num}"))
            if len(rows) > 1 and rows[-1][0] < rows[-2][0]:
                raise InferlabError(
                    f"{path}, line {reader.line_num}: timestamp {rows[-1][0]:g} is before "
                    f"{rows[-2][0]:g} of the line above; sort the lines by time"
                )
    if not rows:
        raise InferlabError(f"{path} holds no request; give one line a request")
    times, prompts, outputs = (np.array(column) for column in zip(*rows, strict=True))
    arrivals = np.rint((times - times[0]) * PICOSECONDS).astype(np.int64)
    return Workload(arrivals, prompts, outputs, np.zeros(len(rows), dtype=np.int64))


def _parsed(row: dict[str, str | None], where: str) -> tuple[float, int, int]:
    values: list[float] = []
    for name in COLUMNS:
        text = (row[name] or "").strip()
        if not text:
            raise InferlabError(f"{where}: {name} is missing; give a number")
        try:
            values.append(float(text) if name == "timestamp" else int(text))
        except ValueError:
            kind = "a number of seconds" if name == "timestamp" else "a whole number"
            raise InferlabError(f"{where}: {name} must be {kind}; got {text!r}") from None
        if not np.isfinite(values[-1]) or (name != "timestamp" and values[-1] < 1):
            raise InferlabError(f"{where}: {name} must be finite, a length at least 1; got {text}")
    return values[0], int(values[1]), int(values[2])


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise InferlabError(f"{name} must be above 0 requests a second; got {value:g}")
