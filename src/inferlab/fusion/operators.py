"""Linear + ReLU and softmax + dropout, as two operators each and fused by hand."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from inferlab.errors import InferlabError

PRODUCT_ROWS = 256
"""Rows of a product at a time: many enough to be worth reading the weights again."""
TILE_VALUES = 2**16
"""Scores at a time: few enough to stay in a core's cache from one operation to the next."""


def linear_relu(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """max(x Wᵀ + b, 0). `inputs`: [rows, in], `weight`: [out, in], `bias`: [out]; [rows, out]."""
    return F.relu(F.linear(inputs, weight, bias))


def linear_relu_fused(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same, differentiable once, a tile of rows at a time.

    ReLU overwrites the product while it is in the cache. Its gradient is read off its result, and
    is never held as a whole: each tile of it goes into the gradients of the three inputs at once.
    """
    return _LinearRelu.apply(inputs, weight, bias)


def softmax_dropout(scores: Tensor, rate: float, training: bool) -> Tensor:
    """Softmax over the last dimension, then dropout (Srivastava et al., 2014): zeros at `rate`."""
    return F.dropout(F.softmax(scores, -1), rate, training)


def softmax_dropout_fused(scores: Tensor, rate: float) -> Tensor:
    """The same in training, in one pass over tiles of rows, differentiable once.

    What the gradient needs, weights and mask, is kept as one tensor: a weight is never negative,
    so its sign says whether it was dropped. Raises InferlabError for a rate outside [0, 1).
    """
    if not 0 <= rate < 1:
        raise InferlabError(f"rate of dropout must be at least 0 and below 1; got {rate:g}")
    return _SoftmaxDropout.apply(scores, rate)


def softmax_(scores: Tensor) -> Tensor:
    """The same in inference, where dropout does nothing: `scores` overwritten by their softmax.

    Raises InferlabError when the scores are in a graph of gradients or not contiguous.
    """
    if scores.requires_grad and torch.is_grad_enabled():
        raise InferlabError("softmax_ overwrites its scores, so they cannot have a gradient")
    if not scores.is_contiguous():
        raise InferlabError("softmax_ wants contiguous scores, to overwrite them row by row")
    rows = scores.view(-1, scores.shape[-1])
    for tile in _score_tiles(rows):
        part = rows[tile]
        part.sub_(part.amax(-1, keepdim=True)).exp_()
        part.div_(part.sum(-1, keepdim=True))
    return scores


class _LinearRelu(torch.autograd.Function):
    @staticmethod
    def forward(context: FunctionCtx, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        output = inputs.new_empty(len(inputs), len(weight))
        for tile in _tiles(len(inputs), PRODUCT_ROWS):
            torch.addmm(bias, inputs[tile], weight.t(), out=output[tile]).relu_()
        context.save_for_backward(inputs, weight, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs, weight, output = context.saved_tensors
        for_inputs, for_weight = torch.empty_like(inputs), torch.zeros_like(weight)
        for_bias = weight.new_zeros(len(weight))
        for tile in _tiles(len(inputs), PRODUCT_ROWS):
            slope = gradient[tile] * (output[tile] > 0)
            torch.mm(slope, weight, out=for_inputs[tile])
            for_weight.addmm_(slope.t(), inputs[tile])
            for_bias += slope.sum(0)
        return for_inputs, for_weight, for_bias


class _SoftmaxDropout(torch.autograd.Function):
    @staticmethod
    def forward(context: FunctionCtx, scores: Tensor, rate: float) -> Tensor:
        rows = scores.reshape(-1, scores.shape[-1]).contiguous()
        signed, output = torch.empty_like(rows), torch.empty_like(rows)
        for tile in _score_tiles(rows):
            weights = torch.softmax(rows[tile], -1, out=signed[tile])
            kept = torch.empty_like(weights).bernoulli_(1 - rate).div_(1 - rate)
            torch.mul(weights, kept, out=output[tile])
            weights.copysign_(kept.sub_(0.5))
        context.save_for_backward(signed)
        context.rate = rate
        return output.view(scores.shape)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """y ⊙ (g − Σ g ⊙ y) of softmax, for weights y and gradients g that dropout let through."""
        (signed,) = context.saved_tensors
        given, slopes = gradient.reshape(signed.shape), torch.empty_like(signed)
        for tile in _score_tiles(signed):
            weights, slope = signed[tile].abs(), slopes[tile]
            torch.mul(given[tile], signed[tile] > 0, out=slope)
            slope.mul_(weights).div_(1 - context.rate)
            slope.addcmul_(weights, slope.sum(-1, keepdim=True), value=-1)
        return slopes.view(gradient.shape), None


def _score_tiles(rows: Tensor) -> Iterator[slice]:
    return _tiles(len(rows), max(1, TILE_VALUES // rows.shape[1]))


def _tiles(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))
