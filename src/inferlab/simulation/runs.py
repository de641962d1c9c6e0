"""Independent runs side by side, and what several seeds say together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from joblib import Parallel, delayed
from pydantic import Field
from scipy import stats

from inferlab import params as parameters

Result = TypeVar("Result")


@parameters.section
class Workers:
    """How independent runs are spread; the results do not depend on it."""

    jobs: Annotated[int, Field(ge=0)]
    backend: Literal["loky", "threading", "multiprocessing", "sequential"]


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and half the width of its 95 % interval (Student's t)."""

    mean: float
    half: float


def spread(
    function: Callable[..., Result], work: Sequence[tuple[Any, ...]], workers: Workers, threads: int
) -> list[Result]:
    """`function(*arguments)` for each entry of `work`, in that order, `threads` at once for 0."""
    parallel = Parallel(n_jobs=workers.jobs or threads, backend=workers.backend)
    return list(parallel(delayed(function)(*arguments) for arguments in work))


def interval(values: Sequence[float]) -> Interval:
    """Of the mean of independent values; a single one has no width that could be known: 0."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, 0.0)
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    return Interval(mean, float(stats.t.ppf(0.975, len(values) - 1)) * error)
