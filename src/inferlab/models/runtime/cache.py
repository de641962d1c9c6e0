"""The key and value cache: allocated once, written in place, in floating point or 8 bits.

A cache may be bounded: it then keeps the first `anchors` positions and the latest of the rest, and
a token sees `size` positions in all, the anchors and itself among them (Mistral's sliding window
without anchors, StreamingLLM of Xiao et al., 2023, with them). Keys keep the positions that they
were rotated by. What a query may see is read off the positions of the slots, whatever lies where.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from inferlab.errors import InferlabError, lookup
from inferlab.models.runtime.config import LlamaConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
EMPTY = -1
CHUNK = 64
"""Tokens that one pass over a bounded cache may bring: so many slots it has beyond its window."""


@dataclass(frozen=True)
class Window:
    """How far a token sees: the first `anchors` positions, then the latest, `size` in all."""

    size: int
    anchors: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.anchors < self.size:
            raise InferlabError(
                f"window {self.size} must be larger than its anchors {self.anchors}: "
                "it holds them and at least the token itself"
            )

    @property
    def recent(self) -> int:
        """Positions besides the anchors, the token itself included."""
        return self.size - self.anchors


class KVCache:
    """Keys and values of a batch of sequences, each at its own length.

    `keys`, `values`: [layers, batch, kv_heads, slots + 1, head_dim]; for int8 also `key_scales`,
    `value_scales` [layers, batch, kv_heads, slots + 1], one a token and head. `positions`
    [batch, slots + 1] says which position a slot holds, EMPTY for none; `lengths` [batch] is how
    many tokens a sequence has, `reached` the most it ever had. The one slot beyond the rest takes
    what padding writes and stays EMPTY.
    """

    def __init__(
        self,
        config: LlamaConfig,
        batch: int,
        capacity: int,
        dtype: str = "bf16",
        window: Window | None = None,
    ) -> None:
        """`capacity`: positions that a sequence may reach; a window bounds the slots it takes.

        Raises InferlabError for an unknown dtype and when the model's context is shorter.
        """
        if capacity > config.context:
            raise InferlabError(
                f"{capacity} positions do not fit the model's context of {config.context}"
            )
        kind = lookup(DTYPES, dtype, "dtype of the cache")
        self.capacity, self.window = capacity, window
        self.slots = min(capacity, window.size + CHUNK - 1) if window else capacity
        self.chunk = capacity if self.slots == capacity else CHUNK
        self.used = 0
        shape = (config.layers, batch, config.kv_heads, self.slots + 1)
        self.keys, self.values = (torch.zeros(*shape, config.head_dim, dtype=kind) for _ in "kv")
        self.key_scales = self.value_scales = None
        if kind == torch.int8:
            self.key_scales, self.value_scales = torch.zeros(shape), torch.zeros(shape)
        self.positions = torch.full((batch, self.slots + 1), EMPTY)
        self.lengths = torch.zeros(batch, dtype=torch.long)
        self.reached = self.lengths

    @property
    def bytes(self) -> int:
        """Bytes of keys, values and scales."""
        kept = (self.keys, self.values, self.key_scales, self.value_scales)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def place(self, tokens: int, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Take in `tokens` more columns: their positions and slots, [batch, tokens] each.

        `real` [batch, tokens], bool: false for padding, which gets the position EMPTY. Raises
        InferlabError, and takes in nothing, when a sequence would outgrow the cache.
        """
        if real is None:
            positions = self.lengths[:, None] + torch.arange(tokens)
        else:
            positions = self.lengths[:, None] + real.cumsum(1) - 1
            positions = positions.masked_fill(~real, EMPTY)
        longest = int(positions.max()) + 1
        if longest > self.capacity:
            raise InferlabError(
                f"the cache of {self.capacity} positions is full: a sequence of {longest} tokens "
                "needs a larger one"
            )
        slots = self._slots(positions)
        self.positions.scatter_(1, slots, positions)
        self.lengths = torch.maximum(self.lengths, positions.amax(1) + 1)
        self.reached = torch.maximum(self.reached, self.lengths)
        self.used = max(self.used, min(longest, self.slots))
        return positions, slots

    def visible(self, positions: Tensor) -> Tensor:
        """Which slots the queries at `positions` [batch, tokens] see: [batch, tokens, used], bool.

        Padding sees everything: what it computes is never used, but must stay finite.
        """
        query, key = positions[..., None], self.positions[:, None, : self.used]
        seen = (key != EMPTY) & (key <= query)
        if self.window:
            seen &= (key < self.window.anchors) | (key > query - self.window.recent)
        return seen | (query == EMPTY)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `keys` and `values` [batch, kv_heads, tokens, head_dim] in `slots`."""
        rows = torch.arange(len(slots))[:, None]
        for kept, scales, given in (
            (self.keys, self.key_scales, keys),
            (self.values, self.value_scales, values),
        ):
            given = given.transpose(1, 2)
            if scales is not None:
                given, scale = quantize_heads(given)
                scales[layer][rows, :, slots] = scale
            kept[layer][rows, :, slots] = given.to(kept.dtype)

    def read(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All used slots of a layer: keys and values [batch, kv_heads, used, head_dim]."""
        keys, values = (kept[layer, :, :, : self.used] for kept in (self.keys, self.values))
        if self.key_scales is not None and self.value_scales is not None:
            keys = keys * self.key_scales[layer, :, :, : self.used, None]
            values = values * self.value_scales[layer, :, :, : self.used, None]
        return keys.to(dtype), values.to(dtype)

    def truncate(self, lengths: Tensor | int) -> None:
        """Forget what lies beyond `lengths` (one for all, or [batch]), as after rejected drafts.

        Raises InferlabError when a bounded cache has overwritten what would be seen from there.
        """
        lengths = torch.minimum(self.lengths, torch.as_tensor(lengths))
        back = self.reached - lengths
        if bool(((self.reached > self.slots) & (back > self.chunk)).any()):
            raise InferlabError(
                f"a bounded cache goes back {self.chunk} tokens from the furthest it has seen; "
                f"asked for {int(back.max())}"
            )
        self.positions[self.positions >= lengths[:, None]] = EMPTY
        self.lengths = lengths

    def _slots(self, positions: Tensor) -> Tensor:
        anchors = self.window.anchors if self.window else 0
        ring = anchors + (positions - anchors) % (self.slots - anchors)
        slots = torch.where(positions < anchors, positions, ring)
        return torch.where(positions == EMPTY, self.slots, slots)


def quantize_heads(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 codes of `vectors` [..., head_dim], and a scale for each: [...], fp32, max|v| / 127."""
    scale = vectors.float().abs().amax(-1) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return (vectors / scale[..., None]).round().to(torch.int8), scale
