"""Independent runs side by side, here or on a Ray cluster, and what several seeds say together."""

import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from joblib import Parallel, delayed
from pydantic import Field
from scipy import stats

from inferlab import params as parameters
from inferlab.errors import InferlabError

Result = TypeVar("Result")
RAY = "ray"
ANSWER_SECONDS = 10.0


@parameters.section
class Workers:
    """How independent runs are spread; the results do not depend on it.

    `address` is that of a Ray cluster, which only the backend `ray` has: null takes the variable
    RAY_ADDRESS, and a cluster of this machine alone, started for the stage, where that is not set.
    """

    jobs: Annotated[int, Field(ge=0)]
    backend: Literal["loky", "threading", "multiprocessing", "sequential", "ray"]
    address: str | None

    def __post_init__(self) -> None:
        """Raise ValueError for an address that nothing would read."""
        if self.address is not None and self.backend != RAY:
            raise ValueError(
                f"address is of a Ray cluster, but backend is {self.backend}; "
                f"set backend to ray or address to null"
            )


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and half the width of its 95 % interval (Student's t)."""

    mean: float
    half: float


def spread(
    function: Callable[..., Result], work: Sequence[tuple[Any, ...]], workers: Workers, threads: int
) -> list[Result]:
    """`function(*arguments)` for each entry of `work`, in that order, `at_once` of them at once.

    On Ray each of these holds a processor. By default they hold none, and may all come to lie on
    one machine.
    """
    options = {"ray_remote_args": {"num_cpus": 1}} if workers.backend == RAY else {}
    parallel = Parallel(n_jobs=at_once(workers, threads), backend=workers.backend, **options)
    return list(parallel(delayed(function)(*arguments) for arguments in work))


def at_once(workers: Workers, threads: int) -> int:
    """`workers.jobs`, or for 0 every processor of the Ray cluster, or `threads` without one.

    Raises InferlabError when Ray is wanted and is not installed, does not answer or is smaller
    than `workers.jobs`.
    """
    if workers.backend == RAY:
        return _ray_jobs(workers, threads)
    return workers.jobs or threads


def _ray_jobs(workers: Workers, threads: int) -> int:
    """Connect this process to the cluster, unless it is; runs that the cluster is to do at once."""
    address = workers.address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        # Read when Ray is imported. Without it Ray listens on all interfaces; no node joins ours.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError:
        raise InferlabError(
            "workers.backend is ray, but Ray is not installed; run `make ray`, or choose loky"
        ) from None
    register_ray()
    if not ray.is_initialized():
        _connect(ray, address, workers.jobs or threads)
    found = int(ray.cluster_resources().get("CPU", 0))
    if workers.jobs > found:
        raise InferlabError(
            f"workers.jobs is {workers.jobs}, but the Ray cluster has {found} processors; "
            f"lower it, or set 0 for all of them"
        )
    return workers.jobs or found


def _connect(ray: Any, address: str | None, processors: int) -> None:
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:
        ray.init(address="local", num_cpus=processors, include_dashboard=False, **quiet)
        return
    try:
        if (host := re.fullmatch(r"\[?([^/]+?)\]?:(\d+)", address)) is not None:
            # Ray itself tries for minutes.
            socket.create_connection((host[1], int(host[2])), ANSWER_SECONDS).close()
        ray.init(address=address, **quiet)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise InferlabError(
            f"no Ray cluster at {address} ({reason}); start one with `ray start --head`, or set "
            f"workers.address to null for one on this machine"
        ) from None


def lower_bound(values: Sequence[float], confidence: float) -> float:
    """What the mean of values, at least 2, exceeds with this confidence (Student's t)."""
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    return float(np.mean(values)) - float(stats.t.ppf(confidence, len(values) - 1)) * error


def interval(values: Sequence[float]) -> Interval:
    """Of the mean of independent values; a single one has no width that could be known: 0."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, 0.0)
    return Interval(mean, mean - lower_bound(values, 0.975))
