"""Magnitude pruning of a classifier: which weights go, what stays in bytes, and sparse layers.

Pruned are the weights of the linear layers within the encoder's layers; embeddings, norms, biases
and the head stay. Source: Han et al. 2015, "Learning both Weights and Connections for Efficient
Neural Networks" (arXiv:1506.02626), section 3.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from inferlab.models.encoder import TextClassifier
from inferlab.pruning.formats import stored_bytes, to_csr
from inferlab.pruning.patterns import Unstructured

Threshold = Literal["global", "layer"]
FORMATS = ("dense", "csr", "bitmask")


def matrices(model: TextClassifier) -> dict[str, nn.Parameter]:
    """The weights [out, in] that may be pruned, by the name of their module."""
    return {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("layers.")
    }


def keep_masks(
    weights: Mapping[str, Tensor], sparsity: float, threshold: Threshold
) -> dict[str, Tensor]:
    """Which weights stay: all but the share `sparsity` of least magnitude, as booleans.

    With one `global` threshold matrices compete, with one a `layer` each loses the same share.
    What is zero already goes first. Raises InferlabError unless 0 <= sparsity < 1.
    """
    pattern = Unstructured(sparsity)
    if threshold == "layer":
        return {
            name: pattern.keep_shared(weight.detach().abs()) for name, weight in weights.items()
        }
    scores = torch.cat([weight.detach().abs().flatten() for weight in weights.values()])
    parts = pattern.keep_shared(scores).split([weight.numel() for weight in weights.values()])
    named = zip(weights.items(), parts, strict=True)
    return {name: part.view_as(weight) for (name, weight), part in named}


def prune_weights(
    model: TextClassifier, sparsity: float, threshold: Threshold
) -> Callable[[], None]:
    """Set the least weights of `model` to zero; returns what sets the same ones to zero again.

    Raises InferlabError unless 0 <= sparsity < 1.
    """
    weights = matrices(model)
    removed = {name: ~kept for name, kept in keep_masks(weights, sparsity, threshold).items()}

    @torch.no_grad()
    def clear() -> None:
        for name, weight in weights.items():
            weight.masked_fill_(removed[name], 0)

    clear()
    return clear


def sparsities(model: TextClassifier) -> dict[str, float]:
    """The share of zeros in each matrix, by name, and of all together as `all`."""
    weights = matrices(model)
    zeros = {name: int((weight == 0).sum()) for name, weight in weights.items()}
    shares = {name: zeros[name] / weight.numel() for name, weight in weights.items()}
    count = sum(weight.numel() for weight in weights.values())
    return shares | {"all": sum(zeros.values()) / count}


def format_bytes(model: TextClassifier, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of the prunable matrices in each format, really packed, with values in `dtype`."""
    sizes: Counter[str] = Counter()
    for weight in matrices(model).values():
        sizes.update(stored_bytes(weight.detach().cpu().to(dtype)))
    return {name: sizes[name] for name in FORMATS}


def other_bytes(model: TextClassifier) -> int:
    """Bytes of all that is never pruned: embeddings, norms, biases, head."""
    pruned = sum(weight.nbytes for weight in matrices(model).values())
    return sum(weight.nbytes for weight in model.parameters()) - pruned


class SparseLinear(nn.Module):
    """A linear layer whose weight is in CSR and is multiplied by torch's sparse kernels."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        self.weight = to_csr(dense.weight.detach())
        self.bias = dense.bias.detach()

    def forward(self, inputs: Tensor) -> Tensor:
        """[…, out] of inputs […, in]"""
        flat = inputs.flatten(0, -2)
        product = (self.weight @ flat.t()).t() + self.bias
        return product.unflatten(0, inputs.shape[:-1])


def with_sparse_layers(model: TextClassifier) -> TextClassifier:
    """A copy of `model` whose prunable matrices run as `SparseLinear`."""
    sparse = copy.deepcopy(model)
    for layer in sparse.layers:
        for name, module in list(layer.named_children()):
            if isinstance(module, nn.Linear):
                setattr(layer, name, SparseLinear(module))
    return sparse.eval()
