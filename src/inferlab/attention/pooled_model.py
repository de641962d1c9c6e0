"""A real model's K/V heads pooled to one a layer: outputs on the same input, and perplexity.

Keys and values are pooled as they stand in the cache. Projection and rotation are linear and alike
for all heads, so for the Llama family this is the same as pooling the weights.

What a head's values mean depends on its own coordinates: turn them by any rotation, turn the output
projection back, and the layer is unchanged. Means of heads are not. Values are `aligned` when
each head's are turned to be as close as possible to the first's (orthogonal Procrustes, Schönemann,
1966). Keys allow no such freedom, since rotary positions fix their coordinates.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from inferlab import params as parameters
from inferlab.attention.pooling import Part, cosine, replaced
from inferlab.errors import InferlabError
from inferlab.models.runtime.llama import Attention, Llama, attention

LOGIT_ROWS = 512
"""Rows of logits at a time: those of whole windows would be the largest tensor by far."""


@parameters.section
class RealModelParams:
    """The block `model` of the section `attention_variants`."""

    windows: Annotated[int, Field(ge=2)]
    tokens: Annotated[int, Field(ge=2)]


def heldout(windows: Tensor, params: RealModelParams) -> Tensor:
    """The windows [windows, tokens] to run. Raises InferlabError when there are fewer."""
    if len(windows) < params.windows or windows.shape[1] < params.tokens:
        raise InferlabError(
            f"attention_variants wants {params.windows} windows of {params.tokens} tokens, but "
            f"{len(windows)} of {windows.shape[1]} were prepared; lower "
            "attention_variants.model.windows or .tokens, or raise prepare.heldout_windows"
        )
    return windows[: params.windows, : params.tokens].long()


class Comparison:
    """Stands in for attention: returns the layer's own, and notes what pooling would have given.

    `rows`, one a layer: cosine of the layer's output with pooled keys, values, values aligned, and
    keys and values; and the share of the mean square of keys and values that their means over heads
    keep (r of `inferlab.attention.pooling`; 1/kv_heads for independent heads, 1 for equal ones).
    """

    def __init__(self, model: Llama) -> None:
        self.model = model
        self.rows: list[dict[str, Any]] = []

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        """As `attention`, with the layer's number before its arguments."""
        project = self.model.layers[layer].output
        own = attention(queries, keys, values, mask)
        exact = project(own.transpose(1, 2).flatten(2))
        row: dict[str, Any] = {"layer": layer}
        for name, pool in COMPARED.items():
            mixed = pool(queries, keys, values, mask)
            row[f"cosine_{name}"] = cosine(exact, project(mixed.transpose(1, 2).flatten(2)))
        row |= {"kept_keys": kept(keys), "kept_values": kept(values)}
        row["kept_values_aligned"] = kept(values @ turns(values))
        self.rows.append(row)
        return own


def pooled(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, part: Part, aligned: bool = False
) -> Tensor:
    """As `attention`, with `part` of the cache the mean over its heads."""
    if not aligned:
        return attention(queries, *replaced(keys, values, part, 1), mask)
    rotations = turns(values)
    mixed = attention(queries, *replaced(keys, values @ rotations, part, 1), mask)
    by_head = mixed.unflatten(1, (keys.shape[1], -1)) @ rotations.mT[:, None]
    return by_head.flatten(1, 2)


def first_head(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """As `attention`, every query reading the first head of keys and values."""
    return attention(queries, keys[:, :1], values[:, :1], mask)


def turns(heads: Tensor) -> Tensor:
    """Rotations [heads, head_dim, head_dim] of `heads` [batch, heads, tokens, head_dim] that bring
    each as close to the first as a rotation can."""
    flat = heads.transpose(0, 1).flatten(1, 2)
    left, _, right = torch.linalg.svd(flat.mT @ flat[0])
    return left @ right


def kept(heads: Tensor) -> float:
    """Mean square of the mean over heads, over that of `heads` [batch, heads, tokens, head_dim]."""
    return float(heads.mean(1).square().mean() / heads.square().mean())


Pool = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
COMPARED: dict[str, Pool] = {
    "keys": partial(pooled, part="keys"),
    "values": partial(pooled, part="values"),
    "values_aligned": partial(pooled, part="values", aligned=True),
    "both": partial(pooled, part="both"),
}
ARMS: dict[str, Pool] = {
    "keys": COMPARED["keys"],
    "values": COMPARED["values"],
    "values aligned": COMPARED["values_aligned"],
    "both": COMPARED["both"],
    "both, values aligned": partial(pooled, part="both", aligned=True),
    "both, first head": first_head,
}


def from_layer(first: int, pool: Pool) -> Attention:
    """`pool` in the layers from `first` on, attention as it is before."""

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return (pool if layer >= first else attention)(queries, keys, values, mask)

    return attend


@torch.inference_mode()
def window_nats(model: Llama, tokens: Tensor, attend: Attention | None = None) -> Tensor:
    """Mean −log p of each window's tokens but the first: fp64 [windows]; `tokens` [windows, n]."""
    cache = model.new_cache(*tokens.shape)
    states = model.hidden(tokens, cache, attend=attend)[:, :-1].flatten(0, 1)
    pairs = zip(states.split(LOGIT_ROWS), tokens[:, 1:].flatten().split(LOGIT_ROWS), strict=True)
    nats = [F.cross_entropy(model.logits(rows), wanted, reduction="none") for rows, wanted in pairs]
    return torch.cat(nats).view(len(tokens), -1).double().mean(1)


def pool_model(model: Llama, tokens: Tensor) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """One row a layer, as of `Comparison`; one row an arm, with its perplexity on `tokens`."""
    comparison = Comparison(model)
    dense = window_nats(model, tokens, comparison)
    layers = model.config.layers
    arms = [_arm("as it is", 0, dense, dense)]
    for name, pool in ARMS.items():
        nats = window_nats(model, tokens, from_layer(0, pool))
        arms.append(_arm(name, layers, nats, dense))
    upper = window_nats(model, tokens, from_layer(layers // 2, ARMS["both"]))
    return comparison.rows, [*arms, _arm("both, upper half", layers - layers // 2, upper, dense)]


def _arm(name: str, layers: int, nats: Tensor, dense: Tensor) -> dict[str, Any]:
    """± is the standard error over windows of the paired difference."""
    over = nats - dense
    return {
        "pooled": name,
        "layers": layers,
        "token_perplexity": math.exp(float(nats.mean())),
        "nats_over_dense": float(over.mean()),
        "nats_over_dense_se": float(over.std() / math.sqrt(len(over))),
    }
