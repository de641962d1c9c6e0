"""A day of requests: a daily wave, spikes that come every day, and spikes that nobody expects.

Loads are in instances' worth (1 is what one instance serves within its objective), so that a study
of policies does not depend on how fast the machine at hand is.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from inferlab.params import section

Floats = NDArray[np.float64]
MINUTES = 24 * 60
Hour = Annotated[float, Field(ge=0, lt=24)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


@section
class DailySpike:
    """A spike at the same time every day; height: over the mean load."""

    hour: Hour
    height: Positive
    minutes: Positive


@section
class Surprises:
    """Spikes at random times, up to `height` over the mean load, fading with a half-life."""

    a_day: NotNegative
    height: Positive
    half_life_minutes: Positive


@section
class LoadParams:
    """The block `autoscaling.load`."""

    mean_instances: Positive
    swing: Annotated[float, Field(ge=0, lt=1)]
    peak_hour: Hour
    daily_spikes: tuple[DailySpike, ...]
    surprises: Surprises
    level_spread: NotNegative
    history_days: Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Load:
    """What was asked for. history: requests of each minute before the day [minutes].

    minutes: requests of each minute of the day [MINUTES]; steps: the same by step [steps].
    """

    history: Floats
    minutes: Floats
    steps: Floats


def make_load(params: LoadParams, capacity: float, step_s: int, seed: int) -> Load:
    """One day with the days before it; `capacity`: requests a second of one instance.

    Requests come as a Poisson process whose rate changes by the minute.
    """
    random = np.random.default_rng(seed)
    days = [_rates(params, random) for _ in range(params.history_days + 1)]
    rates = np.concatenate(days) * capacity
    history = random.poisson(60 * rates[:-MINUTES]).astype(float)
    by_step = random.poisson(np.repeat(rates[-MINUTES:], 60 // step_s) * step_s).astype(float)
    return Load(history, by_step.reshape(MINUTES, -1).sum(1), by_step)


def _rates(params: LoadParams, random: np.random.Generator) -> Floats:
    """The load of each minute of one day, in instances' worth [MINUTES]."""
    minutes = np.arange(MINUTES)
    phase = 2 * np.pi * (minutes / 60 - params.peak_hour) / 24
    load = params.mean_instances * (1 + params.swing * np.cos(phase))
    load *= np.exp(params.level_spread * random.standard_normal())
    for spike in params.daily_spikes:
        middle = 60 * spike.hour + 2 * random.standard_normal()
        distance = np.abs(minutes - middle)
        distance = np.minimum(distance, MINUTES - distance) / (spike.minutes / 2)
        bump = 0.5 * (1 + np.cos(np.pi * np.minimum(distance, 1)))
        load += params.mean_instances * spike.height * random.uniform(0.9, 1.1) * bump
    surprises = params.surprises
    for _ in range(random.poisson(surprises.a_day)):
        passed = minutes - random.integers(MINUTES)
        faded = np.where(passed >= 0, 0.5 ** (np.abs(passed) / surprises.half_life_minutes), 0.0)
        load += params.mean_instances * surprises.height * random.uniform(0.5, 1) * faded
    return load
