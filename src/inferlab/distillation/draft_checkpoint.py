"""The draft as a checkpoint folder like the base's, with fewer blocks, and what that saves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inferlab.distillation.depth import Stack
from inferlab.models.adapters import adapter_for
from inferlab.store import Checkpoint, save_checkpoint


def save_draft(folder: Path, base: Checkpoint, kept: Sequence[int], stack: Stack) -> None:
    """Write the checkpoint of `stack`, which holds the blocks `kept` of `base`, as trained.

    All else is the base's: embeddings, head (tied or not), tokenizer, and the dtype of tensors.
    """
    path = adapter_for(base).blocks
    norm = f"{path.rpartition('.')[0]}.norm"
    tensors = {name: base.tensor(name) for name in base.names if not name.startswith(f"{path}.")}
    for name, value in stack.norm.state_dict().items():
        tensors[f"{norm}.{name}"] = value.to(tensors[f"{norm}.{name}"].dtype).cpu()
    for number, (source, block) in enumerate(zip(kept, stack.blocks, strict=True)):
        for name, value in block.state_dict().items():
            original = base.tensor(f"{path}.{source}.{name}")
            tensors[f"{path}.{number}.{name}"] = value.to(original.dtype).cpu()
    save_checkpoint(folder, _config(base, kept), tensors, aside_from=base.folder)


def shares(draft: Checkpoint, base: Checkpoint) -> dict[str, float]:
    """Layers, parameters and bytes of weights of the draft, as shares of the base's."""
    ours, theirs = (_sizes(one) for one in (draft, base))
    return {f"{name}_share": ours[name] / theirs[name] for name in theirs}


def _config(base: Checkpoint, kept: Sequence[int]) -> dict[str, Any]:
    config = base.config | {"num_hidden_layers": len(kept)}
    if config.get("layer_types"):
        config["layer_types"] = [base.config["layer_types"][number] for number in kept]
    return config


def _sizes(checkpoint: Checkpoint) -> dict[str, float]:
    tensors = [checkpoint.tensor(name) for name in checkpoint.names]
    return {
        "layers": checkpoint.config["num_hidden_layers"],
        "parameters": sum(tensor.numel() for tensor in tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors),
    }
