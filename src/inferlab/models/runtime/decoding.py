"""Decode a batch of prompts token by token, greedily or by sampling, as a stream."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferlab.errors import InferlabError
from inferlab.models.runtime.cache import KVCache
from inferlab.models.runtime.llama import Llama


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. Temperature 0 takes the likeliest; top_k 0 and top_p 1 cut nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise InferlabError(f"temperature must be 0 or above; got {self.temperature}")
        if self.top_k < 0:
            raise InferlabError(f"top_k must be 0 (off) or above; got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise InferlabError(f"top_p must be above 0 and at most 1; got {self.top_p}")


GREEDY = Sampling()


def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: Sampling = GREEDY,
    cache: KVCache | None = None,
    stop_at_end: bool = True,
) -> Iterator[list[int | None]]:
    """Continue `prompts`, of any lengths, by up to `new_tokens`; yield the next token of each.

    A sequence that has ended yields None. `cache` is an empty one of the batch, by default just
    large enough; it may be bounded or in 8 bits. Without `stop_at_end` the model's end tokens are
    tokens like others. Raises InferlabError for an empty prompt, when prompt and new tokens exceed
    the model's context, and when `cache` runs full.
    """
    tokens, real = padded(prompts)
    if cache is None:
        cache = model.new_cache(len(prompts), int(real.sum(1).max()) + new_tokens)
    generator = torch.Generator().manual_seed(sampling.seed)
    running = torch.ones(len(prompts), dtype=torch.bool)
    ends = torch.tensor(model.config.end_tokens if stop_at_end else (), dtype=torch.long)
    states = last_states(model.hidden(tokens, cache, None if real.all() else real), real)
    for number in range(new_tokens):
        chosen = choose(model.logits(states), sampling, generator)
        yield [int(c) if alive else None for c, alive in zip(chosen, running, strict=True)]
        running = running & ~torch.isin(chosen, ends)
        if number + 1 == new_tokens or not running.any():
            return
        real = None if running.all() else running[:, None]
        states = model.hidden(chosen[:, None], cache, real)[:, -1]


def padded(prompts: Sequence[Sequence[int]], left: bool = False) -> tuple[Tensor, Tensor]:
    """Prompts as one tensor [batch, longest], and where it holds real tokens, of the same shape.

    Raises InferlabError for a prompt without tokens.
    """
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise InferlabError(f"prompt {number} has no tokens; give at least one, such as BOS")
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
    real = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        place = slice(longest - len(prompt), None) if left else slice(len(prompt))
        tokens[row, place] = torch.as_tensor(prompt)
        real[row, place] = True
    return tokens, real


def last_states(states: Tensor, real: Tensor) -> Tensor:
    """Of `states` [batch, tokens, hidden], those of each sequence's last real token."""
    columns = torch.arange(real.shape[1]).expand_as(real)
    last = columns.masked_fill(~real, -1).amax(1)
    return states[torch.arange(len(states)), last]


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """The next token by `logits` [batch, vocabulary]: [batch]."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    chances = probabilities(logits, sampling)
    return torch.multinomial(chances, 1, generator=generator)[:, 0]


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What `sampling` draws from, at a temperature above 0: [..., vocabulary], each sums to 1.

    Top-k keeps the k likeliest tokens; top-p then keeps the fewest whose chances reach p (nucleus
    sampling, Holtzman et al., 2020).
    """
    scaled = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        smallest = scaled.topk(sampling.top_k).values[..., -1:]
        scaled = scaled.masked_fill(scaled < smallest, -torch.inf)
    chances = scaled.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = chances.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        cut = torch.zeros_like(before, dtype=torch.bool).scatter(
            -1, order, before >= sampling.top_p
        )
        chances = chances.masked_fill(cut, 0)
        chances /= chances.sum(-1, keepdim=True)
    return chances
