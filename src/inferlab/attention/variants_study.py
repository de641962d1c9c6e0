"""33.14: MHA, GQA and MQA beside each other: cache, latency of prefill and decode, and metrics."""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from inferlab import params as parameters
from inferlab.attention.grouped import AttentionLayer, LayerCache, grouped_attention
from inferlab.attention.pooled_model import RealModelParams
from inferlab.attention.pooling import RandomHeadsParams
from inferlab.kvcache.shape import CacheShape
from inferlab.profiling.latency import median_ms

Positive = Annotated[int, Field(gt=0)]
Lengths = Annotated[tuple[Positive, ...], Field(min_length=1)]
CACHE_TYPES = ("fp16", "int8")
MIB = 2**20


@parameters.section
class AttentionVariantsParams:
    """The section `attention_variants`."""

    device: Literal["cpu", "cuda"]
    heads: Positive
    head_dim: Positive
    groups: Positive
    layers: Positive
    batch: Positive
    prefill_lengths: Lengths
    decode_lengths: Lengths
    prefill_repeats: Positive
    decode_repeats: Positive
    random: RandomHeadsParams
    model: RealModelParams

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ValueError(f"groups must divide heads, {self.heads}; got {self.groups}")

    @property
    def kv_heads(self) -> dict[str, int]:
        """KV heads of each variant, by its name."""
        return {"mha": self.heads, "gqa": self.groups, "mqa": 1}


def cache_table(params: AttentionVariantsParams) -> list[dict[str, Any]]:
    """Bytes a token and in total, of all layers and sequences at the longest decode length."""
    length = max(params.decode_lengths)
    rows = []
    for name, kv_heads in params.kv_heads.items():
        windows = (None,) * params.layers
        shape = CacheShape(
            params.heads, kv_heads, params.head_dim, params.head_dim, windows, context=None
        )
        rows += [
            {
                "cache": f"{name} {dtype}",
                "variant": name,
                "dtype": dtype,
                "kv_heads": kv_heads,
                "bytes_per_token": shape.bytes_per_token(dtype),
                "length": length,
                "batch": params.batch,
                "cache_mib": shape.cache_bytes(length, dtype, params.batch) / MIB,
            }
            for dtype in CACHE_TYPES
        ]
    return rows


def random_layer(params: AttentionVariantsParams, seed: int) -> AttentionLayer:
    """Multi-head attention with fp32 weights of variance 1/hidden."""
    hidden = params.heads * params.head_dim
    generator = torch.Generator().manual_seed(seed)
    weights = (
        (torch.randn(hidden, hidden, generator=generator) / math.sqrt(hidden)).to(params.device)
        for _ in range(4)
    )
    return AttentionLayer(*weights, params.head_dim)


@torch.inference_mode()
def latencies(params: AttentionVariantsParams, seed: int) -> tuple[list[dict[str, Any]], float]:
    """Median milliseconds by phase, variant, part and length; largest difference to torch's own.

    Parts: the whole `layer` with its projections, our `attention` alone, and torch's `sdpa` on the
    same tensors. All calls of a length take turns, after a first one that does not count.
    """
    mha = random_layer(params, seed)
    layers = {name: mha.pooled(kv_heads) for name, kv_heads in params.kv_heads.items()}
    rows: list[dict[str, Any]] = []
    error = 0.0
    for phase, lengths, repeats in (
        ("prefill", params.prefill_lengths, params.prefill_repeats),
        ("decode", params.decode_lengths, params.decode_repeats),
    ):
        for length in lengths:
            calls = _calls(layers, phase, length, params, seed)
            taken = median_ms(calls, repeats)
            error = max([error, *(_difference(calls, name) for name in layers)])
            rows += [
                {
                    "series": f"{name}, {part}",
                    "phase": phase,
                    "variant": name,
                    "part": part,
                    "length": length,
                    "milliseconds": milliseconds,
                }
                for (name, part), milliseconds in taken.items()
            ]
    return rows, error


def _calls(
    layers: dict[str, AttentionLayer],
    phase: str,
    length: int,
    params: AttentionVariantsParams,
    seed: int,
) -> dict[tuple[str, str], Callable[[], Tensor]]:
    """By variant and part. In decoding one token comes to a cache of length − 1."""
    tokens = 1 if phase == "decode" else length
    generator = torch.Generator(params.device).manual_seed(seed)
    normal = partial(torch.randn, generator=generator, device=params.device)
    states = normal(params.batch, tokens, params.heads * params.head_dim)
    queries = normal(params.batch, params.heads, tokens, params.head_dim)
    calls: dict[tuple[str, str], Callable[[], Tensor]] = {}
    for name, layer in layers.items():
        shape = (params.batch, layer.kv_heads, length, params.head_dim)
        cache = LayerCache(normal(*shape), normal(*shape))
        calls[name, "layer"] = partial(_run_layer, layer, states, cache, length - tokens)
        calls[name, "attention"] = partial(grouped_attention, queries, cache.keys, cache.values)
        calls[name, "sdpa"] = partial(sdpa, queries, cache.keys, cache.values)
    return calls


def _run_layer(layer: AttentionLayer, states: Tensor, cache: LayerCache, used: int) -> Tensor:
    cache.used = used
    return layer(states, cache)


def _difference(calls: dict[tuple[str, str], Callable[[], Tensor]], name: str) -> float:
    return float((calls[name, "attention"]() - calls[name, "sdpa"]()).abs().max())


def sdpa(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """torch's own grouped attention; causal for a whole sequence, else of its last token."""
    causal = queries.shape[2] > 1
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=True)


def metrics(
    params: AttentionVariantsParams,
    error: float,
    cosines: list[dict[str, Any]],
    layers: list[dict[str, Any]],
    arms: list[dict[str, Any]],
) -> dict[str, float]:
    """Cache bytes a token, cosines of independent heads, and what pooling does to the real model.

    `error` as of `latencies`, `cosines` of `random_cosines`, the rest of `pool_model`.
    """
    values: dict[str, float] = {
        f"cache_bytes_per_token_{row['variant']}": row["bytes_per_token"]
        for row in cache_table(params)
        if row["dtype"] == CACHE_TYPES[0]
    }
    values["max_error_sdpa"] = error
    for name in ("gqa", "mqa"):
        row = next(
            row
            for row in cosines
            if (row["kv_heads"], row["correlation"], row["part"])
            == (params.kv_heads[name], 0, "both")
        )
        values |= {f"cosine_{name}": row["cosine"], f"expected_cosine_{name}": row["expected"]}
    found = [row["cosine_both"] for row in layers]
    values["model_cosine_mean"] = sum(found) / len(found)
    values["model_token_perplexity"] = arms[0]["token_perplexity"]
    pooled = next(row for row in arms if row["pooled"] == "both")
    values["model_token_perplexity_mqa"] = pooled["token_perplexity"]
    return values


def times(rows: list[dict[str, Any]]) -> dict[str, float]:
    """`<phase>_<part>_ms_<variant>_<length>` at the longest length of each phase."""
    longest = {phase: 0 for phase in ("prefill", "decode")}
    for row in rows:
        longest[row["phase"]] = max(longest[row["phase"]], row["length"])
    return {
        f"{row['phase']}_{row['part']}_ms_{row['variant']}_{row['length']}": round(
            row["milliseconds"], 3
        )
        for row in rows
        if row["length"] == longest[row["phase"]]
    }
