"""Attention as it is written down: the whole matrix of scores in memory."""

import torch
from torch import Tensor

from inferlab.errors import InferlabError


def standard_attention(queries: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
    """softmax(q kᵀ / √d) v. All tensors: [batch, heads, tokens, head_dim].

    Raises InferlabError when the shapes do not match.
    """
    check_shapes(queries, keys, values, causal)
    scores = queries @ keys.transpose(-1, -2) * queries.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ values


def check_shapes(queries: Tensor, keys: Tensor, values: Tensor, causal: bool) -> None:
    """Raise InferlabError unless the three fit together: [batch, heads, tokens, head_dim].

    Keys and values have one number of tokens, queries may have another unless `causal`.
    """
    found = ", ".join(str(list(tensor.shape)) for tensor in (queries, keys, values))
    if queries.ndim != 4 or keys.shape != values.shape:
        raise InferlabError(
            "queries, keys and values must be [batch, heads, tokens, head_dim], keys and values "
            f"alike; got {found}"
        )
    tokens = slice(2, 3)
    outer, inner = list(queries.shape), list(keys.shape)
    if outer[:2] != inner[:2] or outer[3] != inner[3]:
        raise InferlabError(f"batch, heads and head_dim of queries and keys differ: {found}")
    if causal and outer[tokens] != inner[tokens]:
        raise InferlabError(f"causal attention needs a key for each query; got {found}")
