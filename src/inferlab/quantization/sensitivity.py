"""What rounding one layer costs the whole model, for all layers from one backward pass.

When a layer's outputs move by Δ, the model's loss on its own predictions rises by ½·Δᵀ·F·Δ, with F
the Fisher information of those outputs: the mean of g·gᵀ over gradients g of −log p(y), y drawn
from the model. With F taken as diagonal that is ½·Σ g²·Δ² (Zandonati et al. 2022, "FIT: A Metric
for Model Sensitivity", arXiv:2210.08502, does so for weights and activations). In nats a token,
comparable between layers, and nearly additive: it is the KL divergence from the original model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from inferlab.errors import InferlabError
from inferlab.models.scoring import LEVELS


@dataclass
class Effect:
    """Of one layer in W8A8 alone. All are sums over `tokens` until divided.

    `nats`: rise of the loss. `noise`: squared error of a token's outputs over their square.
    `zeroed`: share of the input's non-zero values whose code is 0.
    """

    nats: float = 0.0
    noise: float = 0.0
    zeroed: float = 0.0

    def per_token(self, tokens: int) -> "Effect":
        """The means over `tokens`."""
        return Effect(self.nats / tokens, self.noise / tokens, self.zeroed / tokens)


@torch.enable_grad()
def layer_effects(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], windows: Tensor, seed: int
) -> dict[str, Effect]:
    """The effect of each of `layers` when it stands in for the model's layer of that name.

    `windows`: [windows, tokens], one pass forward and backward each. Raises InferlabError naming
    the first layer with inputs that are not finite.
    """
    model.requires_grad_(False)
    effects = {name: Effect() for name in layers}
    handles = [
        model.get_submodule(name).register_forward_hook(partial(_observe, name, layer, effects))
        for name, layer in layers.items()
    ]
    generator = torch.Generator().manual_seed(seed)
    try:
        for window in windows.split(1):
            embedded = model.get_input_embeddings()(window).detach().requires_grad_()
            logits = model(inputs_embeds=embedded, use_cache=False).logits[0].float()
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
            F.cross_entropy(logits, drawn[:, 0], reduction="sum").backward()
    finally:
        for handle in handles:
            handle.remove()
    return {name: effect.per_token(windows.numel()) for name, effect in effects.items()}


@torch.inference_mode()
def log_probabilities(model: PreTrainedModel, window: Tensor) -> Tensor:
    """Of the token after each of `window` [tokens]: [tokens, vocabulary], fp32."""
    logits = model(input_ids=window[None], use_cache=False).logits[0]
    return F.log_softmax(logits.float(), dim=-1)


def divergence(reference: Tensor, found: Tensor) -> float:
    """KL divergence, nats a token, of `found` from `reference`, both [tokens, vocabulary]."""
    return float(F.kl_div(found, reference, reduction="batchmean", log_target=True))


def _observe(
    name: str,
    layer: nn.Module,
    effects: dict[str, Effect],
    _module: nn.Module,
    inputs: tuple[Tensor, ...],
    output: Tensor,
) -> None:
    """Note how far the layer's outputs would move, now, and how much that matters, later."""
    effect = effects[name]
    with torch.no_grad():
        values = inputs[0]
        if not torch.isfinite(values).all():
            raise InferlabError(
                f"{name}: its inputs are not finite (NaN or infinity); the model overflows before "
                "this layer, check its weights"
            )
        moved = layer(values) - output
        squares = output.square().sum(-1).clamp(min=1e-30)
        effect.noise += float((moved.square().sum(-1) / squares).sum())
        sizes = values.abs()
        half_step = sizes.amax(-1, keepdim=True) / (2 * LEVELS)
        effect.zeroed += float(((sizes < half_step) & (sizes > 0)).float().mean(-1).sum())

    def weigh(gradient: Tensor) -> None:
        effect.nats += float((gradient * moved).square().sum()) / 2

    output.register_hook(weigh)
