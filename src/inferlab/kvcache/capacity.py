"""How many sequences, and how long ones, fit on GPUs beside the weights.

GPUs share a model by tensor parallelism. From each one's memory come off a reserve (activations,
the CUDA context, fragmentation) and its share of the weights; the rest is for the cache.
"""

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

from inferlab.economics.hardware import gpu_memory
from inferlab.errors import InferlabError, lookup
from inferlab.kvcache.shape import Architecture

GIB = 2**30
WEIGHT_BITS: Mapping[str, float] = {
    "fp32": 32,
    "fp16": 16,
    "bf16": 16,
    "fp8": 8,
    "int8": 8,
    "int4": 4 + 16 / 128,  # one 16-bit scale for a group of 128
}
"""Bits of a weight of a matrix. Embeddings, head, norms and biases keep 16 (32 for fp32)."""

LONGEST = 2**24
"""Where a model names no context: tokens that no search goes beyond."""


class DoesNotFitError(InferlabError):
    """The weights and one sequence are too large for the GPUs."""


@dataclass(frozen=True)
class Plan:
    """How a model is stored and on what it runs. `gpus` 0: as few as it takes."""

    gpu: str
    weights: str
    cache: str
    reserve_share: float
    gpus: int = 0


@dataclass(frozen=True)
class Capacity:
    """What a plan leaves for the cache, in bytes of each GPU."""

    architecture: Architecture
    plan: Plan
    gpus: int
    weight_bytes: float
    room_bytes: float

    def largest_batch(self, length: int) -> int:
        """The most sequences of `length` tokens at once."""
        shape = self.architecture.shape
        return int(self.room_bytes // shape.cache_bytes(length, self.plan.cache, 1, self.gpus))

    def largest_length(self, batch: int) -> int:
        """The most tokens that each of `batch` sequences can have, up to the model's context."""
        shape = self.architecture.shape
        lengths = range((shape.context or LONGEST) + 1)

        def taken(length: int) -> int:
            return shape.cache_bytes(length, self.plan.cache, batch, self.gpus)

        return bisect.bisect_right(lengths, self.room_bytes, key=taken) - 1


def weight_bytes(architecture: Architecture, dtype: str) -> float:
    """Bytes of all weights. Raises InferlabError for an unknown dtype."""
    bits = lookup(WEIGHT_BITS, dtype, "weight dtype")
    return (architecture.matrices * bits + architecture.others * max(bits, 16)) / 8


def capacity(architecture: Architecture, plan: Plan, length: int) -> Capacity:
    """Share the model out among the plan's GPUs, or among as few as hold one sequence of `length`.

    Raises InferlabError for an unknown dtype or GPU, a length beyond the model's context, a number
    of GPUs that cannot share its heads, and (DoesNotFitError) when there is not enough memory.
    """
    shape = architecture.shape
    if shape.context is not None and length > shape.context:
        raise InferlabError(
            f"{length:,} tokens do not fit the context of {architecture.name}, "
            f"{shape.context:,} tokens"
        )
    usable = gpu_memory(plan.gpu) * (1 - plan.reserve_share)
    weights = weight_bytes(architecture, plan.weights)
    for gpus in [plan.gpus] if plan.gpus else shape.degrees():
        cache = shape.cache_bytes(length, plan.cache, gpus=gpus)
        if weights / gpus + cache <= usable:
            return Capacity(architecture, plan, gpus, weights / gpus, usable - weights / gpus)
    raise DoesNotFitError(
        f"{architecture.name} does not fit on {gpus} {plan.gpu}: of {usable / GIB:,.1f} GiB on "
        f"each, {plan.weights} weights take {weights / gpus / GIB:,.1f} and the {plan.cache} cache "
        f"of {length:,} tokens {cache / GIB:,.1f}; take more GPUs or smaller types"
    )
