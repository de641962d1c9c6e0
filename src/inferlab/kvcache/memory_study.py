"""33.11: cache sizes and capacities of named models, and the sizes of real caches beside them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import Cache

from inferlab import params as parameters
from inferlab.kvcache.architecture import load_architecture, tensor_bytes
from inferlab.kvcache.capacity import GIB, Capacity, Plan, capacity
from inferlab.kvcache.shape import Architecture
from inferlab.models.loading import quieten
from inferlab.models.runtime.cache import DTYPES, KVCache, Window
from inferlab.models.runtime.config import read_config
from inferlab.store import open_checkpoint

Positive = Annotated[int, Field(gt=0)]
Names = Annotated[tuple[str, ...], Field(min_length=1)]
Numbers = Annotated[tuple[Positive, ...], Field(min_length=1)]


@parameters.section
class StoredAs:
    """The types of one row of capacities."""

    weights: str
    cache: str


@parameters.section
class KvMemoryParams:
    """The section `kv_memory`."""

    models: Names
    batches: Numbers
    lengths: Numbers
    gpus: Names
    stored_as: Annotated[tuple[StoredAs, ...], Field(min_length=1)]
    reserve_share: Annotated[float, Field(ge=0, lt=1)]
    check_tokens: Annotated[int, Field(ge=2)]


def capacities(architectures: Sequence[Architecture], params: KvMemoryParams) -> list[Capacity]:
    """Every model, stored in every way, on as few of each kind of GPU as hold the longest length.

    Raises InferlabError as `capacity` does.
    """
    return [
        capacity(
            architecture,
            Plan(gpu, stored.weights, stored.cache, params.reserve_share),
            max(params.lengths),
        )
        for architecture in architectures
        for gpu in params.gpus
        for stored in params.stored_as
    ]


def size_table(
    architectures: Sequence[Architecture], params: KvMemoryParams
) -> list[dict[str, Any]]:
    """GiB of the whole cache, in the first cache type of the parameters."""
    dtype = params.stored_as[0].cache
    return [
        {
            "model": architecture.name,
            "cache": dtype,
            "batch": batch,
            "length": length,
            "cache_gib": architecture.shape.cache_bytes(length, dtype, batch) / GIB,
            "series": f"{architecture.name}, batch {batch}",
        }
        for architecture in architectures
        for batch in params.batches
        for length in params.lengths
    ]


def capacity_table(found: Sequence[Capacity], params: KvMemoryParams) -> list[dict[str, Any]]:
    """One row a capacity: the largest batch at each length, the largest length at each batch."""
    return [
        {
            "model": one.architecture.name,
            "gpu": one.plan.gpu,
            "stored_as": f"{one.architecture.name}, {one.plan.gpu}, {one.plan.weights} weights, "
            f"{one.plan.cache} cache",
            "weights": one.plan.weights,
            "cache": one.plan.cache,
            "gpus": one.gpus,
            "weights_gib_each": round(one.weight_bytes / GIB, 2),
            "cache_room_gib_each": round(one.room_bytes / GIB, 2),
            "cache_tokens": one.largest_batch(1),
            **{f"largest_batch_{length}": one.largest_batch(length) for length in params.lengths},
            **{f"largest_length_{batch}": one.largest_length(batch) for batch in params.batches},
        }
        for one in found
    ]


def metrics(
    architectures: Sequence[Architecture], found: Sequence[Capacity], params: KvMemoryParams
) -> dict[str, float]:
    """Bytes a token in 16 bits; with the first types on the first GPU, how many and how large."""
    values: dict[str, float] = {}
    for architecture in architectures:
        name, length = architecture.name, max(params.lengths)
        first = next(one for one in found if one.architecture is architecture)
        values[f"bytes_per_token_{name}"] = architecture.shape.bytes_per_token("fp16")
        values[f"gpus_{first.plan.gpu}_{name}"] = first.gpus
        values[f"largest_batch_{length}_{name}"] = first.largest_batch(length)
    return values


def real_caches(folder: Path, tokens: int) -> list[dict[str, Any]]:
    """Bytes that caches of the checkpoint in `folder` hold, beside those that are computed.

    transformers' caches are filled by a prompt of `tokens` tokens for two sequences; the runtime's
    are set aside for as many, with the one spare slot that it keeps.
    """
    shape = load_architecture(str(folder)).shape
    held = {
        f"transformers, {name}": (tensor_bytes(cache), shape.cache_bytes(tokens, "bf16", 2))
        for name, cache in _filled_caches(folder, tokens).items()
    }
    config = read_config(open_checkpoint(folder, quantized=True))
    for dtype in DTYPES:
        cache = KVCache(config, 2, tokens, dtype)
        computed = shape.cache_bytes(cache.slots + 1, dtype, 2)
        held[f"runtime, {dtype}"] = (cache.bytes, computed)
    bounded = KVCache(config, 2, tokens, "bf16", Window(max(2, tokens // 8), 1))
    computed = shape.cache_bytes(bounded.slots + 1, "bf16", 2)
    held["runtime, bf16, window"] = (bounded.bytes, computed)
    return [
        {"cache": name, "held_bytes": found, "computed_bytes": computed}
        for name, (found, computed) in held.items()
    ]


@torch.inference_mode()
def _filled_caches(folder: Path, tokens: int) -> dict[str, Cache]:
    quieten()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    caches = {
        "dynamic": DynamicCache(config=model.config),
        "static": StaticCache(config=model.config, max_cache_len=tokens),
    }
    prompt = torch.zeros(2, tokens, dtype=torch.long)
    for cache in caches.values():
        model.base_model(input_ids=prompt, past_key_values=cache, use_cache=True)
    return caches
