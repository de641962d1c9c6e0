"""A cache that every KV head cuts back to a budget of its own, pass by pass.

Query heads that share a KV head share its tokens, so they decide together: their attention is
added up. After each pass of up to `block` tokens a head evicts down to `budget` − `block`, so that
with the tokens of the next pass it never holds more than the budget; with a block of one token
that is eviction at every step. Tokens of a pass see each other and survive it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferlab.errors import InferlabError
from inferlab.kvcache.eviction.policy import Policy
from inferlab.kvcache.weights import attention_weights
from inferlab.models.runtime.config import LlamaConfig
from inferlab.models.runtime.llama import Llama, attention
from inferlab.models.runtime.rope import rotate


@dataclass(frozen=True)
class Arm:
    """One of several ways that run side by side on the same tokens.

    Without a policy nothing is evicted. `compacted`: a token's position is its place among those
    that its head holds; otherwise it keeps the position at which it came.
    """

    policy: Policy | None
    compacted: bool = False

    @property
    def scored(self) -> bool:
        """Whether attention is accumulated. A cache without a policy may yet hand scores on."""
        return self.policy is None or self.policy.needs_scores


class EvictingCache:
    """Keys and values of `arms` × inputs sequences of one length, as the runtime's pass wants them.

    `keys`, `values`: [layers, arms · inputs, kv_heads, budget, head_dim], rotated by the position
    at which a token came; `positions` [layers, arms · inputs, kv_heads, budget] has it; `scores`,
    of the same shape, fp32: the attention that the token has received.
    """

    def __init__(
        self,
        config: LlamaConfig,
        arms: Sequence[Arm],
        inputs: int,
        budget: int,
        block: int,
        dtype: torch.dtype,
    ) -> None:
        """Raises InferlabError when a budget leaves no room for what a block evicts."""
        bounded = any(arm.policy for arm in arms)
        if bounded and budget < 2 * block:
            raise InferlabError(
                f"a budget of {budget} tokens must be at least twice the {block} that come at once"
            )
        self.config, self.arms, self.inputs = config, tuple(arms), inputs
        self.budget, self.chunk = budget, block
        self.kept = budget - block if bounded else budget
        self.held = self.fresh = self.length = 0
        shape = (config.layers, len(arms) * inputs, config.kv_heads, budget)
        self.keys, self.values = (torch.zeros(*shape, config.head_dim, dtype=dtype) for _ in "kv")
        self.positions = torch.zeros(shape, dtype=torch.long)
        self.scores = torch.zeros(shape)

    def branch(self, arms: Sequence[Arm], budget: int, block: int) -> "EvictingCache":
        """A cache of `arms`, each beginning with what this one, of a single arm, holds.

        Raises InferlabError when that is more than the arms may keep.
        """
        size = self.inputs
        new = EvictingCache(self.config, arms, size, budget, block, self.keys.dtype)
        if self.held > new.kept:
            raise InferlabError(f"{self.held} tokens are held, {new.kept} may be kept")
        new.held, new.length = self.held, self.length
        for name in ("keys", "values", "positions", "scores"):
            for arm in range(len(arms)):
                target = getattr(new, name)[:, arm * size : (arm + 1) * size, :, : self.held]
                target.copy_(getattr(self, name)[:, :, :, : self.held])
        return new

    def place(self, tokens: int, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Positions and slots of `tokens` more columns: [arms · inputs, tokens] each."""
        if self.held + tokens > self.budget:
            raise InferlabError(f"the cache of {self.budget} tokens is full")
        columns = torch.arange(tokens).expand(len(self.arms) * self.inputs, -1)
        self.fresh, self.length = tokens, self.length + tokens
        return columns + self.length - tokens, columns + self.held

    def visible(self, positions: Tensor) -> Tensor:
        """Everything held, and of the new tokens those up to each: [1, tokens, slots]."""
        mask = torch.ones(positions.shape[1], self.held + self.fresh, dtype=torch.bool)
        return mask.tril(self.held)[None]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `keys` and `values` [arms · inputs, kv_heads, tokens, head_dim] behind the rest."""
        new = slice(self.held, self.held + self.fresh)
        self.keys[layer, :, :, new] = keys
        self.values[layer, :, :, new] = values
        self.positions[layer, :, :, new] = torch.arange(self.length - self.fresh, self.length)
        self.scores[layer, :, :, new] = 0

    def read(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [arms · inputs, kv_heads, held + fresh, head_dim] of a layer."""
        used = slice(self.held + self.fresh)
        return self.keys[layer, :, :, used].to(dtype), self.values[layer, :, :, used].to(dtype)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        """The runtime's attention, which keeps scores where they are needed, and then evicts."""
        mixed = []
        for number, arm in enumerate(self.arms):
            rows = slice(number * self.inputs, (number + 1) * self.inputs)
            own = queries[rows], keys[rows]
            if arm.compacted:
                own = self._compacted(layer, rows, *own)
            if arm.scored:
                mixed.append(self._scored(layer, rows, *own, values[rows], mask))
            else:
                mixed.append(attention(*own, values[rows], mask.expand(self.inputs, -1, -1)))
            if arm.policy:
                self._evict(layer, rows, arm.policy)
        if layer == self.config.layers - 1:
            self.held = min(self.held + self.fresh, self.kept)
        return torch.cat(mixed)

    def _scored(
        self, layer: int, rows: slice, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        weights = attention_weights(queries, keys, mask[0])
        self.scores[layer, rows, :, : keys.shape[2]] += weights.sum(2)
        mixed = weights.to(values.dtype) @ values
        return mixed.unflatten(2, (-1, queries.shape[2])).flatten(1, 2)

    def _evict(self, layer: int, rows: slice, policy: Policy) -> None:
        """The lowest of what was held give their slots to those tokens that stand beyond `kept`."""
        used = self.held + self.fresh
        if used <= self.kept:
            return
        held = (layer, rows, slice(None), slice(self.held))
        priorities = policy.priorities(self.scores[held], self.positions[held], self.length - 1)
        freed = priorities.topk(used - self.kept, largest=False, sorted=False).indices
        for tensor in (self.keys, self.values, self.positions, self.scores):
            own = tensor[layer, rows]
            index = freed if own.ndim == 3 else freed[..., None].expand(*freed.shape, own.shape[-1])
            own.scatter_(2, index, own[:, :, self.kept : used].clone())

    def _compacted(
        self, layer: int, rows: slice, queries: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Turn keys and queries on to the positions that they have among the tokens held."""
        positions = self.positions[layer, rows, :, : keys.shape[2]]
        ranks = positions.argsort(-1).argsort(-1)
        moved = self.held + self.fresh - self.length
        turned = self._turned(queries, torch.tensor(moved)), self._turned(keys, ranks - positions)
        return turned

    def _turned(self, heads: Tensor, by: Tensor) -> Tensor:
        angles = by[..., None] * self.config.rope.frequencies
        return rotate(heads.float(), angles.cos(), angles.sin()).to(heads.dtype)


@torch.inference_mode()
def run(model: Llama, cache: EvictingCache, tokens: Tensor) -> Tensor:
    """Final states [arms · inputs, tokens, hidden] of `tokens` [inputs, tokens] in every arm.

    They continue the cache, `cache.chunk` tokens a pass.
    """
    rows = tokens.repeat(len(cache.arms), 1)
    return model.hidden(rows, cache, attend=cache.attend)  # type: ignore[arg-type]
