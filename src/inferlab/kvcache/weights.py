"""Attention with its weights in the open, for what needs to see them."""

import torch
from torch import Tensor


def attention_weights(queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """softmax(Q·Kᵀ/√d) in fp32, where `mask` [tokens, slots] is true.

    `queries`: [batch, heads, tokens, head_dim]; `keys`: [batch, kv_heads, slots, head_dim]. The
    query heads of a KV head are treated as further queries, as in the runtime's attention: returns
    [batch, kv_heads, group · tokens, slots], whose rows sum to 1.
    """
    grouped = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3).float()
    scores = grouped * queries.shape[-1] ** -0.5 @ keys.float().transpose(-1, -2)
    hidden = ~mask.repeat(scores.shape[-2] // len(mask), 1)
    return scores.masked_fill_(hidden, -torch.inf).softmax(-1)
