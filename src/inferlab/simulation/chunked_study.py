"""33.19: what splitting long prompts does to those who are decoding, and to the long ones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from inferlab import params as parameters
from inferlab.simulation.cost import StepCost
from inferlab.simulation.fast import simulate
from inferlab.simulation.limits import Count, Limits
from inferlab.simulation.record import WARM_UP, Record, is_unstable, latencies, requests_per_s
from inferlab.simulation.runs import Workers, interval, spread
from inferlab.simulation.workload import Lengths, Normal, Workload, draw, make_workload

WHOLE = 0
"""The arm in which a prompt is computed in one step."""


@parameters.section
class ChunkedPrefillParams:
    """The section `chunked_prefill`."""

    hardware: str
    requests: Annotated[int, Field(ge=100)]
    lengths: Lengths
    long_prompts: Normal
    long_shares: Annotated[tuple[Annotated[float, Field(gt=0, lt=1)], ...], Field(min_length=1)]
    chunks: Annotated[tuple[Count, ...], Field(min_length=1)]
    load: Annotated[float, Field(gt=0, lt=1)]
    itl_goal_ms: Annotated[float, Field(gt=0)]
    limits: Limits
    seeds: Count
    workers: Workers

    def __post_init__(self) -> None:
        """Raise ValueError when a chunk is no part of the budget, or a request exceeds a limit."""
        for chunk in self.chunks:
            if not self.limits.max_num_seqs <= chunk <= self.limits.token_budget:
                raise ValueError(
                    f"chunks must lie between limits.max_num_seqs, {self.limits.max_num_seqs}, and "
                    f"limits.token_budget, {self.limits.token_budget}; got {chunk}"
                )
        longest = self.long_prompts.most + self.lengths.outputs.most
        if longest > self.limits.token_budget:
            raise ValueError(
                f"limits.token_budget must hold a whole request of {longest} tokens for the arm "
                f"without chunks; got {self.limits.token_budget}"
            )
        prompt = max(self.long_prompts.most, self.lengths.prompts.most)
        self.limits.require(prompt, self.lengths.outputs.most)


def arm_limits(chunk: int, limits: Limits) -> Limits:
    """Limits of an arm: the step's budget is the chunk, as it is in vLLM; `WHOLE` splits nothing.

    Decoding sequences come first and prompts get what is left of the budget.
    """
    if chunk == WHOLE:
        return replace(limits, chunked_prefill=False, chunk=0)
    return replace(limits, chunked_prefill=True, token_budget=chunk, chunk=0)


def mixed_workload(params: ChunkedPrefillParams, share: float, rate: float, seed: int) -> Workload:
    """Requests of which about `share` have long prompts; those are of class 1."""
    short = make_workload(params.lengths, params.requests, rate, 1.0, seed)
    rng = np.random.default_rng([seed, 1])
    is_long = rng.random(len(short)) < share
    drawn, _ = draw(params.long_prompts, len(short), rng)
    return replace(
        short,
        prompts=np.where(is_long, drawn, short.prompts),
        classes=is_long.astype(np.int64),
    )


def rate_of(params: ChunkedPrefillParams, cost: StepCost, share: float, seed: int) -> float:
    """Requests a second that load the arm without chunks to `load` of its capacity."""
    workload = mixed_workload(params, share, 1.0, seed).at_once()
    capacity = requests_per_s(simulate(workload, cost, arm_limits(WHOLE, params.limits)))
    return params.load * capacity


def chunk_table(
    params: ChunkedPrefillParams, cost: StepCost, seed: int, threads: int
) -> list[dict[str, Any]]:
    """One row for each share and chunk: means over seeds, the same requests in every arm."""
    rates = {share: rate_of(params, cost, share, seed) for share in params.long_shares}
    points = [(share, chunk) for share in params.long_shares for chunk in (*params.chunks, WHOLE)]
    work = [
        (chunk, share, rates[share], params, cost, seed + number)
        for share, chunk in points
        for number in range(params.seeds)
    ]
    found = iter(spread(_figures, work, params.workers, threads))
    rows = []
    for share, chunk in points:
        runs = [next(found) for _ in range(params.seeds)]
        unstable = sum(run["unstable"] for run in runs) * 2 > len(runs)
        row: dict[str, Any] = {
            "long_share": share,
            "chunk": chunk,
            "arm": f"{chunk or 'whole'} at {share:.0%} long",
            "rate": rates[share],
            "unstable": int(unstable),
        }
        for name in runs[0]:
            if name != "unstable":
                values = interval([run[name] for run in runs])
                hidden = unstable and name.startswith("ttft")
                row[name] = "" if hidden else values.mean
                row[f"{name}_half"] = "" if hidden or len(runs) < 2 else values.half
        rows.append(row)
    return rows


def _figures(
    chunk: int, share: float, rate: float, params: ChunkedPrefillParams, cost: StepCost, seed: int
) -> dict[str, float]:
    workload = mixed_workload(params, share, rate, seed)
    return run_figures(simulate(workload, cost, arm_limits(chunk, params.limits)), cost)


def run_figures(record: Record, cost: StepCost) -> dict[str, float]:
    """ITL of everybody, TTFT of long and of short prompts, throughput."""
    found = latencies(record, cost.front_end, WARM_UP)
    is_long = record.workload.classes[found.which] == 1
    values = {
        "itl_ms_p50": 1e3 * record.gaps.percentile(50),
        "itl_ms_p99": 1e3 * record.gaps.percentile(99),
        "itl_ms_p999": 1e3 * record.gaps.percentile(99.9),
        "requests_per_s": requests_per_s(record),
        "unstable": int(is_unstable(record)),
    }
    for name, chosen in (("long", is_long), ("short", ~is_long)):
        sample = 1e3 * found.ttft[chosen]
        values[f"ttft_{name}_ms_p50"] = float(np.median(sample)) if len(sample) else 0.0
        values[f"ttft_{name}_ms_p95"] = float(np.percentile(sample, 95)) if len(sample) else 0.0
    return values


def best_chunk(rows: Sequence[dict[str, Any]], share: float, goal_ms: float) -> int | None:
    """The chunk whose P99.9 ITL meets the goal at the least P95 TTFT of long prompts, if any."""
    kept = [
        row
        for row in rows
        if row["long_share"] == share and not row["unstable"] and row["itl_ms_p999"] <= goal_ms
    ]
    return min(kept, key=lambda row: row["ttft_long_ms_p95"])["chunk"] if kept else None


def metrics(rows: Sequence[dict[str, Any]], params: ChunkedPrefillParams) -> dict[str, float]:
    """At the first share: ITL and TTFT by chunk, and the chunk that meets the goal.

    `best_chunk` is -1 when none does, and 0 when whole prompts do.
    """
    share = params.long_shares[0]
    values: dict[str, float] = {}
    for row in rows:
        if row["long_share"] == share:
            name = row["chunk"] or "whole"
            values[f"itl_ms_p999_{name}"] = row["itl_ms_p999"]
            if not row["unstable"]:
                values[f"ttft_long_ms_p95_{name}"] = row["ttft_long_ms_p95"]
    found = best_chunk(rows, share, params.itl_goal_ms)
    values["best_chunk"] = -1 if found is None else found
    return values
