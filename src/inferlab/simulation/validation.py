"""One trace in the real engine and in the simulator, on configurations that were held out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.simulation.cost import PICOSECONDS, StepCost
from inferlab.simulation.fast import simulate
from inferlab.simulation.limits import Limits
from inferlab.simulation.measured import StepCostParams, Trace, trace_workload
from inferlab.simulation.record import Record, latencies

FIGURES = ("throughput", "ttft", "tpot", "e2e")
"""Output tokens a second, and means over requests of the three latencies in seconds."""


@parameters.section
class SimulatorValidationParams:
    """The section `simulator_validation`."""

    hardware: str


@dataclass(frozen=True)
class Judged:
    """One configuration: figures of each round of the engine, and of the simulator.

    `adapted` are the simulator's when its step cost follows each round's own speed; `steps` and
    `preemptions` are how many the engine made (mean over rounds) and the simulator; `present` is
    how many requests were in the engine on average.
    """

    name: str
    saturated: bool
    engine: dict[str, list[float]]
    simulated: dict[str, float]
    adapted: dict[str, list[float]]
    steps: tuple[float, float]
    preemptions: tuple[float, float]
    present: float

    def error(self, figure: str) -> float:
        """Simulated over the engine's mean, minus 1, in percent."""
        return 100 * (self.simulated[figure] / float(np.mean(self.engine[figure])) - 1)

    def adapted_error(self, figure: str) -> float:
        """The same, with the step cost scaled by what each round's fitted loads took."""
        pairs = zip(self.adapted[figure], self.engine[figure], strict=True)
        return 100 * float(np.mean([ours / theirs - 1 for ours, theirs in pairs]))

    def spread(self, figure: str) -> float:
        """The engine's own: highest minus lowest round over their mean, in percent."""
        values = self.engine[figure]
        return 100 * float(np.ptp(values) / np.mean(values))


def judge(
    cost: StepCost, source: StepCostParams, recorded: Mapping[str, Any], seed: int
) -> list[Judged]:
    """Simulate every trace with the limits of the server that it ran on.

    `recorded`: what stage step_cost wrote. Raises InferlabError when it holds other traces than
    the parameters name.
    """
    known = set(recorded["traces"])
    if {trace.name for trace in source.traces} != known:
        raise InferlabError(
            f"recorded traces are {', '.join(sorted(known))}; run stage step_cost again"
        )
    return [_judge(trace, cost, source.heldout_limits, seed, recorded) for trace in source.traces]


def _judge(trace: Trace, cost: StepCost, limits: Limits, seed: int, recorded: Any) -> Judged:
    rounds = recorded["traces"][trace.name]
    workload = trace_workload(trace, seed)
    record = simulate(workload, cost, limits)
    adapted = [
        simulated_figures(simulate(workload, scaled(cost, factor), limits), cost.front_end)
        for factor in recorded["factors"]
    ]
    engine = [engine_figures(one, workload.outputs) for one in rounds]
    return Judged(
        trace.name,
        trace.beyond_saturation,
        {figure: [one[figure] for one in engine] for figure in FIGURES},
        simulated_figures(record, cost.front_end),
        {figure: [one[figure] for one in adapted] for figure in FIGURES},
        (_mean(rounds, "steps"), record.steps),
        (_mean(rounds, "preemptions"), record.preemptions),
        float(np.mean([sum(one["e2e"]) / _span(one) for one in rounds])),
    )


def scaled(cost: StepCost, factor: float) -> StepCost:
    """The same engine on a machine that takes `factor` times as long a step."""
    terms = ("base", "token", "sequence", "context", "half_pair")
    return replace(cost, **{term: round(getattr(cost, term) * factor) for term in terms})


def simulated_figures(record: Record, front_end: int) -> dict[str, float]:
    """The figures of a run, seen from a client."""
    found = latencies(record, front_end)
    span = float(record.finish.max() - record.arrival.min() + front_end) / PICOSECONDS
    return {
        "throughput": record.tokens_out / span,
        "ttft": float(found.ttft.mean()),
        "tpot": float(np.nanmean(found.tpot)),
        "e2e": float(found.e2e.mean()),
    }


def engine_figures(seen: Mapping[str, Any], outputs: np.ndarray) -> dict[str, float]:
    """The figures of one round of the real engine."""
    return {
        "throughput": float(outputs.sum()) / _span(seen),
        "ttft": float(np.mean(seen["ttft"])),
        "tpot": float(np.mean([one for one in seen["tpot"] if one is not None])),
        "e2e": float(np.mean(seen["e2e"])),
    }


def metrics(judged: Sequence[Judged]) -> dict[str, float]:
    """The largest errors and the largest spread over configurations below saturation.

    `…_beyond_saturation_pct` is of the others; 0 when there are none. Below saturation throughput
    is little more than that of the arrivals; beyond it, it is the engine's.
    """
    steady = [one for one in judged if not one.saturated]
    if not steady:
        raise InferlabError("every held-out trace is beyond saturation; add one with a lower rate")
    beyond = [one for one in judged if one.saturated]
    return {
        **{f"{name}_error_pct": max(abs(one.error(name)) for one in steady) for name in FIGURES},
        "repeat_spread_pct": max(one.spread(name) for one in steady for name in FIGURES),
        **{
            f"{name}_error_adapted_pct": max(abs(one.adapted_error(name)) for one in steady)
            for name in FIGURES[1:]
        },
        **{
            f"{name}_error_beyond_saturation_pct": max(
                (abs(one.error(name)) for one in beyond), default=0.0
            )
            for name in ("throughput", "e2e")
        },
        "preemptions_engine": sum(one.preemptions[0] for one in judged),
        "preemptions_simulated": sum(one.preemptions[1] for one in judged),
        "configurations": len(steady),
    }


def table(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """One row for each configuration and figure."""
    return [
        {
            "configuration": one.name,
            "case": f"{figure} of {one.name}",
            "beyond_saturation": int(one.saturated),
            "figure": figure,
            "engine": float(np.mean(one.engine[figure])),
            "engine_lowest": min(one.engine[figure]),
            "engine_highest": max(one.engine[figure]),
            "simulated": one.simulated[figure],
            "error_pct": one.error(figure),
            "error_adapted_pct": one.adapted_error(figure),
            "repeat_spread_pct": one.spread(figure),
            "engine_steps": one.steps[0],
            "simulated_steps": one.steps[1],
            "engine_preemptions": one.preemptions[0],
            "simulated_preemptions": one.preemptions[1],
            "requests_in_engine": one.present,
        }
        for one in judged
        for figure in FIGURES
    ]


def _mean(rounds: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(np.mean([one[name] for one in rounds]))


def _span(seen: Mapping[str, Any]) -> float:
    """Seconds from the first arrival to the last token."""
    return max(seen["end"]) - min(seen["due"])


def read_recorded(path: Path) -> dict[str, Any]:
    """What stage step_cost wrote of its held-out traces."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InferlabError(f"{path} is not readable: {error}; run stage step_cost") from None
