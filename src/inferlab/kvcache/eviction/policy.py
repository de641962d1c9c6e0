"""What a way to evict tokens is given, and what it answers."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Priorities = Callable[[Tensor, Tensor, int], Tensor]
"""Of `scores` (attention received so far), `positions` (both [inputs, kv_heads, slots]) and the
latest position: how much each slot is worth keeping, of the same shape."""


@dataclass(frozen=True)
class Limits:
    """`recent`: the latest tokens, which heavy hitters leave alone; `sinks`: first tokens that
    stay; `seed` of random choices.
    """

    recent: int
    sinks: int
    seed: int = 0


@dataclass(frozen=True)
class Policy:
    """The slots with the lowest priority go. Without `needs_scores` none are kept."""

    priorities: Priorities
    needs_scores: bool = False
