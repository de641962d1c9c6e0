"""Attention whose query heads share keys and values: MHA, GQA and MQA as one layer.

With a KV head for each head it is multi-head attention (Vaswani et al., 2017; arXiv:1706.03762),
with one for all multi-query attention (Shazeer, 2019; arXiv:1911.02150), between them grouped-query
attention (Ainslie et al., 2023; arXiv:2305.13245). Positions are left out: rotary embeddings turn
the keys of all heads alike, so pooling heads before or after them is the same.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from inferlab.errors import InferlabError

QUERY_ROWS = 128
"""Queries at a time: bounds the scores that are held, and skips keys that none of them sees."""


class LayerCache:
    """Keys and values of one layer, [batch, kv_heads, capacity, head_dim], the first `used` set."""

    def __init__(self, keys: Tensor, values: Tensor, used: int = 0) -> None:
        self.keys, self.values, self.used = keys, values, used

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take in [batch, kv_heads, tokens, head_dim]; all that is set, new ones included.

        Raises InferlabError when the cache is full.
        """
        end = self.used + keys.shape[2]
        if end > self.keys.shape[2]:
            raise InferlabError(f"{end} tokens do not fit a cache of {self.keys.shape[2]}")
        self.keys[:, :, self.used : end] = keys
        self.values[:, :, self.used : end] = values
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    @property
    def bytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True)
class AttentionLayer:
    """`query`: [heads · head_dim, hidden]; `key`, `value`: [kv_heads · head_dim, hidden];
    `output`: [hidden, heads · head_dim]."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    head_dim: int

    def __call__(self, states: Tensor, cache: LayerCache) -> Tensor:
        """`states` [batch, tokens, hidden], which continue the cache, to the same shape."""
        queries, keys, values = (
            F.linear(states, weight).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for weight in (self.query, self.key, self.value)
        )
        mixed = grouped_attention(queries, *cache.append(keys, values))
        return F.linear(mixed.transpose(1, 2).flatten(2), self.output)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return len(self.key) // self.head_dim

    def pooled(self, kv_heads: int) -> "AttentionLayer":
        """The layer with `kv_heads` heads, each the mean of a group of those that it has.

        Raises InferlabError when they cannot be shared out evenly.
        """
        key, value = (
            pool_heads(weight.unflatten(0, (-1, self.head_dim)), 0, kv_heads).flatten(0, 1)
            for weight in (self.key, self.value)
        )
        return replace(self, key=key, value=value)

    def new_cache(self, batch: int, capacity: int) -> LayerCache:
        """An empty cache for `capacity` tokens of each sequence."""
        shape = (batch, self.kv_heads, capacity, self.head_dim)
        return LayerCache(self.key.new_zeros(shape), self.key.new_zeros(shape))


def grouped_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal softmax attention; a query head reads the KV head of its group.

    `queries` [batch, heads, n, head_dim] belong to the last n of the m tokens of `keys`, `values`
    [batch, kv_heads, m, head_dim]; returns the shape of `queries`. Keys are not repeated: the heads
    of a group are further rows of queries. Raises InferlabError when the shapes do not match.
    """
    _check(queries, keys, values)
    (kv_heads, seen), tokens = keys.shape[1:3], queries.shape[2]
    grouped = (queries * queries.shape[-1] ** -0.5).unflatten(1, (kv_heads, -1))
    output = torch.empty_like(queries)
    for start in range(0, tokens, QUERY_ROWS):
        stop = min(start + QUERY_ROWS, tokens)
        end = seen - tokens + stop
        part = grouped[:, :, :, start:stop]
        scores = part.flatten(2, 3) @ keys[:, :, :end].transpose(-1, -2)
        if stop - start > 1:
            ahead = torch.ones(stop - start, end, dtype=torch.bool, device=scores.device)
            ahead = ahead.triu_(seen - tokens + start + 1)
            scores.unflatten(2, part.shape[2:4]).masked_fill_(ahead, -torch.inf)
        mixed = scores.softmax(-1) @ values[:, :, :end]
        output[:, :, start:stop] = mixed.unflatten(2, part.shape[2:4]).flatten(1, 2)
    return output


def pool_heads(heads: Tensor, dim: int, groups: int) -> Tensor:
    """Means of neighbouring heads, which stand along `dim`: `groups` of them are left.

    Raises InferlabError when the heads cannot be shared out evenly.
    """
    count = heads.shape[dim]
    if groups < 1 or count % groups:
        raise InferlabError(f"{count} heads cannot be pooled to {groups}: groups would be unequal")
    return heads.unflatten(dim, (groups, -1)).mean(dim + 1)


def _check(queries: Tensor, keys: Tensor, values: Tensor) -> None:
    found = ", ".join(str(list(tensor.shape)) for tensor in (queries, keys, values))
    if queries.ndim != 4 or keys.ndim != 4 or keys.shape != values.shape:
        raise InferlabError(
            "queries, keys and values must be [batch, heads, tokens, head_dim], keys and values "
            f"alike; got {found}"
        )
    if queries.shape[0] != keys.shape[0] or queries.shape[3] != keys.shape[3]:
        raise InferlabError(f"batch and head_dim of queries and keys differ: {found}")
    if queries.shape[1] % keys.shape[1]:
        raise InferlabError(
            f"{queries.shape[1]} heads cannot share {keys.shape[1]} KV heads evenly: {found}"
        )
    if queries.shape[2] > keys.shape[2]:
        raise InferlabError(f"each query needs its own key at least: {found}")
