"""33.20: who goes first. Policies on the same requests, from half load to overload."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from inferlab import params as parameters
from inferlab.errors import lookup
from inferlab.simulation.cost import PICOSECONDS, StepCost
from inferlab.simulation.fast import simulate
from inferlab.simulation.limits import Limits
from inferlab.simulation.record import WARM_UP, Record, is_unstable, latencies, requests_per_s
from inferlab.simulation.runs import Workers, interval, spread
from inferlab.simulation.schedulers import POLICIES, Known, make_queue
from inferlab.simulation.workload import Lengths, Workload, make_workload

FIFO = "fifo"
URGENT, NORMAL = 0, 1


@parameters.section
class SchedulingParams:
    """The section `scheduling`."""

    hardware: str
    requests: Annotated[int, Field(ge=100)]
    lengths: Lengths
    loads: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]
    steady_load: Annotated[float, Field(gt=0, lt=1)]
    policies: Annotated[tuple[str, ...], Field(min_length=1)]
    urgent_share: Annotated[float, Field(gt=0, lt=1)]
    noise: Annotated[float, Field(gt=0)]
    ageing: Annotated[float, Field(gt=0)]
    ageing_s: Annotated[float, Field(gt=0)]
    limits: Limits
    seeds: Annotated[int, Field(ge=2)]
    workers: Workers

    def __post_init__(self) -> None:
        """Raise ValueError when the base of comparison or the steady load is not simulated.

        And when the limits have no room for a request.
        """
        if FIFO not in self.policies:
            raise ValueError("policies must hold fifo, which the others are compared with")
        if self.steady_load not in self.loads:
            raise ValueError(f"steady_load must be one of loads; got {self.steady_load:g}")
        self.limits.require(self.lengths.prompts.most, self.lengths.outputs.most)


def check_policies(params: SchedulingParams) -> None:
    """Raise InferlabError with a suggestion for a policy that there is not."""
    for policy in params.policies:
        lookup(POLICIES, policy, "policy")


def classed_workload(params: SchedulingParams, rate: float, seed: int) -> Workload:
    """Poisson arrivals; each request is urgent with the chance `urgent_share`."""
    workload = make_workload(params.lengths, params.requests, rate, 1.0, seed)
    urgent = np.random.default_rng([seed, 2]).random(len(workload)) < params.urgent_share
    return replace(workload, classes=np.where(urgent, URGENT, NORMAL))


def serve(
    policy: str, workload: Workload, params: SchedulingParams, cost: StepCost, seed: int
) -> Record:
    """Run a workload under a policy."""
    known = Known(
        workload,
        cost,
        params.limits.token_budget,
        params.noise,
        params.ageing,
        params.ageing_s,
        seed,
    )
    return simulate(workload, cost, params.limits, make_queue(policy, known))


def capacity(params: SchedulingParams, cost: StepCost, seed: int) -> float:
    """Requests a second when there is always one waiting, under FIFO."""
    workload = classed_workload(params, 1.0, seed).at_once()
    return requests_per_s(serve(FIFO, workload, params, cost, seed))


def policy_table(
    params: SchedulingParams, cost: StepCost, rate: float, seed: int, threads: int
) -> list[dict[str, Any]]:
    """One row for each load and policy; `rate` is the capacity in requests a second.

    `…_minus_fifo_s` are differences on the same requests, seed by seed. Beyond saturation every
    latency grows with the run: such a row is `unstable`, its `steady_mean_s` is left empty, and its
    other figures are those of a rush of so many requests.
    """
    points = [(load, policy) for load in params.loads for policy in params.policies]
    work = [
        (policy, load * rate, params, cost, seed + number)
        for load, policy in points
        for number in range(params.seeds)
    ]
    found = iter(spread(_figures, work, params.workers, threads))
    runs = {point: [next(found) for _ in range(params.seeds)] for point in points}
    return [_row(load, policy, runs[load, policy], runs[load, FIFO]) for load, policy in points]


def _figures(
    policy: str, rate: float, params: SchedulingParams, cost: StepCost, seed: int
) -> dict[str, float]:
    workload = classed_workload(params, rate, seed)
    record = serve(policy, workload, params, cost, seed)
    return run_figures(record, cost, params.limits.token_budget)


def run_figures(record: Record, cost: StepCost, token_budget: int) -> dict[str, float]:
    """Latencies in seconds, of all and by class, and fairness.

    The largest wait is that of every request; the first ones are left out of the other figures.
    """
    found = latencies(record, cost.front_end, WARM_UP)
    workload = record.workload
    pairs = zip(workload.prompts[found.which], workload.outputs[found.which], strict=True)
    alone = [cost.alone(int(p), int(o), token_budget)[1] + cost.front_end for p, o in pairs]
    slowdown = found.e2e / (np.array(alone) / PICOSECONDS)
    classes = workload.classes[found.which]
    large = np.array(alone) > np.median(alone)
    values = {
        "run_mean_s": float(found.e2e.mean()),
        "p95_s": float(np.percentile(found.e2e, 95)),
        "p99_s": float(np.percentile(found.e2e, 99)),
        "largest_wait_s": float(latencies(record, cost.front_end).ttft.max()),
        "jain_slowdown": jain(slowdown),
        "service_gap_sizes": service_gap(record, found.which, large),
        "service_gap_classes": service_gap(record, found.which, classes == URGENT),
        "unstable": int(is_unstable(record)),
    }
    for name, chosen in (
        ("urgent", classes == URGENT),
        ("normal", classes == NORMAL),
        ("small", ~large),
        ("large", large),
    ):
        values[f"{name}_p95_s"] = (
            float(np.percentile(found.e2e[chosen], 95)) if chosen.any() else 0.0
        )
    return values


def jain(values: np.ndarray) -> float:
    """Jain's index of values [requests]: 1 when all are equal, 1/n when one has everything."""
    return float(values.sum() ** 2 / (len(values) * (values**2).sum()))


def service_gap(record: Record, which: np.ndarray, chosen: np.ndarray) -> float:
    """How far one group runs ahead of the other: 0 is side by side, 1 is one after the other.

    The largest difference over time between the shares of its own work (tokens of requests that
    have finished) that each group has received. `chosen` [requests] splits the requests `which`.
    """
    if chosen.all() or not chosen.any():
        return 0.0
    order = np.argsort(record.finish[which], kind="stable")
    work = (record.workload.prompts + record.workload.outputs)[which][order].astype(float)
    first = np.cumsum(np.where(chosen[order], work, 0.0))
    second = np.cumsum(np.where(chosen[order], 0.0, work))
    return float(np.abs(first / first[-1] - second / second[-1]).max())


def _row(
    load: float,
    policy: str,
    runs: Sequence[dict[str, float]],
    fifo: Sequence[dict[str, float]],
) -> dict[str, Any]:
    unstable = load >= 1 or sum(run["unstable"] for run in runs) * 2 > len(runs)
    row: dict[str, Any] = {
        "load": load,
        "policy": policy,
        "case": f"{policy} at {load:g}",
        "unstable": int(unstable),
    }
    for name in runs[0]:
        if name == "unstable":
            continue
        values = interval([run[name] for run in runs])
        row[name] = values.mean
        row[f"{name}_half"] = values.half
    row["steady_mean_s"] = "" if unstable else row["run_mean_s"]
    for name in ("run_mean_s", "p99_s"):
        pairs = zip(runs, fifo, strict=True)
        gap = interval([run[name] - base[name] for run, base in pairs])
        row[f"{name[:-2]}_minus_fifo_s"] = gap.mean
        row[f"{name[:-2]}_minus_fifo_s_half"] = gap.half
    return row


def metrics(
    rows: Sequence[dict[str, Any]], rate: float, params: SchedulingParams
) -> dict[str, float]:
    """Capacity; each policy's mean at the steady load, if steady; largest waits in overload."""
    values = {"capacity_rps": rate}
    overload = max(params.loads)
    for row in rows:
        if row["load"] == params.steady_load and not row["unstable"]:
            values[f"mean_s_{row['policy']}"] = row["steady_mean_s"]
        if row["load"] == overload and row["policy"] in (FIFO, "shortest_oracle", "shortest_aged"):
            values[f"largest_wait_s_{row['policy']}_overload"] = row["largest_wait_s"]
    return values
