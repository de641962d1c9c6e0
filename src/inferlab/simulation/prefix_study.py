"""What a prefix cache is worth when requests begin alike: capacity, and the wait for a token."""

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from inferlab import params as parameters
from inferlab.simulation.cost import StepCost
from inferlab.simulation.engine import Engine
from inferlab.simulation.limits import Count, Limits
from inferlab.simulation.prefix import PrefixEngine
from inferlab.simulation.record import WARM_UP, latencies, requests_per_s
from inferlab.simulation.runs import Workers, spread
from inferlab.simulation.workload import Workload


@parameters.section
class PrefixParams:
    """A text of `tokens` tokens before each prompt, one of so many `groups`, at `load`."""

    tokens: Count
    groups: Annotated[tuple[Count, ...], Field(min_length=1)]
    load: Annotated[float, Field(gt=0, lt=1)]


def prefix_table(
    params: PrefixParams,
    workload: Workload,
    cost: StepCost,
    limits: Limits,
    workers: Workers,
    seed: int,
    threads: int,
) -> list[dict[str, Any]]:
    """One row for each number of groups, with the cache off and on.

    Both serve the same requests, all there from the start for the capacity, and then at `load`
    times the capacity without a cache for TTFT. `workload`: what follows the common texts.
    """
    work = [
        (workload.prefixed(groups, params.tokens, seed), params.load, cost, limits)
        for groups in params.groups
    ]
    found = spread(_off_and_on, work, workers, threads)
    return [
        {"groups": groups, "cache": cache, **row}
        for groups, rows in zip(params.groups, found, strict=True)
        for cache, row in zip(("off", "on"), rows, strict=True)
    ]


def gain(rows: list[dict[str, Any]], groups: int) -> float:
    """Capacity with the cache over that without, for this number of groups."""
    off, on = (row["capacity_rps"] for row in rows if row["groups"] == groups)
    return float(on / off)


def _off_and_on(
    workload: Workload, load: float, cost: StepCost, limits: Limits
) -> list[dict[str, float]]:
    rows = []
    capacities = [
        requests_per_s(kind(workload.at_once(), cost, limits).run())
        for kind in (Engine, PrefixEngine)
    ]
    steady = workload.at_rate(load * capacities[0])
    for capacity, engine in zip(
        capacities, (Engine(steady, cost, limits), PrefixEngine(steady, cost, limits)), strict=True
    ):
        waits = latencies(engine.run(), cost.front_end, WARM_UP).ttft
        reused = engine.reused if isinstance(engine, PrefixEngine) else 0
        rows.append(
            {
                "capacity_rps": capacity,
                "reused_share": reused / float(workload.prompts.sum()),
                "rate": load * capacities[0],
                "ttft_ms_p50": 1e3 * float(np.percentile(waits, 50)),
                "ttft_ms_p95": 1e3 * float(np.percentile(waits, 95)),
            }
        )
    return rows
