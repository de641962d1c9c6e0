"""Products in bf16 on processors that have no instructions for them: through fp32, same results.

torch's own bf16 products take about eight times as long there as those of fp32.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION = "wide_sdpa"

FEWEST_ROWS = 16
"""With fewer, reading the weights is what costs, and widening them costs more."""


@cache
def multiplies_bf16(device: str) -> bool:
    """Whether torch has fast bf16 products on this type of device ("cpu", "cuda")."""
    if device != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, of bf16 or under autocast to it: `inputs` [..., in], `weight` [out, in].

    Factors are exact in bf16, sums are in fp32 and rounded once, as hardware does it.
    """
    device = inputs.device.type
    rounds = inputs.dtype == torch.bfloat16 or _autocast(device)
    few = inputs.numel() < FEWEST_ROWS * inputs.shape[-1]
    if not rounds or few or multiplies_bf16(device):
        return F.linear(inputs, weight, bias)
    with torch.autocast(device, enabled=False):
        wide = (None if t is None else t.bfloat16().float() for t in (inputs, weight, bias))
        return F.linear(*wide).bfloat16()


def widen(model: nn.Module) -> None:
    """Make every plain linear layer of `model` compute with `linear`, in place.

    In a model of transformers that uses torch's attention, `attention` takes its place.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = WideLinear
    config = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) == "sdpa" and not multiplies_bf16("cpu"):
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(ATTENTION, attention)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        config._attn_implementation = ATTENTION


class WideLinear(nn.Linear):
    """A linear layer whose bf16 products are `linear`'s."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The "sdpa" of transformers, of bf16 through fp32; its gradient takes a sixth of the time."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    tensors, mask = (query, key, value), attention_mask
    if query.dtype != torch.bfloat16:
        return sdpa_attention_forward(module, *tensors, mask, **options)
    if mask is not None and mask.dtype == torch.bfloat16:
        mask = mask.float()
    wide = (tensor.float() for tensor in tensors)
    mixed, _ = sdpa_attention_forward(module, *wide, mask, **options)
    return mixed.bfloat16(), None


def _autocast(device: str) -> bool:
    enabled = torch.is_autocast_enabled(device)
    return enabled and torch.get_autocast_dtype(device) == torch.bfloat16
