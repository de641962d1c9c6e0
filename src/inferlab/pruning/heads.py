"""Attention heads of a classifier: how much each matters, which go, and their real removal.

Scores are [layers, heads]. `gradient`: the mean over documents of |∂L/∂m| for a factor m = 1 on
what the head gives (Michel et al. 2019, "Are Sixteen Heads Really Better than One?",
arXiv:1905.10650, section 4.1). It is the head's output times the output's gradient, so also the
size of the first-order Taylor term of losing that output. `taylor`: the first-order Taylor terms of
losing the head's weights w, as the sum of (w·∂L/∂w)², with L the mean over a batch (Molchanov et
al. 2019, "Importance Estimation for Neural Network Pruning", arXiv:1906.10771, section 3).
"""

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inferlab.distillation.training import device
from inferlab.errors import InferlabError
from inferlab.models.encoder import Layer, TextClassifier

BATCH = 32


def head_counts(model: TextClassifier) -> list[int]:
    """How many heads each layer has."""
    return [layer.heads for layer in model.layers]


def importance(model: TextClassifier, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Both scores of every head, fp32 [layers, heads], on documents [documents, tokens].

    L is the cross-entropy of the labels. The layers must have equally many heads.
    """
    model = copy.deepcopy(model).to(device()).eval()
    model.layers.requires_grad_(True)
    shape = len(model.layers), model.layers[0].heads
    scores = {name: torch.zeros(shape) for name in ("gradient", "taylor")}
    for part, wanted in zip(tokens.split(BATCH), labels.split(BATCH), strict=True):
        count = len(wanted)
        # One factor a document, so that gradients of opposite sign do not cancel out.
        masks = [
            torch.ones(count, heads, 1, device=device(), requires_grad=True)
            for heads in head_counts(model)
        ]
        model.zero_grad(set_to_none=True)
        logits = model(part.to(device()), masks)
        F.cross_entropy(logits, wanted.to(device()), reduction="sum").backward()
        for number, (layer, mask) in enumerate(zip(model.layers, masks, strict=True)):
            scores["gradient"][number] += mask.grad[:, :, 0].abs().sum(0).cpu()
            # Gradients are of the sum: over count² for the mean's, times count as its weight.
            scores["taylor"][number] += weight_term(layer).cpu() / count
    return {name: found / len(labels) for name, found in scores.items()}


@torch.no_grad()
def weight_term(layer: Layer) -> Tensor:
    """Sum of (w·∂L/∂w)² over the weights of each head [heads], from gradients there already."""
    rows = torch.zeros(layer.query.out_features, device=layer.query.weight.device)
    for module in (layer.query, layer.key, layer.value):
        rows += (module.weight * module.weight.grad).square().sum(1)
        rows += (module.bias * module.bias.grad).square()
    columns = (layer.output.weight * layer.output.weight.grad).square().sum(0)
    return (rows + columns).unflatten(0, (layer.heads, -1)).sum(1)


def least_important(scores: Tensor, share: float) -> Tensor:
    """Which heads go, as booleans [layers, heads]: the `share` of lowest scores, rounded down.

    All layers compete, but each keeps its best head. Raises InferlabError unless
    0 <= share < 1, and when so many would leave a layer without any.
    """
    if not 0 <= share < 1:
        raise InferlabError(f"the share of heads must be at least 0 and below 1; got {share:g}")
    layers, heads = scores.shape
    wanted, spare = int(share * layers * heads), layers * (heads - 1)
    if wanted > spare:
        raise InferlabError(
            f"{wanted} of {layers * heads} heads are too many to remove: each of the {layers} "
            f"layers keeps at least one, so that {spare} may go; lower the share"
        )
    open_ = torch.ones_like(scores, dtype=torch.bool)
    open_.scatter_(1, scores.argmax(1, keepdim=True), False)
    order = scores.masked_fill(~open_, float("inf")).flatten().argsort()
    removed = torch.zeros(layers * heads, dtype=torch.bool)
    removed[order[:wanted]] = True
    return removed.view(layers, heads)


def remove_heads(model: TextClassifier, removed: Tensor) -> TextClassifier:
    """A copy of `model` with smaller matrices, without the heads marked in `removed`.

    removed: booleans [layers, heads]. The result no longer fits a BERT configuration, which has
    one number of heads for all layers. Raises InferlabError when a layer would lose all of its
    heads or `removed` does not fit the model.
    """
    counts = head_counts(model)
    if len(removed) != len(counts) or any(removed.shape[1] != count for count in counts):
        raise InferlabError(
            f"the heads to remove are marked for {' x '.join(map(str, removed.shape))} heads, but "
            f"the model's layers have {', '.join(map(str, counts))}; mark them for this model"
        )
    for number, own in enumerate(removed.tolist()):
        if all(own):
            raise InferlabError(
                f"layer {number} would lose all of its {len(own)} heads; keep at least one"
            )
    smaller = copy.deepcopy(model)
    for number, gone in enumerate(removed):
        if gone.any():
            kept = torch.nonzero(~gone).flatten().tolist()
            smaller.layers[number] = _smaller_layer(model.layers[number], kept)
    return smaller


@torch.no_grad()
def _smaller_layer(layer: Layer, kept: Sequence[int]) -> Layer:
    """The layer with only the heads `kept`: fewer rows of query, key, value, columns of output."""
    head_dim = layer.output.in_features // layer.heads
    place = next(layer.parameters()).device
    rows = torch.cat([torch.arange(head_dim) + head * head_dim for head in kept]).to(place)
    hidden, intermediate = layer.output.out_features, layer.up.out_features
    smaller = Layer(hidden, len(kept), head_dim, intermediate).to(place)
    for name, module in layer.named_children():
        own = getattr(smaller, name)
        if name in ("query", "key", "value"):
            _copy(own, module.weight[rows], module.bias[rows])
        elif name == "output":
            _copy(own, module.weight[:, rows], module.bias)
        else:
            own.load_state_dict(module.state_dict())
    return smaller.train(layer.training)


def _copy(module: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    module.weight.copy_(weight)
    module.bias.copy_(bias)
