"""A sliding window with and without anchors, computed by masks over a full cache.

What a bounded cache computes token by token, a mask shows in a few large passes: a token sees the
first `anchors` positions and the latest of the rest, `size` in all (StreamingLLM, Xiao et al.,
arXiv:2309.17453). Positions before a window is full see everything, so they are taken over from
full attention.

Only the distance between a query and an anchor depends on how positions are treated, since among
the recent tokens all move together. `POSITIONS` has the ways in which it can be.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inferlab.errors import lookup
from inferlab.kvcache.weights import attention_weights
from inferlab.models.runtime.cache import DTYPES, KVCache, Window
from inferlab.models.runtime.llama import Attention, Llama, attention
from inferlab.models.runtime.rope import rotate

PASS = 256
"""Tokens of one pass: slots that none of them sees take no part in it."""


def kept(positions: Tensor, size: int, far: int) -> Tensor:
    """Anchors stay where they were; the distance grows with the text."""
    return torch.zeros_like(positions)


def compacted(positions: Tensor, size: int, far: int) -> Tensor:
    """Positions are counted within the cache, so the distance stays below `size` (StreamingLLM)."""
    return (size - 1 - positions).clamp(max=0)


def distant(positions: Tensor, size: int, far: int) -> Tensor:
    """Kept, and `far` tokens later in a stream: as far as a bounded cache would get in time."""
    return torch.where(positions < size, 0, far)


Shift = Callable[[Tensor, int, int], Tensor]
POSITIONS: dict[str, Shift] = {"kept": kept, "compacted": compacted, "distant": distant}
"""How many positions queries seem to move, for anchors alone, by name."""


@dataclass(frozen=True)
class Arm:
    """A window and the way its anchors' positions are treated. Raises InferlabError if unknown."""

    window: Window
    positions: str = "kept"

    def __post_init__(self) -> None:
        lookup(POSITIONS, self.positions, "treatment of positions")

    @property
    def name(self) -> str:
        """w256, w256_anchored, w256_compacted, w256_distant."""
        kind = "_anchored" if self.positions == "kept" else f"_{self.positions}"
        return f"w{self.window.size}" + (kind if self.window.anchors else "")


def full_cache(model: Llama, inputs: int, length: int) -> KVCache:
    """A cache that holds everything, also for a model that has a window of its own."""
    names = {kind: name for name, kind in DTYPES.items()}
    cache = KVCache(model.config, inputs, length, names[model.dtype])
    cache.chunk = PASS
    return cache


def windowed_states(
    model: Llama, tokens: Tensor, arms: Mapping[str, Arm], far: int = 0
) -> dict[str, Tensor]:
    """Final states [inputs, tokens, hidden] of `full` and every arm on `tokens` [inputs, tokens].

    `far`: what `distant` adds to the distance of anchors, in tokens. Raises InferlabError when the
    tokens exceed the model's context.
    """
    cache = full_cache(model, *tokens.shape)
    full = model.hidden(tokens, cache, attend=seen_only)
    states = {"full": full}
    # Widest first: a narrower window needs less of what full attention has left in the cache.
    for name, arm in sorted(arms.items(), key=lambda item: -item[1].window.size):
        size = arm.window.size
        cache.truncate(size)
        cache.window = arm.window
        attend = seen_only if arm.positions == "kept" else shifted(model, cache, arm, far)
        rest = model.hidden(tokens[:, size:], cache, attend=attend)
        states[name] = torch.cat((full[:, :size], rest), dim=1)
    return states


def seen_only(layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The runtime's attention without the slots that no query sees; inputs of equal length."""
    seen = mask[0].any(0)
    return attention(queries, keys[:, :, seen], values[:, :, seen], mask[:, :, seen])


def shifted(model: Llama, cache: KVCache, arm: Arm, far: int) -> Attention:
    """Attention in which anchors see queries turned to other positions than the recent keys do.

    Keys get twice the channels, anchors in the second half and the others in the first; queries
    stand in both halves, each with its own rotation, so one product gives every score.
    """
    move = POSITIONS[arm.positions]
    frequencies = model.config.rope.frequencies

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        seen = mask[0].any(0)
        keys, values, mask = keys[:, :, seen], values[:, :, seen], mask[0][:, seen]
        last = int(cache.lengths[0])
        positions = torch.arange(last - queries.shape[2], last)
        angles = move(positions, arm.window.size, far)[:, None] * frequencies
        turned = rotate(queries.float(), angles.cos(), angles.sin()).to(queries.dtype)
        anchor = (torch.arange(len(seen))[seen] < arm.window.anchors)[:, None]
        wide_keys = torch.cat((keys.masked_fill(anchor, 0), keys.masked_fill(~anchor, 0)), -1)
        wide_queries = torch.cat((queries, turned), -1).unflatten(1, (keys.shape[1], -1))
        mixed = F.scaled_dot_product_attention(
            wide_queries.flatten(2, 3),
            wide_keys,
            F.pad(values, (0, values.shape[-1])),
            attn_mask=mask.repeat(wide_queries.shape[2], 1),
            scale=values.shape[-1] ** -0.5,
        )
        own = mixed[..., : values.shape[-1]].unflatten(2, (-1, queries.shape[2]))
        return own.flatten(1, 2)

    return attend


def anchor_share(model: Llama, tokens: Tensor, anchors: int, queries: int) -> float:
    """The share of full attention that the last `queries` tokens pay to the first `anchors`.

    A mean over layers, heads and queries.
    """
    cache = full_cache(model, *tokens.shape)
    before = tokens.shape[1] - queries
    model.hidden(tokens[:, :before], cache, attend=seen_only)
    shares = []

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        weights = attention_weights(queries, keys, mask[0])
        shares.append(float(weights[..., :anchors].sum(-1).mean()))
        return attention(queries, keys, values, mask)

    model.hidden(tokens[:, before:], cache, attend=attend)
    return sum(shares) / len(shares)


def bounded_states(model: Llama, tokens: Tensor, window: Window) -> tuple[Tensor, KVCache]:
    """Final states of `tokens` [inputs, tokens], decoded one by one by a real bounded cache."""
    cache = model.new_cache(*tokens.shape, window=window)
    states = [model.hidden(token, cache) for token in tokens.split(1, dim=1)]
    return torch.cat(states, dim=1), cache
