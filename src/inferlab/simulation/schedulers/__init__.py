"""Which waiting request is admitted next: one policy a file."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from inferlab.errors import lookup
from inferlab.simulation.cost import PICOSECONDS, StepCost
from inferlab.simulation.schedulers.fifo import Fifo
from inferlab.simulation.schedulers.priority import Priority
from inferlab.simulation.schedulers.shortest import ShortestFirst
from inferlab.simulation.schedulers.waiting import WaitingQueue
from inferlab.simulation.workload import Workload


@dataclass(frozen=True)
class Known:
    """What a policy may use: the requests, their cost, and how it errs and ages."""

    workload: Workload
    cost: StepCost
    token_budget: int
    noise: float
    ageing: float
    ageing_s: float
    seed: int


def make_queue(policy: str, known: Known) -> WaitingQueue:
    """The empty queue of a policy. Raises InferlabError with a suggestion for an unknown one."""
    return lookup(POLICIES, policy, "policy")(known)


def _sizes(known: Known, outputs: np.ndarray) -> list[int]:
    """Each request's picoseconds on an idle engine if it had these outputs."""
    prompts = known.workload.prompts.tolist()
    pairs = zip(prompts, outputs.tolist(), strict=True)
    return [known.cost.alone(prompt, output, known.token_budget)[1] for prompt, output in pairs]


def _oracle(known: Known) -> list[int]:
    return _sizes(known, known.workload.outputs)


def _noisy(known: Known) -> list[int]:
    """The output's length times a lognormal factor of median 1."""
    rng = np.random.default_rng([known.seed, 7])
    factors = rng.lognormal(0.0, known.noise, len(known.workload.outputs))
    guesses = np.maximum(1, np.rint(known.workload.outputs * factors)).astype(np.int64)
    return _sizes(known, guesses)


def _prompt_only(known: Known) -> list[int]:
    """The mean output for all: only the prompts' lengths tell requests apart."""
    mean = max(1, round(float(known.workload.outputs.mean())))
    return _sizes(known, np.full(len(known.workload.outputs), mean))


def _priority(known: Known, ageing: int | None) -> Priority:
    return Priority(known.workload.classes.tolist(), ageing)


POLICIES: dict[str, Callable[[Known], WaitingQueue]] = {
    "fifo": lambda known: Fifo(),
    "shortest_oracle": lambda known: ShortestFirst(_oracle(known)),
    "shortest_noisy": lambda known: ShortestFirst(_noisy(known)),
    "shortest_prompt": lambda known: ShortestFirst(_prompt_only(known)),
    "shortest_aged": lambda known: ShortestFirst(_oracle(known), known.ageing),
    "priority": lambda known: _priority(known, None),
    "priority_aged": lambda known: _priority(known, round(known.ageing_s * PICOSECONDS)),
}
"""By name."""
