"""Teach a stack of few blocks the predictions of the whole model, through a head that both share.

Embeddings and head stay the teacher's: only blocks and the last norm learn. So tied weights stay
tied, and a gradient of the size of the vocabulary's matrix is never made.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from inferlab.distillation.acceptance import Agreement, compare, target_states
from inferlab.distillation.depth import Stack, Trunk
from inferlab.distillation.training import TrainingParams, device, minimise
from inferlab.params import section

LOGIT_ROWS = 256


@section
class DistillationParams:
    """How the stack learns; tokens seen are steps · batch · tokens, over and over `windows`."""

    steps: Annotated[int, Field(ge=1)]
    windows: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=2)]
    batch: Annotated[int, Field(ge=1)]
    learning_rate: Annotated[float, Field(gt=0)]
    warmup: Annotated[float, Field(ge=0, lt=1)]
    weight_decay: Annotated[float, Field(ge=0)]
    checks: Annotated[int, Field(ge=1)]

    @property
    def training(self) -> TrainingParams:
        """The same as the training loop takes it."""
        return TrainingParams(
            epochs=self.steps * self.batch / self.windows,
            batch=self.batch,
            learning_rate=self.learning_rate,
            warmup=self.warmup,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True)
class Exam:
    """Held-out tokens [windows, length], and the target's final states on them."""

    windows: Tensor
    target: Tensor
    batch: int

    def score(self, trunk: Trunk, stack: Stack) -> Agreement:
        """How `stack` does as a draft, in the precision that it is saved in."""
        return compare(
            trunk, self.windows, self.target, stack.copied(trunk.stack.dtype), self.batch
        )


@dataclass(frozen=True)
class Check:
    """The draft after `step` steps; `loss`: mean KL a token of the steps since the last check."""

    step: int
    loss: float
    found: Agreement


def distil(
    trunk: Trunk, start: Stack, windows: Tensor, exam: Exam, params: DistillationParams, seed: int
) -> tuple[Stack, list[Check]]:
    """Teach a copy of `start` on tokens [windows, length]; returns it in fp32, and its progress."""
    teacher = target_states(trunk, windows, params.batch)
    student = start.copied(torch.float32).requires_grad_(True)
    due = {round(params.steps * number / params.checks) for number in range(1, params.checks + 1)}
    checks: list[Check] = []
    losses: list[float] = []

    def loss(rows: Tensor) -> Tensor:
        states = trunk.states(windows[rows], student)
        value = distance(states.flatten(0, 1), teacher[rows].flatten(0, 1).to(device()), trunk)
        losses.append(float(value.detach()))
        return value

    def check() -> None:
        if len(losses) in due:
            since = losses[checks[-1].step if checks else 0 :]
            found = exam.score(trunk, student)
            checks.append(Check(len(losses), sum(since) / len(since), found))

    minimise(student, loss, len(windows), params.training, seed, check)
    return student, checks


def distance(states: Tensor, teacher: Tensor, trunk: Trunk) -> Tensor:
    """KL(teacher ‖ student), nats a token, of final states [tokens, hidden] under the shared head.

    Its slope by `states` is (q − p)·W a token, made here some rows at a time: autograd would keep
    several tensors of the size of the logits.
    """
    slope = torch.empty_like(states)
    total = 0.0
    with torch.no_grad(), torch.autocast(device().type, enabled=False):
        for rows in torch.arange(len(states)).split(LOGIT_ROWS):
            target, own = (trunk.log_probabilities(part[rows]) for part in (teacher, states))
            chances = target.exp()
            total += float((chances * (target - own)).sum())
            slope[rows] = (own.exp_().sub_(chances).to(trunk.head.dtype) @ trunk.head).to(slope)
    linear = (states * slope).sum() / len(states)
    return linear - linear.detach() + total / len(states)
