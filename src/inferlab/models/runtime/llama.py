"""The forward pass of the Llama family over a static cache, in plain torch.

One pass takes any number of tokens for each sequence of a batch: a prompt, one token, or a draft to
verify. Sequences may have different lengths, padded on either side.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from inferlab.models.runtime.cache import DTYPES, KVCache, Window
from inferlab.models.runtime.config import LlamaConfig
from inferlab.models.runtime.kernel import Kernel, kernel_for
from inferlab.models.runtime.linear import Linear, Projection
from inferlab.models.runtime.rope import rotate

KERNEL_ROWS = 8
"""Up to so many tokens in all, a pass goes through the compiled kernel."""
Attention = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """One decoder block. Norms: [hidden]; `query_norm`, `key_norm`: [head_dim], Qwen 3 only."""

    attention_norm: Tensor
    qkv: Projection
    output: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None

    @property
    def projections(self) -> tuple[Projection, ...]:
        """All linear layers of the block."""
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True)
class Llama:
    """A model ready to run. `embedding`: [vocabulary, hidden]; `head`: hidden to vocabulary.

    Passes over few tokens use the compiled kernel where there is one, unless `compiled` is false.
    """

    config: LlamaConfig
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear
    compiled: bool = True

    @cached_property
    def kernel(self) -> Kernel | None:
        """The compiled pass over few tokens, if this model and machine have it."""
        return kernel_for(self) if self.compiled else None

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of the weights that are not quantized."""
        return self.norm.dtype

    def new_cache(
        self, batch: int, capacity: int, dtype: str | None = None, window: Window | None = None
    ) -> KVCache:
        """An empty cache; by default in the model's own dtype and with its own window, if any.

        Raises InferlabError for an unknown dtype and a capacity beyond the model's context.
        """
        names = {kind: name for name, kind in DTYPES.items()}
        if window is None and self.config.window:
            window = Window(self.config.window)
        return KVCache(self.config, batch, capacity, dtype or names[self.dtype], window)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: KVCache, real: Tensor | None = None) -> Tensor:
        """Logits of the token after each of `tokens` [batch, n]: [batch, n, vocabulary], fp32."""
        return self.logits(self.hidden(tokens, cache, real))

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """The head on `states` [..., hidden]: [..., vocabulary], fp32."""
        if self.kernel and states.numel() <= KERNEL_ROWS * self.config.hidden:
            return self.kernel.logits(states)
        return self.head(states).float()

    @torch.inference_mode()
    def hidden(
        self,
        tokens: Tensor,
        cache: KVCache,
        real: Tensor | None = None,
        attend: Attention | None = None,
    ) -> Tensor:
        """Final states of `tokens` [batch, n], which continue the cache: [batch, n, hidden].

        `real` [batch, n], bool, is false where a token is padding, on whichever side. `attend`
        stands in for `attention`, with the layer's number before its arguments. Raises
        InferlabError when the cache is full.
        """
        pieces = []
        for start in range(0, tokens.shape[1], cache.chunk):
            piece = slice(start, start + cache.chunk)
            part = None if real is None else real[:, piece]
            pieces.append(self._pass(tokens[:, piece], cache, part, attend))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def _pass(
        self, tokens: Tensor, cache: KVCache, real: Tensor | None, attend: Attention | None
    ) -> Tensor:
        positions, slots = cache.place(tokens.shape[1], real)
        if attend is None and self.kernel and tokens.numel() <= KERNEL_ROWS:
            embeddings = F.embedding(tokens, self.embedding)
            return self.kernel.hidden(embeddings, cache, positions, slots).to(self.dtype)
        cos, sin = (part[:, None].to(self.dtype) for part in self.config.rope.angles(positions))
        mask = cache.visible(positions)
        states = F.embedding(tokens, self.embedding)
        for number, layer in enumerate(self.layers):
            inputs = self._normed(states, layer.attention_norm)
            queries, keys, values = self._heads(layer, inputs, cos, sin)
            cache.write(number, slots, keys, values)
            kept = cache.read(number, self.dtype)
            if attend is None:
                mixed = attention(queries, *kept, mask)
            else:
                mixed = attend(number, queries, *kept, mask)
            states = states + layer.output(mixed.transpose(1, 2).flatten(2))
            gate, up = layer.gate_up(self._normed(states, layer.mlp_norm)).chunk(2, dim=-1)
            states = states + layer.down(F.silu(gate) * up)
        return self._normed(states, self.norm)

    def _heads(
        self, layer: Layer, inputs: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: [batch, heads, tokens, head_dim] each."""
        size = self.config
        heads = layer.qkv(inputs).unflatten(-1, (-1, size.head_dim)).transpose(1, 2)
        queries, keys, values = heads.split((size.heads, size.kv_heads, size.kv_heads), dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = self._normed(queries, layer.query_norm)
            keys = self._normed(keys, layer.key_norm)
        return rotate(queries, cos, sin), rotate(keys, cos, sin), values

    def _normed(self, states: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(states, weight.shape, weight, self.config.norm_epsilon)


def attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention; the query heads of one key head are treated as further queries.

    `queries`: [batch, heads, tokens, head_dim], which is also what it returns; `keys`, `values`:
    [batch, kv_heads, slots, head_dim]; `mask`: [batch, tokens, slots], true where a slot is seen.
    """
    kv_heads, tokens = keys.shape[1], queries.shape[2]
    grouped = queries.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    repeated = mask.repeat(1, grouped.shape[2] // tokens, 1)[:, None]
    mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=repeated)
    return mixed.unflatten(2, (-1, tokens)).flatten(1, 2)
