"""The parameters of the autoscaling study, and every setting of every policy that it tries."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from inferlab.errors import suggestion
from inferlab.params import section
from inferlab.simulation.autoscaling import FleetParams, Instance, Policy
from inferlab.simulation.instance import InstanceParams
from inferlab.simulation.load_day import LoadParams
from inferlab.simulation.load_forecast import FEWEST_DAYS, MODELS
from inferlab.simulation.runs import Workers
from inferlab.simulation.scaling_policies import (
    Fixed,
    Hybrid,
    Predictive,
    Reactive,
    Schedule,
    ahead_of,
    without_short_gaps,
)

Floats = NDArray[np.float64]
FORESIGHT = "foresight"
AboveZero = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


@section
class SweepParams:
    """The block `autoscaling.settings`: what each policy is tried with."""

    fixed: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    high: Annotated[tuple[Share, ...], Field(min_length=1)]
    low_share: Annotated[float, Field(gt=0, lt=1)]
    growth: Annotated[tuple[AboveZero, ...], Field(min_length=1)]
    margins: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1)]
    models: Annotated[tuple[str, ...], Field(min_length=1)]


@section
class AutoscalingParams:
    """The section `autoscaling`."""

    instance: InstanceParams
    days: Annotated[int, Field(ge=4)]
    target: Annotated[float, Field(gt=0, le=1)]
    confidence: Annotated[float, Field(ge=0.5, lt=1)]
    policies: Annotated[tuple[str, ...], Field(min_length=1)]
    load: LoadParams
    fleet: FleetParams
    settings: SweepParams
    workers: Workers

    def __post_init__(self) -> None:
        models = self.settings.models
        known = {"policies": (self.policies, BUILDERS), "settings.models": (models, MODELS)}
        for key, (names, registry) in known.items():
            for name in names:
                if name not in registry:
                    raise ValueError(f"{key} holds {name!r}; {suggestion(name, registry)}")
        if self.load.history_days < FEWEST_DAYS:
            raise ValueError(
                f"load.history_days must be at least {FEWEST_DAYS}, to forecast with a season of "
                f"1 day; got {self.load.history_days}"
            )


@dataclass(frozen=True)
class Setting:
    """One policy with one choice of its parameters.

    `at_end`: those of them that were tried at no further value, so that one may be better.
    """

    policy: str
    name: str
    rule: Policy
    at_end: tuple[str, ...] = ()


@dataclass(frozen=True)
class Known:
    """What policies are built from.

    needed: by model, what the forecast asks for; load: the actual one; both in instances' worth,
    [days, minutes].
    """

    instance: Instance
    needed: dict[str, Floats]
    load: Floats


def make_settings(params: AutoscalingParams, known: Known) -> list[Setting]:
    """Every setting of every policy, and the schedules made in hindsight."""
    found = [setting for name in params.policies for setting in BUILDERS[name](params, known)]
    return found + _foresight(params, known)


def _fixed(params: AutoscalingParams, known: Known) -> list[Setting]:
    tried = params.settings.fixed
    return [Setting("fixed", f"{n} instances", Fixed(n), _at_end(fixed=(n, tried))) for n in tried]


def _reactive(params: AutoscalingParams, known: Known) -> list[Setting]:
    tried = params.settings
    return [
        Setting(
            "reactive",
            f"as at {high:.0%}, +{growth:.0%}",
            _watch(params, known, high, growth),
            _at_end(high=(high, tried.high), growth=(growth, tried.growth)),
        )
        for high in tried.high
        for growth in tried.growth
    ]


def _predictive(params: AutoscalingParams, known: Known) -> list[Setting]:
    tried = params.settings.margins
    return [
        Setting(
            "predictive",
            f"{model} +{margin:.0%}",
            Predictive(known.needed[model], margin),
            _at_end(margins=(margin, tried)),
        )
        for model in params.settings.models
        for margin in tried
    ]


def _hybrid(params: AutoscalingParams, known: Known) -> list[Setting]:
    """The first model and the first growth, with every margin and every limit."""
    tried = params.settings
    model, growth = tried.models[0], tried.growth[0]
    return [
        Setting(
            "hybrid",
            f"{model} +{margin:.0%}, as at {high:.0%}",
            Hybrid(Predictive(known.needed[model], margin), _watch(params, known, high, growth)),
            _at_end(margins=(margin, tried.margins), high=(high, tried.high)),
        )
        for margin in tried.margins
        for high in tried.high
    ]


def _foresight(params: AutoscalingParams, known: Known) -> list[Setting]:
    fleet = params.fleet
    spin_up, gap = -(-fleet.spin_up_s // 60), (fleet.spin_up_s + fleet.drain_s) // 60
    settings = []
    for margin in params.settings.margins:
        needed = np.maximum(np.ceil(known.load * (1 + margin)), fleet.least)
        plan = Schedule(ahead_of(without_short_gaps(needed, gap), spin_up))
        ends = _at_end(margins=(margin, params.settings.margins))
        settings.append(Setting(FORESIGHT, f"known +{margin:.0%}", plan, ends))
    return settings


def _at_end(**sweeps: tuple[float, Sequence[float]]) -> tuple[str, ...]:
    """The sweeps, as (value, all values), whose value is the lowest or highest of several.

    But for a margin of 0 and the P95 at full load, beyond which there is nothing.
    """
    return tuple(
        name
        for name, (value, tried) in sweeps.items()
        if len(set(tried)) > 1 and value in (min(tried), max(tried)) and value not in (0.0, 1.0)
    )


def _watch(params: AutoscalingParams, known: Known, high: float, growth: float) -> Reactive:
    """Limits are the P95 of the time to first token at a load: 1 is an instance at capacity."""
    loads = high, params.settings.low_share * high
    return Reactive(*(float(known.instance.p95_ms(load)) for load in loads), growth)


BUILDERS: dict[str, Callable[[AutoscalingParams, Known], list[Setting]]] = {
    "fixed": _fixed,
    "reactive": _reactive,
    "predictive": _predictive,
    "hybrid": _hybrid,
}
