"""How well a model predicts a text when its cache is cut or rounded, beside the full cache."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferlab.errors import InferlabError
from inferlab.models.runtime.config import LlamaConfig
from inferlab.models.runtime.llama import Llama

ROWS = 128
"""Positions whose logits are held at once: few enough to stay in the processor's cache."""


@dataclass(frozen=True)
class Scores:
    """Of each token but the first: [inputs, tokens - 1] each.

    `nats`: −log p of the token; `divergence`: KL(full ‖ this) in nats, 0 for the full cache itself;
    `correct`: whether the likeliest token was the right one.
    """

    nats: Tensor
    divergence: Tensor
    correct: Tensor

    def perplexity(self, first: int = 0) -> float:
        """exp of the mean nats a token, of those from position `first` on."""
        return math.exp(float(self.nats[:, max(first - 1, 0) :].double().mean()))

    def kl(self, first: int = 0) -> float:
        """Mean divergence in nats a token, of those from position `first` on."""
        return float(self.divergence[:, max(first - 1, 0) :].double().mean())

    def accuracy(self, first: int = 0) -> float:
        """Share of tokens that were the likeliest, of those from position `first` on."""
        return float(self.correct[:, max(first - 1, 0) :].double().mean())


@torch.inference_mode()
def score(
    model: Llama, states: Mapping[str, Tensor], tokens: Tensor, reference: str
) -> dict[str, Scores]:
    """Score the final `states` [inputs, tokens, hidden] of every arm on `tokens` [inputs, tokens].

    The divergence is from the arm `reference`. Logits are made and dropped `ROWS` positions at a
    time, in fp32; positions whose states equal the reference's are not computed twice.
    """
    targets = tokens[:, 1:].flatten()
    rows = {name: arm[:, :-1].flatten(0, 1) for name, arm in states.items()}
    found: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in rows}
    for piece in _pieces(len(targets)):
        wanted = targets[piece]
        base = model.logits(rows[reference][piece]).log_softmax(-1)
        chances = base.exp()
        own = _measures(base, base, chances, wanted)
        for name, arm in rows.items():
            if torch.equal(arm[piece], rows[reference][piece]):
                found[name].append(own)
                continue
            logs = model.logits(arm[piece]).log_softmax(-1)
            found[name].append(_measures(logs, base, chances, wanted))
    shape = (len(tokens), -1)
    return {
        name: Scores(*(torch.cat(parts).view(shape) for parts in zip(*measured, strict=True)))
        for name, measured in found.items()
    }


def check_length(config: LlamaConfig, tokens: int, key: str) -> None:
    """Raise InferlabError when inputs of `tokens` tokens exceed the model's context."""
    if tokens > config.context:
        raise InferlabError(
            f"{key} is {tokens}, but the model's context is {config.context} tokens; "
            f"take {config.context} or less"
        )


def paired_error(one: Tensor, other: Tensor, block: int = 64) -> float:
    """Standard error of the mean of `one` − `other` [inputs, tokens], from means of blocks.

    Neighbouring tokens are not independent, blocks of tokens nearly are.
    """
    difference = (one - other).double()
    length = difference.shape[1] // block * block
    means = difference[:, :length].unflatten(1, (-1, block)).mean(-1).flatten()
    return float(means.std() / math.sqrt(len(means))) if len(means) > 1 else 0.0


def by_position(values: Tensor, size: int) -> Sequence[tuple[int, float]]:
    """Means of `values` [inputs, tokens] over stretches of `size`: (first token, mean) each."""
    means = [(start, values[:, start : start + size]) for start in range(0, values.shape[1], size)]
    return [(start, float(part.double().mean())) for start, part in means]


def _measures(logs: Tensor, base: Tensor, chances: Tensor, wanted: Tensor) -> tuple[Tensor, ...]:
    nats = -logs.gather(-1, wanted[:, None])[:, 0]
    divergence = (chances * (base - logs)).sum(-1)
    return nats, divergence, logs.argmax(-1) == wanted


def _pieces(length: int) -> Iterator[slice]:
    return (slice(start, start + ROWS) for start in range(0, length, ROWS))
