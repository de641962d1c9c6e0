"""Exact attention in tiles: FlashAttention (Dao et al., 2022; arXiv:2205.14135) in plain torch.

The scores are made one tile at a time and never stored. A row's softmax is kept up to date while
tiles of keys go by: its maximum so far m, its sum of exponents l, its unnormalised output. What the
backward pass needs of the scores it makes again from the log-sum-exp of each row.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from inferlab.attention.standard import check_shapes
from inferlab.errors import InferlabError

QUERY_TILE, KEY_TILE = 128, 128


def tiled_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    causal: bool,
    query_tile: int = QUERY_TILE,
    key_tile: int = KEY_TILE,
) -> Tensor:
    """softmax(q kᵀ / √d) v, differentiable. All tensors: [batch, heads, tokens, head_dim].

    Raises InferlabError when the shapes do not match or a tile is not positive.
    """
    check_shapes(queries, keys, values, causal)
    for name, tile in (("query_tile", query_tile), ("key_tile", key_tile)):
        if tile < 1:
            raise InferlabError(f"{name} must be at least 1; got {tile}")
    return _Tiled.apply(queries, keys, values, causal, query_tile, key_tile)


def forward_tiles(
    queries: Tensor, keys: Tensor, values: Tensor, causal: bool, query_tile: int, key_tile: int
) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of each row of scores [batch, heads, tokens]."""
    scale = queries.shape[-1] ** -0.5
    output = torch.empty_like(queries)
    logsumexp = queries.new_empty(queries.shape[:-1])
    for rows in _tiles(queries.shape[2], query_tile):
        query = queries[:, :, rows] * scale
        highest = query.new_full(query.shape[:-1], -torch.inf)[..., None]
        total = torch.zeros_like(highest)
        summed = torch.zeros_like(query)
        for columns in _key_tiles(rows, keys.shape[2], key_tile, causal):
            scores = _scores(query, keys, rows, columns, causal)
            raised = torch.maximum(highest, scores.amax(-1, keepdim=True))
            shrink = (highest - raised).exp_()
            weights = scores.sub_(raised).exp_()
            total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
            summed.mul_(shrink).add_(weights @ values[:, :, columns])
            highest = raised
        output[:, :, rows] = summed.div_(total)
        logsumexp[:, :, rows] = total.log_().add_(highest)[..., 0]
    return output, logsumexp


def backward_tiles(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    gradient: Tensor,
    causal: bool,
    query_tile: int,
    key_tile: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values from that of the output (section 3.1, appendix B).

    `saved`: queries, keys, values, output, and the rows' log-sum-exp.
    """
    queries, keys, values, output, logsumexp = saved
    scale = queries.shape[-1] ** -0.5
    for_queries, for_keys, for_values = (torch.zeros_like(t) for t in (queries, keys, values))
    products = (gradient * output).sum(-1, keepdim=True)
    for rows in _tiles(queries.shape[2], query_tile):
        query, given = queries[:, :, rows] * scale, gradient[:, :, rows]
        for columns in _key_tiles(rows, keys.shape[2], key_tile, causal):
            scores = _scores(query, keys, rows, columns, causal)
            weights = scores.sub_(logsumexp[:, :, rows, None]).exp_()
            for_values[:, :, columns] += weights.transpose(-1, -2) @ given
            for_weights = given @ values[:, :, columns].transpose(-1, -2)
            for_scores = for_weights.sub_(products[:, :, rows]).mul_(weights)
            for_queries[:, :, rows] += for_scores @ keys[:, :, columns] * scale
            for_keys[:, :, columns] += for_scores.transpose(-1, -2) @ query
    return for_queries, for_keys, for_values


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        context: FunctionCtx,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        causal: bool,
        query_tile: int,
        key_tile: int,
    ) -> Tensor:
        settings = (causal, query_tile, key_tile)
        output, logsumexp = forward_tiles(queries, keys, values, *settings)
        context.save_for_backward(queries, keys, values, output, logsumexp)
        context.settings = settings
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = backward_tiles(context.saved_tensors, gradient, *context.settings)
        return (*gradients, None, None, None)


def _tiles(tokens: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _key_tiles(rows: slice, tokens: int, size: int, causal: bool) -> Iterator[slice]:
    """Tiles of keys; those that a causal query tile does not see at all are left out."""
    return _tiles(min(rows.stop, tokens) if causal else tokens, size)


def _scores(query: Tensor, keys: Tensor, rows: slice, columns: slice, causal: bool) -> Tensor:
    """One tile of scores of scaled queries: [batch, heads, rows, columns]."""
    scores = query @ keys[:, :, columns].transpose(-1, -2)
    if causal and columns.stop > rows.start + 1:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores.masked_fill_(ahead.triu_(rows.start - columns.start + 1), -torch.inf)
    return scores
