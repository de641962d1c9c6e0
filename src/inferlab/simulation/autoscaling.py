"""A fleet of instances over one day, for many policies and days at once.

Requests are a fluid in steps of seconds: at several requests a second, waiting comes from missing
capacity, not from single arrivals. They wait in one queue, first come first served; one that would
wait longer than the limit is dropped. What an instance adds is the distribution of its time to
first token at its load.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.ndimage import map_coordinates

from inferlab.errors import InferlabError
from inferlab.params import section
from inferlab.simulation.load_day import MINUTES

Floats = NDArray[np.float64]
SECONDS_AN_HOUR = 3600
Seconds = Annotated[int, Field(ge=0)]


@section
class FleetParams:
    """The block `autoscaling.fleet`."""

    usd_per_hour: Annotated[float, Field(gt=0)]
    spin_up_s: Seconds
    drain_s: Seconds
    least: Annotated[int, Field(ge=1)]
    most: Annotated[int, Field(ge=1)]
    longest_wait_s: Annotated[float, Field(gt=0)]
    cooldown_out_s: Seconds
    cooldown_in_s: Seconds
    flap_minutes: Annotated[int, Field(ge=1)]
    step_s: Annotated[int, Field(ge=1)]

    def __post_init__(self) -> None:
        if self.most < self.least:
            raise ValueError(f"most must be at least least, {self.least}; got {self.most}")
        for name in ("spin_up_s", "drain_s"):
            if getattr(self, name) % self.step_s:
                raise ValueError(
                    f"{name} must be a multiple of step_s, {self.step_s}; got {getattr(self, name)}"
                )
        if 60 % self.step_s:
            raise ValueError(f"step_s must divide a minute; got {self.step_s}")


@dataclass(frozen=True)
class Instance:
    """One instance: requests a second within its objective, and its times to first token.

    At `loads` [points], rising shares of the capacity, 1 the last: ttft_ms [points] is the P95, and
    within [points, limits] the share of requests whose first token comes within `limits_ms`
    [limits], rising from 0 to the objective's, the last.
    """

    capacity: float
    loads: Floats
    ttft_ms: Floats
    limits_ms: Floats
    within: Floats

    def __post_init__(self) -> None:
        if not self.capacity > 0:
            raise InferlabError(f"an instance's capacity must be above 0; got {self.capacity:g}")

    def p95_ms(self, load: Floats | float) -> Floats:
        """The P95 of the time to first token at a load; linear between the points."""
        return np.interp(load, self.loads, self.ttft_ms)

    def in_time(self, load: Floats, waited_ms: Floats) -> Floats:
        """The share of requests in time that have waited so long for an instance at this load.

        All [runs]; linear between the points.
        """
        left_ms = self.limits_ms[-1] - waited_ms
        place = [
            np.interp(values, points, np.arange(len(points)))
            for values, points in ((load, self.loads), (left_ms, self.limits_ms))
        ]
        return map_coordinates(self.within, place, order=1, mode="nearest")


class Policy(Protocol):
    """Decides at the start of each minute, for several days side by side."""

    @property
    def cooled(self) -> bool:
        """Whether the cool-downs hold for it."""
        ...

    def wanted(self, minute: int, p95_ms: Floats, committed: Floats) -> Floats:
        """Instances wanted [days].

        p95_ms: of the time to first token in the last minute, NaN before the first; committed:
        instances that are ready or on their way. Both: [days].
        """
        ...


@dataclass(frozen=True)
class Outcome:
    """What each policy came to on each day; all [policies, days].

    ready: ready instances at the start of each minute, [policies, days, MINUTES].
    """

    offered: Floats
    served: Floats
    dropped: Floats
    waiting: Floats
    within: Floats
    usd: Floats
    changes: Floats
    flaps: Floats
    ready: Floats

    @property
    def compliance(self) -> Floats:
        """Share of the offered requests whose first token came in time."""
        return self.within / self.offered


def simulate(
    arrivals: Floats,
    policies: Sequence[Policy],
    start: Floats,
    instance: Instance,
    params: FleetParams,
) -> Outcome:
    """Every policy on every day. arrivals: requests of each step [days, steps].

    start: instances that would be right at midnight [days]; each begins with what it wants there.
    """
    days = len(arrivals)
    fleet = Fleet(policies, start, instance, params)
    steps = 60 // params.step_s
    ready = np.zeros((MINUTES, len(policies) * days))
    for step, arriving in enumerate(np.ascontiguousarray(arrivals.T)):
        if step % steps == 0:
            fleet.decide(step // steps)
            ready[step // steps] = fleet.ready
        fleet.advance(step, np.tile(arriving, len(policies)))
    shape = (len(policies), days)
    return Outcome(
        offered=np.tile(arrivals.sum(1), (len(policies), 1)),
        served=fleet.served.reshape(shape),
        dropped=fleet.dropped.reshape(shape),
        waiting=fleet.queue.reshape(shape),
        within=fleet.within.reshape(shape),
        usd=(fleet.billed_s * params.usd_per_hour / SECONDS_AN_HOUR).reshape(shape),
        changes=fleet.changes.reshape(shape),
        flaps=fleet.flaps.reshape(shape),
        ready=ready.T.reshape(*shape, -1),
    )


class Fleet:
    """The state of all runs, policy by policy, each with its days.

    Billed are instances from their launch until they have drained.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        start: Floats,
        instance: Instance,
        params: FleetParams,
    ) -> None:
        days, runs = len(start), len(policies) * len(start)
        self.instance, self.params = instance, params
        self.policies = [
            (policy, slice(number * days, (number + 1) * days))
            for number, policy in enumerate(policies)
        ]
        self.cooled = np.repeat([policy.cooled for policy in policies], days)
        self.ready = np.tile(start, len(policies)).astype(float)
        self.ready = np.clip(self._wanted(0, np.full(runs, np.nan)), params.least, params.most)
        # Instances by the step in which they become ready, or have drained.
        self.starting = np.zeros((params.spin_up_s // params.step_s + 1, runs))
        self.draining = np.zeros((params.drain_s // params.step_s + 1, runs))
        self.recent = np.zeros((2, 60 // params.step_s, runs))
        self.queue, self.served, self.dropped, self.within = np.zeros((4, runs))
        self.billed_s, self.changes, self.flaps = np.zeros((3, runs))
        self.last_out, self.last_in = np.full((2, runs), -np.inf)

    def decide(self, minute: int) -> None:
        """Launch and drain what the policies want, unless a cool-down or a limit forbids it."""
        if minute == 0:
            return
        params, seconds = self.params, 60 * minute
        committed = self.ready + self.starting.sum(0)
        wanted = self._wanted(minute, weighted_p95(*self.recent))
        change = np.clip(wanted, params.least, params.most) - committed
        since_out, since_in = seconds - self.last_out, seconds - self.last_in
        # A fleet that has just grown is given time to show what it can do before it shrinks.
        resting = np.where(
            change > 0,
            since_out < params.cooldown_out_s,
            np.minimum(since_out, since_in) < params.cooldown_in_s,
        )
        change = np.where(resting & self.cooled, 0.0, change)
        launched = np.maximum(change, 0)
        drained = np.minimum(np.maximum(-change, 0), self.ready - 1)
        step = seconds // params.step_s
        self.starting[(step - 1) % len(self.starting)] += launched
        self.draining[(step - 1) % len(self.draining)] += drained
        self.ready -= drained
        self._count(launched > 0, drained > 0, seconds)

    def advance(self, step: int, arriving: Floats) -> None:
        """One step: what became ready joins, requests are served, wait or are dropped."""
        params, instance = self.params, self.instance
        self.ready += _taken(self.starting, step)
        _taken(self.draining, step)
        rate = self.ready * instance.capacity
        served = np.minimum(self.queue + arriving, rate * params.step_s)
        left = self.queue + arriving - served
        dropped = np.clip(left - rate * params.longest_wait_s, 0, arriving)
        self.queue = left - dropped
        load = served / (rate * params.step_s)
        waited_ms = 1000 * self.queue / rate
        p95_ms = waited_ms + instance.p95_ms(load)
        accepted = arriving - dropped
        self.within += accepted * instance.in_time(load, waited_ms)
        self.served += served
        self.dropped += dropped
        paid = self.ready + self.starting.sum(0) + self.draining.sum(0)
        self.billed_s += paid * params.step_s
        self.recent[:, step % self.recent.shape[1]] = p95_ms, accepted

    def _wanted(self, minute: int, p95_ms: Floats) -> Floats:
        committed = self.ready if minute == 0 else self.ready + self.starting.sum(0)
        parts = [
            policy.wanted(minute, p95_ms[rows], committed[rows]) for policy, rows in self.policies
        ]
        return np.concatenate(parts)

    def _count(self, grown: NDArray[np.bool_], shrunk: NDArray[np.bool_], seconds: int) -> None:
        """Changes, and those that undo one of the last minutes."""
        window = 60 * self.params.flap_minutes
        self.flaps += grown & (self.last_in > self.last_out) & (seconds - self.last_in <= window)
        self.flaps += shrunk & (self.last_out > self.last_in) & (seconds - self.last_out <= window)
        self.changes += grown | shrunk
        self.last_out = np.where(grown, seconds, self.last_out)
        self.last_in = np.where(shrunk, seconds, self.last_in)


def weighted_p95(values: Floats, weights: Floats) -> Floats:
    """The smallest value that at least 95 % of the weight does not exceed [runs].

    values, weights: [steps, runs]; 0 where there is no weight.
    """
    order = values.argsort(0)
    ordered = np.take_along_axis(values, order, 0)
    sums = np.take_along_axis(weights, order, 0).cumsum(0)
    place = (sums < 0.95 * sums[-1]).sum(0)
    return np.where(sums[-1] > 0, ordered[place, np.arange(values.shape[1])], 0.0)


def _taken(ring: Floats, step: int) -> Floats:
    """What is due in this step [runs]; its place in the ring is free for another round."""
    due = ring[step % len(ring)].copy()
    ring[step % len(ring)] = 0
    return due
