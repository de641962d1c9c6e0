"""The tiled forward pass as one Triton kernel: a program a tile of queries, scores in registers.

For CUDA devices; `TRITON_INTERPRET=1`, set before this module is imported, runs it anywhere, slowly
(the tests do). The backward pass is that of `inferlab.attention.tiled`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from inferlab.attention.standard import check_shapes
from inferlab.attention.tiled import KEY_TILE, QUERY_TILE, backward_tiles
from inferlab.errors import InferlabError

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _forward(
    queries,
    keys,
    values,
    output,
    logsumexp,
    query_tokens,
    key_tokens,
    scale,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Tensors are contiguous [heads, tokens, HEAD_DIM]; exponents are to base 2."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    dims = tl.arange(0, HEAD_DIM)
    query_at = (head * query_tokens + rows[:, None]) * HEAD_DIM + dims[None, :]
    real_rows = rows[:, None] < query_tokens
    query = tl.load(queries + query_at, mask=real_rows, other=0.0)

    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, HEAD_DIM], tl.float32)
    end = key_tokens
    if CAUSAL:
        end = tl.minimum(key_tokens, (tl.program_id(0) + 1) * QUERIES)
    for start in range(0, end, KEYS):
        columns = start + tl.arange(0, KEYS)
        key_at = (head * key_tokens + columns[:, None]) * HEAD_DIM + dims[None, :]
        real = columns[:, None] < key_tokens
        key = tl.load(keys + key_at, mask=real, other=0.0)
        value = tl.load(values + key_at, mask=real, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
        seen = columns[None, :] < key_tokens
        if CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - raised)
        weights = tl.exp2(scores - raised[:, None])
        total = total * shrink + tl.sum(weights, 1)
        summed = summed * shrink[:, None]
        summed += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        highest = raised
    tl.store(output + query_at, (summed / total[:, None]).to(query.dtype), mask=real_rows)
    row_at = head * query_tokens + rows
    sums = highest / LOG2_E + tl.log(total)
    tl.store(logsumexp + row_at, sums, mask=rows < query_tokens)


def triton_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    causal: bool,
    query_tile: int = 64,
    key_tile: int = 64,
) -> Tensor:
    """softmax(q kᵀ / √d) v, differentiable. All tensors: [batch, heads, tokens, head_dim].

    Raises InferlabError when the shapes do not match, or head_dim or a tile is not a power of 2 of
    16 or more, as Triton wants them.
    """
    check_shapes(queries, keys, values, causal)
    sizes = {"head_dim": queries.shape[-1], "query_tile": query_tile, "key_tile": key_tile}
    for name, size in sizes.items():
        if size < 16 or size & (size - 1):
            raise InferlabError(f"{name} must be a power of 2, at least 16; got {size}")
    return _Kernel.apply(queries, keys, values, causal, query_tile, key_tile)


class _Kernel(torch.autograd.Function):
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
        queries, keys, values = (tensor.contiguous() for tensor in (queries, keys, values))
        batch, heads, tokens, head_dim = queries.shape
        output = torch.empty_like(queries)
        logsumexp = queries.new_empty(queries.shape[:-1], dtype=torch.float32)
        _forward[(triton.cdiv(tokens, query_tile), batch * heads)](
            *(queries, keys, values, output, logsumexp),
            *(tokens, keys.shape[2], head_dim**-0.5),
            HEAD_DIM=head_dim,
            QUERIES=query_tile,
            KEYS=key_tile,
            CAUSAL=causal,
        )
        context.save_for_backward(queries, keys, values, output, logsumexp)
        context.causal = causal
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = backward_tiles(
            context.saved_tensors, gradient, context.causal, QUERY_TILE, KEY_TILE
        )
        return (*gradients, None, None, None)
