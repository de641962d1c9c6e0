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
from inferlab.simulation.limits import Count, Limits
from inferlab.simulation.record import requests_per_s
from inferlab.simulation.summary import figures
from inferlab.simulation.workload import Lengths, make_workload

HALVINGS = 10
"""Of the interval that the capacity is looked for in: it is exact to a thousandth of saturation."""


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
    seeds: Count

    def __post_init__(self) -> None:
        """Raise ValueError when `loads` are not rising shares that end at 1."""
        if list(self.loads) != sorted(set(self.loads)) or self.loads[-1] != 1:
            raise ValueError(f"loads must rise to 1; got {', '.join(map(str, self.loads))}")


def simulated_instance(params: InstanceParams, cost: StepCost, seed: int) -> Instance:
    """The highest rate that keeps the objective, and the P95 of time to first token below it.

    All rates see the same requests, closer together or further apart. Raises InferlabError when a
    hundredth of what the engine can finish already misses the objective.
    """
    full = make_workload(params.lengths, params.requests, 1.0, params.variation, seed).at_once()
    saturated = requests_per_s(simulate(full, cost, params.limits))
    low, high = 0.01 * saturated, saturated
    if not _keeps(params, cost, low, seed):
        raise InferlabError(
            f"an instance on {params.hardware} keeps the objective at no load; loosen "
            "autoscaling.instance.objective"
        )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _keeps(params, cost, middle, seed) else (low, middle)
    loads = np.array(params.loads)
    return Instance(low, loads, np.array([_figure(params, cost, low * one, seed) for one in loads]))


def _keeps(params: InstanceParams, cost: StepCost, rate: float, seed: int) -> bool:
    runs = _runs(params, cost, rate, seed)
    shares = [one["goodput_requests_per_s"] / one["requests_per_s"] for one in runs]
    return float(np.mean(shares)) >= params.objective.share


def _figure(params: InstanceParams, cost: StepCost, rate: float, seed: int) -> float:
    return float(np.mean([one["ttft_ms_p95"] for one in _runs(params, cost, rate, seed)]))


def _runs(params: InstanceParams, cost: StepCost, rate: float, seed: int) -> list[dict[str, float]]:
    """The figures of each seed."""
    return [
        figures(
            simulate(
                make_workload(
                    params.lengths, params.requests, rate, params.variation, seed + number
                ),
                cost,
                params.limits,
            ),
            cost.front_end,
            params.objective,
        )
        for number in range(params.seeds)
    ]
