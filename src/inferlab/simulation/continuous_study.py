"""33.18: static batches against continuous batching, from idle to past saturation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.serving.metrics import Objective
from inferlab.simulation.cost import StepCost
from inferlab.simulation.engine import Engine
from inferlab.simulation.fast import simulate
from inferlab.simulation.limits import Count, Limits
from inferlab.simulation.prefix_study import PrefixParams
from inferlab.simulation.record import Record, requests_per_s
from inferlab.simulation.runs import Workers, spread
from inferlab.simulation.static import simulate_static
from inferlab.simulation.summary import figures, over_seeds
from inferlab.simulation.workload import Lengths, Workload, make_workload, read_trace

CONTINUOUS = "continuous"
Positive = Annotated[float, Field(gt=0)]


@parameters.section
class ContinuousBatchingParams:
    """The section `continuous_batching`."""

    hardware: str
    requests: Annotated[int, Field(ge=100)]
    lengths: Lengths
    trace: str | None
    variation: Annotated[float, Field(ge=0)]
    loads: Annotated[tuple[Positive, ...], Field(min_length=1)]
    steady_load: Positive
    static_batches: Annotated[tuple[Count, ...], Field(min_length=1)]
    static_wait_s: Positive
    limits: Limits
    prefixes: PrefixParams
    seeds: Count
    objective: Objective
    workers: Workers

    def __post_init__(self) -> None:
        """Raise ValueError when the load that metrics are taken at is not simulated.

        And when the limits have no room for a request.
        """
        if self.steady_load not in self.loads:
            raise ValueError(f"steady_load must be one of loads; got {self.steady_load:g}")
        prompts, outputs = self.lengths.prompts, self.lengths.outputs
        self.limits.require(prompts.most + self.prefixes.tokens, outputs.most)


def workload_of(params: ContinuousBatchingParams, rate: float, seed: int) -> Workload:
    """The requests of one run: drawn, or those of the trace at another rate.

    Raises InferlabError for a trace that cannot be read, or whose requests cannot all be served.
    """
    if params.trace:
        found = read_trace(Path(params.trace))
        for prompt, output in zip(found.prompts, found.outputs, strict=True):
            try:
                params.limits.require(int(prompt) + params.prefixes.tokens, int(output))
            except ValueError as error:
                raise InferlabError(f"{params.trace}: {error}") from None
        return found.at_rate(rate)
    return make_workload(params.lengths, params.requests, rate, params.variation, seed)


def serve(arm: str, workload: Workload, params: ContinuousBatchingParams, cost: StepCost) -> Record:
    """Run one arm: `continuous`, or `static N`."""
    if arm == CONTINUOUS:
        return simulate(workload, cost, params.limits)
    batch = int(arm.split()[1])
    return simulate_static(workload, cost, params.limits, batch, params.static_wait_s)


def arms(params: ContinuousBatchingParams) -> list[str]:
    """The names of all arms, static ones first."""
    return [*(f"static {batch}" for batch in params.static_batches), CONTINUOUS]


def capacities(
    params: ContinuousBatchingParams, cost: StepCost, seed: int, threads: int
) -> dict[str, float]:
    """Requests a second of each arm when there is always one waiting."""
    workload = workload_of(params, 1.0, seed).at_once()
    work = [(arm, workload, params, cost) for arm in arms(params)]
    return dict(zip(arms(params), spread(_capacity, work, params.workers, threads), strict=True))


def _capacity(
    arm: str, workload: Workload, params: ContinuousBatchingParams, cost: StepCost
) -> float:
    return requests_per_s(serve(arm, workload, params, cost))


def rates_table(
    params: ContinuousBatchingParams, cost: StepCost, capacity: float, seed: int, threads: int
) -> list[dict[str, Any]]:
    """One row for each arm and rate: figures over seeds. Rates are `loads` times `capacity`.

    A trace is one run: it has no seeds, and nothing is known of its spread.
    """
    seeds = 1 if params.trace else params.seeds
    points = [(arm, load) for arm in arms(params) for load in params.loads]
    work = [
        (arm, load * capacity, params, cost, seed + number)
        for arm, load in points
        for number in range(seeds)
    ]
    found = iter(spread(_figures, work, params.workers, threads))
    return [
        {
            "arm": arm,
            "load": load,
            "rate": load * capacity,
            **over_seeds([next(found) for _ in range(seeds)]),
        }
        for arm, load in points
    ]


def _figures(
    arm: str, rate: float, params: ContinuousBatchingParams, cost: StepCost, seed: int
) -> dict[str, float]:
    record = serve(arm, workload_of(params, rate, seed), params, cost)
    return figures(record, cost.front_end, params.objective)


def metrics(
    rows: Sequence[dict[str, Any]],
    found: dict[str, float],
    workload: Workload,
    params: ContinuousBatchingParams,
) -> dict[str, float]:
    """Capacities, continuous batching at the steady load, and what the lengths really are.

    `largest_load_within_objective` is the largest simulated load at which goodput is the
    objective's share of the rate; 0 when there is none.
    """
    own = [row for row in rows if row["arm"] == CONTINUOUS]
    (steady,) = (row for row in own if row["load"] == params.steady_load)
    kept = [
        row["load"]
        for row in own
        if not row["unstable"]
        and row["goodput_requests_per_s"] >= params.objective.share * row["requests_per_s"]
    ]
    values = {f"capacity_{arm.replace(' ', '_')}_rps": rate for arm, rate in found.items()}
    best = max(rate for arm, rate in found.items() if arm != CONTINUOUS)
    values["capacity_ratio_to_best_static"] = found[CONTINUOUS] / best
    values["largest_load_within_objective"] = max(kept, default=0.0)
    if not steady["unstable"]:
        values["ttft_ms_p95_steady"] = steady["ttft_ms_p95"]
        values["e2e_ms_p95_steady"] = steady["e2e_ms_p95"]
    values["tpot_ms_p50_steady"] = steady["tpot_ms_p50"]
    values["mean_prompt_tokens"] = float(workload.prompts.mean())
    values["mean_output_tokens"] = float(workload.outputs.mean())
    values["clipped_lengths_share"] = workload.clipped / (2 * len(workload))
    return values


def speeds(params: ContinuousBatchingParams, cost: StepCost, rate: float, seed: int) -> Any:
    """A function that serves the same workload step by step or fast; for timing one core."""
    workload = workload_of(params, rate, seed)
    return {
        "fast": lambda: simulate(workload, cost, params.limits),
        "step_by_step": lambda: Engine(workload, cost, params.limits).run(),
    }
