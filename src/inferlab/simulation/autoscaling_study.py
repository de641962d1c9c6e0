"""33.24: policies over days of load, their settings chosen on some days and judged on others."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferlab.simulation.autoscaling import Instance, Outcome, simulate
from inferlab.simulation.autoscaling_settings import FORESIGHT, AutoscalingParams, Known, Setting
from inferlab.simulation.load_day import Load, make_load
from inferlab.simulation.load_forecast import forecast, last_value, mean_error
from inferlab.simulation.runs import at_once, interval, lower_bound, spread
from inferlab.simulation.scaling_policies import trailing_most

Floats = NDArray[np.float64]
Row = dict[str, Any]


def make_days(params: AutoscalingParams, capacity: float, seed: int) -> list[Load]:
    """Days that differ in their seed."""
    step = params.fleet.step_s
    return [make_load(params.load, capacity, step, seed + day) for day in range(params.days)]


def make_known(
    days: Sequence[Load], params: AutoscalingParams, instance: Instance, seed: int
) -> tuple[Known, list[Row]]:
    """Forecasts of every model, and how far off each is beside the last minute's value.

    Raises InferlabError as `forecast` does.
    """
    ahead = -(-params.fleet.spin_up_s // 60)
    guesses = {"last value": [last_value(day.history, day.minutes) for day in days]}
    for model in params.settings.models:
        guesses[model] = [forecast(day.history, day.minutes, ahead, model, seed) for day in days]
    errors = [
        {
            "model": model,
            "error_pct": 100
            * float(
                np.mean(
                    [mean_error(g, day.minutes, ahead) for g, day in zip(own, days, strict=True)]
                )
            ),
        }
        for model, own in guesses.items()
    ]
    capacity = instance.capacity
    needed = {
        model: trailing_most(np.stack(own), ahead) / (60 * capacity)
        for model, own in guesses.items()
        if model in params.settings.models
    }
    load = np.stack([day.minutes for day in days]) / (60 * capacity)
    return Known(instance, needed, load), errors


def run_all(
    days: Sequence[Load],
    settings: Sequence[Setting],
    known: Known,
    instance: Instance,
    params: AutoscalingParams,
    threads: int,
) -> Outcome:
    """All settings on all days, split into as many parts as the workers do at once.

    Within a part all runs advance side by side, as one array.
    """
    arrivals = np.stack([day.steps for day in days])
    start = np.ceil(known.load[:, 0])
    parts = min(at_once(params.workers, threads), len(settings))
    work = [
        (arrivals, [settings[place].rule for place in part], start, instance, params.fleet)
        for part in np.array_split(np.arange(len(settings)), parts)
    ]
    found = spread(simulate, work, params.workers, threads)
    names = [field.name for field in fields(Outcome)]
    return Outcome(
        **{name: np.concatenate([getattr(one, name) for one in found]) for name in names}
    )


def setting_table(
    settings: Sequence[Setting], outcome: Outcome, days: slice = slice(None)
) -> list[Row]:
    """One row a setting: means over days with 95 % intervals, and whether none beats it in both.

    `front` compares with the settings of the same policy.
    """
    rows = [
        {"policy": one.policy, "setting": one.name}
        | _interval("usd_per_day", outcome.usd[place, days])
        | _interval("compliance", outcome.compliance[place, days])
        | _interval("flaps_per_day", outcome.flaps[place, days])
        | {
            "changes_per_day": float(outcome.changes[place, days].mean()),
            "dropped_share": float(
                (outcome.dropped[place, days] / outcome.offered[place, days]).mean()
            ),
        }
        for place, one in enumerate(settings)
    ]
    return [row | {"front": int(not _beaten(row, rows))} for row in rows]


def choose(
    settings: Sequence[Setting], outcome: Outcome, target: float, confidence: float
) -> list[tuple[int, Row]]:
    """For each policy the cheapest setting that keeps `target` by the first half of the days.

    It keeps it when the one-sided lower bound of its mean compliance does: of many settings whose
    mean does, the cheapest is one that was lucky. The one with the highest bound when none does.
    Returns its place among the settings, and its row on the other half; `at_end` names the sweeps
    that should be wider.
    """
    half = outcome.usd.shape[1] // 2
    seen, unseen = (
        setting_table(settings, outcome, one) for one in (slice(None, half), slice(half, None))
    )
    bounds = [lower_bound(days.tolist(), confidence) for days in outcome.compliance[:, :half]]
    chosen = []
    for policy in dict.fromkeys(one.policy for one in settings):
        own = [place for place, one in enumerate(settings) if one.policy == policy]
        keeping = [place for place in own if bounds[place] >= target]
        if keeping:
            best = min(keeping, key=lambda place: seen[place]["usd_per_day"])
        else:
            best = max(own, key=lambda place: bounds[place])
        notes = {
            "kept_target_before": int(bool(keeping)),
            "at_end": " ".join(settings[best].at_end),
        }
        chosen.append((best, unseen[best] | notes))
    return chosen


def metrics(
    chosen: Sequence[tuple[int, Row]], errors: Sequence[Row], instance: Instance
) -> dict[str, float]:
    """Cost, compliance and flaps of each policy's chosen setting, and the forecasts' errors."""
    values: dict[str, float] = {"instance_requests_per_s": instance.capacity}
    for _, row in chosen:
        for name in ("usd_per_day", "compliance", "flaps_per_day"):
            if not (row["policy"] in ("fixed", FORESIGHT) and name == "flaps_per_day"):
                values[f"{name}_{row['policy']}"] = row[name]
    for row in errors:
        values[f"forecast_error_pct_{row['model'].replace(' ', '_')}"] = row["error_pct"]
    return values


def _interval(name: str, values: Floats) -> Row:
    found = interval(values.tolist())
    return {
        name: found.mean,
        f"{name}_low": found.mean - found.half,
        f"{name}_high": found.mean + found.half,
    }


def _beaten(row: Row, rows: Sequence[Row]) -> bool:
    return any(
        other["policy"] == row["policy"]
        and other["usd_per_day"] <= row["usd_per_day"]
        and other["compliance"] >= row["compliance"]
        and (other["usd_per_day"], other["compliance"]) != (row["usd_per_day"], row["compliance"])
        for other in rows
    )
