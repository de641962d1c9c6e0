"""Step costs: fitted to a real engine's steps, and to published figures of GPUs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from inferlab.serving.load import Outcome
from inferlab.serving.metrics import e2e, succeeded, tpot, ttft
from inferlab.simulation.cost import StepCost, from_seconds
from inferlab.simulation.fit import TERMS, Fit, fit
from inferlab.simulation.measured import Measured, StepCostParams
from inferlab.simulation.published import published_fit
from inferlab.simulation.steps import Steps, front_end_seconds, together

GPUS = ("a100", "h100")
THIS_MACHINE = "this_machine"


def fit_measured(measured: Measured) -> tuple[Fit, Steps, float]:
    """The fit to all fitted loads of all rounds, its steps, and the seconds of the front end."""
    loads = [one for turn in measured.loads for one in turn]
    steps = together([window.steps for _, window in loads])
    outside = [front_end_seconds(outcomes, window.engine_ttft) for outcomes, window in loads]
    weights = [len(outcomes) for outcomes, _ in loads]
    return fit(steps.features, steps.seconds), steps, float(np.average(outside, weights=weights))


def all_costs(measured: Fit, front_end: float) -> tuple[dict[str, StepCost], dict[str, Fit]]:
    """The step cost of each piece of hardware, and the published fits."""
    published = {name: published_fit(name) for name in GPUS}
    costs = {THIS_MACHINE: from_seconds(measured.seconds | {"front_end": front_end})}
    costs |= {name: from_seconds(one.seconds) for name, one in published.items()}
    return costs, published


def round_factors(measured: Measured, found: Fit) -> list[float]:
    """Of each round: measured over predicted time of all its fitted steps. 1 without drift."""
    coefficients = np.array([found.seconds[term] for term in TERMS])
    factors = []
    for turn in measured.loads:
        steps = together([window.steps for _, window in turn])
        factors.append(float(steps.seconds.sum() / (steps.features @ coefficients).sum()))
    return factors


def metrics(
    found: Fit, front_end: float, published: dict[str, Fit], factors: Sequence[float]
) -> dict[str, float]:
    """Coefficients in readable units, and how well they fit."""
    seconds = found.seconds
    return {
        "base_ms": 1e3 * seconds["base"],
        "token_us": 1e6 * seconds["token"],
        "sequence_us": 1e6 * seconds["sequence"],
        "context_ns": 1e9 * seconds["context"],
        "pair_ns": 1e9 * seconds["pair"],
        "front_end_ms": 1e3 * front_end,
        "steps": len(found.ratios),
        "fit_error_median_pct": 100 * found.median_error,
        "fit_error_p95_pct": 100 * found.p95_error,
        "drift_pct": 100 * float(np.ptp(factors) / np.median(factors)),
        **{
            f"{name}_fit_error_median_pct": 100 * one.median_error
            for name, one in published.items()
        },
    }


def load_table(measured: Measured, params: StepCostParams, found: Fit) -> list[dict[str, Any]]:
    """One row for each fitted load: the mean step, measured and predicted."""
    coefficients = np.array([found.seconds[term] for term in TERMS])
    rows = []
    for place, load in enumerate(params.loads):
        for turn, loads in enumerate(measured.loads):
            steps = loads[place][1].steps
            predicted = steps.features @ coefficients
            rows.append(
                {
                    **{
                        "load": "{concurrency} x {input_tokens}+{output_tokens}".format(
                            **asdict(load)
                        )
                    },
                    "round": turn,
                    "steps": len(steps),
                    "step_ms_measured": 1e3 * float(steps.seconds.mean()),
                    "step_ms_predicted": 1e3 * float(predicted.mean()),
                }
            )
    return rows


def step_table(steps: Steps, found: Fit) -> list[dict[str, Any]]:
    """One row a fitted step: what it computed, and its time measured and predicted."""
    return [
        {
            "tokens": int(row[1]),
            "sequences": int(row[2]),
            "context": int(row[3]),
            "pairs": float(row[4]),
            "ms_measured": round(1e3 * seconds, 3),
            "ms_predicted": round(1e3 * seconds / ratio, 3),
        }
        for row, seconds, ratio in zip(
            steps.features.tolist(), steps.seconds.tolist(), found.ratios.tolist(), strict=True
        )
    ]


def replay_records(measured: Measured, params: StepCostParams) -> dict[str, Any]:
    """What `simulator_validation` judges by: what clients saw of each trace in each round."""
    return {
        trace.name: [
            {
                **_observed(turn[place][0]),
                "steps": len(turn[place][1].steps),
                "preemptions": turn[place][1].preemptions,
                "step_ms": 1e3 * float(turn[place][1].steps.seconds.mean()),
            }
            for turn in measured.traces
        ]
        for place, trace in enumerate(params.traces)
    }


def _observed(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Seconds of each request, by arrival."""
    ordered = sorted(succeeded(outcomes), key=lambda one: one.due)
    return {
        "due": [one.due for one in ordered],
        "end": [one.chunks[-1] for one in ordered],
        "ttft": [ttft(one) for one in ordered],
        "tpot": [tpot(one) for one in ordered],
        "e2e": [e2e(one) for one in ordered],
    }
