"""Where each architecture keeps its decoder blocks and the linear layers in them.

To add an architecture, add one `Adapter` to `ADAPTERS` under the `model_type` of its config.json.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from inferlab.errors import InferlabError, lookup
from inferlab.store import Checkpoint


@dataclass(frozen=True)
class Adapter:
    """Names inside a checkpoint. A group is the linear layers of a block that read one input."""

    blocks: str
    groups: tuple[tuple[str, ...], ...]
    producers: tuple[str | None, ...]
    """For each group, the norm or linear layer whose output channels its input follows one to one
    (through an element-wise product at most), or None."""
    transposed: bool = False
    """Weights are stored [in, out], as GPT-2's Conv1D does, and not [out, in]."""


@dataclass(frozen=True)
class LinearGroup:
    """The linear layers of one block that read the same input, by their full module names."""

    block: int
    name: str
    layers: tuple[str, ...]
    producer: str | None
    transposed: bool

    def weights(self, checkpoint: Checkpoint) -> list[Tensor]:
        """One [out, in] matrix a layer, in the checkpoint's dtype.

        Raises InferlabError naming the first layer with a weight that is not finite.
        """
        tensors = [checkpoint.tensor(f"{layer}.weight") for layer in self.layers]
        for layer, tensor in zip(self.layers, tensors, strict=True):
            if not torch.isfinite(tensor).all():
                raise InferlabError(
                    f"{checkpoint.folder}: {layer} has a weight that is not finite (NaN or "
                    "infinity); save the model again, in bf16 or fp32 if it was fp16"
                )
        return [tensor.t() if self.transposed else tensor for tensor in tensors]


LLAMA = Adapter(
    blocks="model.layers",
    groups=(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    ),
    producers=("input_layernorm", "self_attn.v_proj", "post_attention_layernorm", "mlp.up_proj"),
)
GPT2 = Adapter(
    blocks="transformer.h",
    groups=(("attn.c_attn",), ("attn.c_proj",), ("mlp.c_fc",), ("mlp.c_proj",)),
    producers=("ln_1", None, "ln_2", None),
    transposed=True,
)

ADAPTERS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
}


def adapter_for(checkpoint: Checkpoint) -> Adapter:
    """The adapter of a checkpoint's architecture.

    Raises InferlabError for an unknown one, with the known ones and how to add it.
    """
    model_type = checkpoint.config.get("model_type", "none")
    try:
        return lookup(ADAPTERS, model_type, "architecture (model_type of config.json)")
    except InferlabError as error:
        raise InferlabError(
            f"{checkpoint.folder}: {error}; to add one, name its layers in "
            "src/inferlab/models/adapters.py"
        ) from None


def model_prefix(checkpoint: Checkpoint) -> str:
    """What to put before each tensor's name so that it is the causal model's: mostly nothing.

    GPT-2 is published as the bare model, `h.0…` where the causal model has `transformer.h.0…`.
    Unknown architectures are left alone.
    """
    adapter = ADAPTERS.get(checkpoint.config.get("model_type", ""))
    root, _, bare = adapter.blocks.partition(".") if adapter else ("", "", "")
    named = any(name.startswith(f"{root}.") for name in checkpoint.names)
    published_bare = any(name.startswith(f"{bare}.") for name in checkpoint.names)
    return f"{root}." if adapter and published_bare and not named else ""


def linear_groups(checkpoint: Checkpoint) -> list[LinearGroup]:
    """Every group of linear layers, in the order in which the model runs them.

    Raises InferlabError when the checkpoint has none, or lacks a layer that its blocks should have.
    """
    adapter = adapter_for(checkpoint)
    groups = [
        LinearGroup(
            block,
            f"{adapter.blocks}.{block}.{layers[0]}",
            tuple(f"{adapter.blocks}.{block}.{layer}" for layer in layers),
            producer and f"{adapter.blocks}.{block}.{producer}",
            adapter.transposed,
        )
        for block in _block_numbers(checkpoint, adapter)
        for layers, producer in zip(adapter.groups, adapter.producers, strict=True)
    ]
    if not groups:
        raise InferlabError(
            f"{checkpoint.folder}: no linear layer found under {adapter.blocks}.*; "
            f"the first tensors are {', '.join(checkpoint.names[:3])}"
        )
    for layer in layer_names(groups):
        if f"{layer}.weight" not in checkpoint:
            raise InferlabError(f"{checkpoint.folder}: the layer {layer} has no weight")
    return groups


def layer_names(groups: list[LinearGroup]) -> list[str]:
    """The module names of all layers of `groups`."""
    return [layer for group in groups for layer in group.layers]


def _block_numbers(checkpoint: Checkpoint, adapter: Adapter) -> list[int]:
    pattern = re.compile(re.escape(adapter.blocks) + r"\.(\d+)\.")
    found = {int(match[1]) for name in checkpoint.names if (match := pattern.match(name))}
    return sorted(found)
