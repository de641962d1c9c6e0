"""Fewer bits for keys and values: 16-bit types, and INT8 by who shares a scale.

INT8 is symmetric, as in the runtime's cache: code = round(x / scale), scale = max|x| / 127 over
those that share it. Per channel is KIVI's choice for keys (Liu et al., arXiv:2402.02750): it needs
all tokens at once, so a cache that grows has to keep its latest tokens in 16 bits until then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from inferlab.errors import lookup

LEVELS = 127


@dataclass(frozen=True)
class Stored:
    """What a format keeps. `restored`: as read back, fp32; `bytes`: of codes and scales."""

    restored: Tensor
    bytes: int


def cast(dtype: torch.dtype, vectors: Tensor) -> Stored:
    """A type of floating point."""
    kept = vectors.to(dtype)
    return Stored(kept.float(), kept.nbytes)


def int8(shared: tuple[int, ...], vectors: Tensor) -> Stored:
    """INT8 codes, a scale in fp32 for all numbers along the dimensions `shared`."""
    codes, scale = int8_codes(vectors, shared)
    return Stored(codes * scale, codes.nbytes + scale.nbytes)


def int8_codes(vectors: Tensor, shared: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Codes, int8, and the scales that they share, fp32, with 1 along `shared`."""
    scale = vectors.float().abs().amax(shared, keepdim=True) / LEVELS
    scale = torch.where(scale > 0, scale, 1.0)
    return (vectors / scale).round().to(torch.int8), scale


FORMATS: dict[str, Callable[[Tensor], Stored]] = {
    "fp32": partial(cast, torch.float32),
    "bf16": partial(cast, torch.bfloat16),
    "fp16": partial(cast, torch.float16),
    "int8_tensor": partial(int8, (-3, -2, -1)),
    "int8_head": partial(int8, (-2, -1)),
    "int8_token": partial(int8, (-3, -1)),
    "int8_token_head": partial(int8, (-1,)),
    "int8_channel": partial(int8, (-2,)),
}
"""By name, of the keys or values [batch, kv_heads, tokens, head_dim] of a layer."""


def store(vectors: Tensor, dtype: str) -> Stored:
    """`vectors` [batch, kv_heads, tokens, head_dim] in a format.

    Raises InferlabError for an unknown one.
    """
    return lookup(FORMATS, dtype, "dtype of the cache")(vectors)


def head_errors(vectors: Tensor, restored: Tensor) -> Tensor:
    """‖x − x̂‖ / ‖x‖ of each head: [..., kv_heads] of [..., kv_heads, tokens, head_dim]."""
    lost = (vectors - restored).flatten(-2).norm(dim=-1)
    return lost / vectors.flatten(-2).norm(dim=-1)
