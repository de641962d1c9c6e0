"""How often a target model would accept what a draft proposes, and what that is worth.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding",
arXiv:2211.17192: acceptance is Σ min(p, q) (corollary 3.6), tokens a call of the target follow
equation (1), the speed-up theorem 3.8.
"""

import math
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from inferlab.distillation.depth import Stack, Trunk

LOGIT_ROWS = 256
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Agreement:
    """How a draft's predictions compare with the target's, mean a token: all fp64 [windows].

    `accepted`: Σ min(p, q) at temperature 1; `greedy`: 1 where both have the same likeliest token;
    `nats`: −log q of the token that came.
    """

    accepted: Tensor
    greedy: Tensor
    nats: Tensor

    @property
    def acceptance(self) -> float:
        """Chance that a sampled draft token is accepted."""
        return float(self.accepted.mean())

    @property
    def half_width(self) -> float:
        """Of the interval of `acceptance` over windows."""
        return interval(self.accepted)

    @property
    def greedy_agreement(self) -> float:
        """Share of tokens on which greedy draft and target agree."""
        return float(self.greedy.mean())

    @property
    def perplexity(self) -> float:
        """exp of the draft's mean nats a token."""
        return math.exp(float(self.nats.mean()))

    def row(self) -> dict[str, float]:
        """All of it in one row."""
        return {
            "acceptance": self.acceptance,
            "acceptance_low": self.acceptance - self.half_width,
            "acceptance_high": self.acceptance + self.half_width,
            "greedy_agreement": self.greedy_agreement,
            "token_perplexity": self.perplexity,
        }


@torch.inference_mode()
def compare(trunk: Trunk, windows: Tensor, target: Tensor, stack: Stack, batch: int) -> Agreement:
    """Score `stack` as a draft on tokens [windows, length].

    `target`: the target's final states [windows, length, hidden]. The first token of a window is
    context only, and the draft reads the same text as the target.
    """
    seen: list[Tensor] = []
    for tokens, wanted in zip(windows.split(batch), target.split(batch), strict=True):
        states = trunk.states(tokens, stack)
        for own, reference, text in zip(states, wanted, tokens, strict=True):
            seen.append(_window(trunk, own[:-1], reference[:-1].to(own.device), text[1:].long()))
    return Agreement(*torch.stack(seen, dim=1))


@torch.inference_mode()
def target_states(trunk: Trunk, windows: Tensor, batch: int) -> Tensor:
    """Final states [windows, length, hidden] of the whole model, in its dtype, on the CPU."""
    return torch.cat([trunk.states(part, trunk.stack).cpu() for part in windows.split(batch)])


def overlap(target: Tensor, draft: Tensor) -> Tensor:
    """Σ min(p, q) = 1 − total variation, of log-probabilities [rows, vocabulary]: [rows]."""
    return torch.minimum(target, draft).exp().sum(-1)


def interval(values: Tensor) -> float:
    """Half the width of Student's 95 % interval of the mean of `values` [windows], at least 2."""
    factor = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)
    return float(factor * values.std() / math.sqrt(len(values)))


def _window(trunk: Trunk, own: Tensor, reference: Tensor, text: Tensor) -> Tensor:
    """Accepted, greedy and nats of one window, fp64 [3]. States: [tokens, hidden]."""
    sums = torch.zeros(3, dtype=torch.float64)
    for rows in torch.arange(len(text)).split(LOGIT_ROWS):
        draft, target = (trunk.log_probabilities(states[rows]) for states in (own, reference))
        nats = -draft.gather(1, text[rows, None].to(draft.device))
        greedy = draft.argmax(1) == target.argmax(1)
        parts = (overlap(target, draft), greedy, nats)
        sums += torch.stack([part.double().sum().cpu() for part in parts])
    return sums / len(text)
