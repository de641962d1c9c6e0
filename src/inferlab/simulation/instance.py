"""What one instance of a fleet serves within an objective, from the batching simulator."""

from typing import Annotated

import numpy as np
from pydantic import Field

from inferlab.errors import InferlabError
from inferlab.params import section
from inferlab.serving.metrics import Objective
from inferlab.simulation.autoscaling import Instance
from inferlab.simulation.cost import StepCost
from inferlab.simulation.fast import simulate
from inferlab.simulation.limits import Limits
from inferlab.simulation.record import WARM_UP, Record, latencies, requests_per_s
from inferlab.simulation.runs import lower_bound
from inferlab.simulation.summary import figures
from inferlab.simulation.workload import Lengths, make_workload

HALVINGS = 10
"""Of the interval that the capacity is looked for in: it is exact to a thousandth of saturation."""
CONFIDENCE = 0.95
"""That an instance at capacity keeps its objective."""
LIMITS = 41
"""Points, from 0 to the objective, at which the distribution of first tokens is kept."""


@section
class InstanceParams:
    """The block `autoscaling.instance`. loads: shares of the capacity, rising, 1 the last."""

    hardware: str
    requests: Annotated[int, Field(ge=100)]
    lengths: Lengths
    variation: Annotated[float, Field(ge=0)]
    limits: Limits
    objective: Objective
    loads: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]
    seeds: Annotated[int, Field(ge=2)]

    def __post_init__(self) -> None:
        """Raise ValueError unless `loads` are rising shares that end at 1 and requests fit."""
        if list(self.loads) != sorted(set(self.loads)) or self.loads[-1] != 1:
            raise ValueError(f"loads must rise to 1; got {', '.join(map(str, self.loads))}")
        self.limits.require(self.lengths.prompts.most, self.lengths.outputs.most)


def simulated_instance(params: InstanceParams, cost: StepCost, seed: int) -> Instance:
    """The highest rate that surely keeps the objective, and first tokens at and below it.

    A rate keeps it when the lower bound of the mean over seeds does: near saturation luck decides
    for a single run. First tokens are of other seeds than the rate was found on. All rates see the
    same requests, closer together or further apart. Raises InferlabError when a hundredth of what
    the engine can finish already misses the objective.
    """
    full = make_workload(params.lengths, params.requests, 1.0, params.variation, seed).at_once()
    saturated = requests_per_s(simulate(full, cost, params.limits))
    seeds = range(seed, seed + params.seeds)
    low, high = 0.01 * saturated, saturated
    if not _keeps(params, cost, low, seeds):
        raise InferlabError(
            f"an instance on {params.hardware} keeps the objective at no load; loosen "
            "autoscaling.instance.objective"
        )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _keeps(params, cost, middle, seeds) else (low, middle)
    limits_ms = np.linspace(0, params.objective.ttft_ms, LIMITS)
    others = range(seeds.stop, seeds.stop + params.seeds)
    curve = [_first_tokens(params, cost, low * load, others) for load in params.loads]
    return Instance(
        capacity=low,
        loads=np.array(params.loads),
        ttft_ms=np.array([np.percentile(found, 95) for found in curve]),
        limits_ms=limits_ms,
        within=np.stack([(found[:, None] <= limits_ms).mean(0) for found in curve]),
    )


def _keeps(params: InstanceParams, cost: StepCost, rate: float, seeds: range) -> bool:
    found = [
        figures(record, cost.front_end, params.objective)
        for record in _runs(params, cost, rate, seeds)
    ]
    shares = [one["goodput_requests_per_s"] / one["requests_per_s"] for one in found]
    return lower_bound(shares, CONFIDENCE) >= params.objective.share


def _first_tokens(params: InstanceParams, cost: StepCost, rate: float, seeds: range) -> np.ndarray:
    """Milliseconds to the first token [requests], of all seeds."""
    records = _runs(params, cost, rate, seeds)
    return 1e3 * np.concatenate([latencies(one, cost.front_end, WARM_UP).ttft for one in records])


def _runs(params: InstanceParams, cost: StepCost, rate: float, seeds: range) -> list[Record]:
    lengths, count = params.lengths, params.requests
    return [
        simulate(make_workload(lengths, count, rate, params.variation, one), cost, params.limits)
        for one in seeds
    ]
