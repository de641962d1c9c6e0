"""Who proposes the next tokens: a model, an n-gram table, or the text so far.

A drafter is started on a prompt and then asked, with everything decided since, for tokens to come.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from inferlab.errors import InferlabError
from inferlab.models.runtime.cache import KVCache
from inferlab.models.runtime.decoding import Sampling, choose, probabilities
from inferlab.models.runtime.llama import Llama


@dataclass(frozen=True)
class Proposal:
    """Proposed tokens, and what each was drawn from: [tokens, vocabulary]; None when certain."""

    tokens: list[int]
    chances: Tensor | None = None


class Drafter(Protocol):
    """What decoding asks of a drafter."""

    def start(self, prompt: Sequence[int], room: int) -> None:
        """Begin a sequence that will grow by at most `room` tokens."""

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        """At most `count` tokens after `tokens`, which begin with the prompt."""


class ModelDrafter:
    """A model with a cache of its own, which follows what the target has decided."""

    def __init__(self, model: Llama, sampling: Sampling) -> None:
        self.model, self.sampling = model, sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self._held: list[int] = []
        self._cache: KVCache | None = None

    def start(self, prompt: Sequence[int], room: int) -> None:
        """Read the prompt but for its last token, which the first proposal feeds."""
        self._cache = self.model.new_cache(1, len(prompt) + room)
        self._held = list(prompt[:-1])
        if self._held:
            self.model.hidden(torch.tensor([self._held]), self._cache)

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        """Decode `count` tokens, after going back to where the target disagreed."""
        if self._cache is None:
            raise InferlabError("a drafter must be started on a prompt before it proposes")
        kept = _common(self._held, tokens[:-1])
        self._cache.truncate(kept)
        feed, proposed, chances = list(tokens[kept:]), [], []
        for _ in range(count):
            states = self.model.hidden(torch.tensor([feed]), self._cache)
            logits = self.model.logits(states[:, -1])
            token = int(choose(logits, self.sampling, self._generator))
            if self.sampling.temperature:
                chances.append(probabilities(logits, self.sampling)[0])
            proposed.append(token)
            feed = [token]
        self._held = [*tokens, *proposed[:-1]]
        return Proposal(proposed, torch.stack(chances) if chances else None)


class NgramDrafter:
    """The likeliest next token after the longest context that the training text has seen."""

    def __init__(self, text: np.ndarray, order: int) -> None:
        """`text`: token ids [tokens]; `order`: tokens of the longest n-gram, the next included.

        Raises InferlabError when the text is shorter than that.
        """
        if len(text) < order:
            raise InferlabError(f"an n-gram model of order {order} needs as many tokens of text")
        self.tables = {length: _likeliest(text, length) for length in range(order - 1, -1, -1)}

    def start(self, prompt: Sequence[int], room: int) -> None:
        """Nothing to read: only the last tokens count."""

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        """Go on with the table, back off to shorter contexts where it is empty."""
        text = list(tokens[-len(self.tables) :])
        for _ in range(count):
            text.append(self._next(text))
        return Proposal(text[len(text) - count :])

    def _next(self, text: list[int]) -> int:
        contexts = ((length, tuple(text[len(text) - length :])) for length in self.tables)
        return next(
            self.tables[length][context]
            for length, context in contexts
            if context in self.tables[length]
        )


class LookupDrafter:
    """Prompt lookup: what followed the last tokens when they stood in the text before.

    Saxena, "Prompt Lookup Decoding" (2023). The longest match counts, of several the latest.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self.longest, self.shortest = longest, shortest

    def start(self, prompt: Sequence[int], room: int) -> None:
        """Nothing to read: each proposal looks at the tokens that it is given."""

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        """Up to `count` tokens; none when the last ones are new."""
        text = np.asarray(tokens)
        for length in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], length)
            matches = np.flatnonzero((windows == text[-length:]).all(axis=1))
            if len(matches):
                after = int(matches[-1]) + length
                return Proposal(text[after : after + count].tolist())
        return Proposal([])


def _likeliest(text: np.ndarray, context: int) -> dict[tuple[int, ...], int]:
    """For each run of `context` tokens the one that followed most often, of equals the smallest."""
    grams = np.lib.stride_tricks.sliding_window_view(text, context + 1)
    unique, counts = np.unique(grams, axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    table: dict[tuple[int, ...], int] = {}
    for row in unique[order].tolist():
        table.setdefault(tuple(row[:-1]), row[-1])
    return table


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))
