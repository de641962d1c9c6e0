"""A cache that hands back what a format has left of keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from inferlab.errors import lookup
from inferlab.kvcache.rounding import FORMATS, store
from inferlab.models.runtime.cache import KVCache
from inferlab.models.runtime.config import LlamaConfig
from inferlab.models.runtime.llama import Llama
from inferlab.models.runtime.rope import Rope, rotate


@dataclass(frozen=True)
class Arm:
    """Formats of keys and values; `before_rope`: keys are rounded before they are rotated.

    Raises InferlabError for an unknown format.
    """

    keys: str
    values: str
    before_rope: bool = False

    def __post_init__(self) -> None:
        for dtype in (self.keys, self.values):
            lookup(FORMATS, dtype, "dtype of the cache")


class RoundedCache(KVCache):
    """Rounds each layer's keys and values as they come, and holds them in fp32.

    Of a text in one pass, with scales over all of it where they are not a token's own: what a
    prompt's cache is when it is rounded after prefill, also for the prompt's own tokens.
    """

    def __init__(self, config: LlamaConfig, inputs: int, length: int, arm: Arm) -> None:
        """Raises InferlabError when the model's context is shorter than `length`."""
        super().__init__(config, inputs, length, "fp32")
        self.arm, self.rope = arm, config.rope

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Round and store `keys` and `values` [inputs, kv_heads, tokens, head_dim]."""
        if self.arm.before_rope:
            plain = store(turned(keys, self.rope, back=True), self.arm.keys).restored
            rounded = turned(plain, self.rope)
        else:
            rounded = store(keys, self.arm.keys).restored
        super().write(layer, slots, rounded, store(values, self.arm.values).restored)


def turned(keys: Tensor, rope: Rope, back: bool = False) -> Tensor:
    """Rotate `keys` [..., tokens, head_dim] of positions 0, 1, … by them, or `back`."""
    angles = torch.arange(keys.shape[-2])[:, None].float() * rope.frequencies
    return rotate(keys, angles.cos(), -angles.sin() if back else angles.sin())


@torch.inference_mode()
def rounded_states(model: Llama, tokens: Tensor, arm: Arm) -> tuple[Tensor, RoundedCache]:
    """Final states [inputs, tokens, hidden] of `tokens` [inputs, tokens], and the cache."""
    cache = RoundedCache(model.config, *tokens.shape, arm)
    return model.hidden(tokens, cache), cache
