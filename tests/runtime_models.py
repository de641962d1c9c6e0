"""Small checkpoints for the tests of the runtime: any config, and quantized forms of a model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inferlab.models.adapters import layer_names, linear_groups
from inferlab.models.runtime.linear import Dense, Projection
from inferlab.models.runtime.llama import Llama
from inferlab.quantization.affine import Grid, minmax_grid, quantize
from inferlab.quantization.formats import GptqFormat, Int8Format, storable_grid
from inferlab.store import open_checkpoint, save_checkpoint

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def make_model(folder: Path, family: str = "llama", **settings: Any) -> Path:
    """A checkpoint of random fp32 weights, norms and biases included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**SIZES, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    return folder


def quantized(source: Path, folder: Path, kind: str, group_size: int = 16) -> Path:
    """The model of `source` as `int8`, `int8_tensor`, `int4` or (asymmetric) `int4_zero`."""
    checkpoint = open_checkpoint(source)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names}
    form = {
        "int8": Int8Format(per_channel=True),
        "int8_tensor": Int8Format(per_channel=False),
        "int4": GptqFormat(4, group_size, symmetric=True),
        "int4_zero": GptqFormat(4, group_size, symmetric=False),
    }[kind]
    for layer in layer_names(linear_groups(checkpoint)):
        weight = tensors.pop(f"{layer}.weight").float()
        shared = weight.flatten()[None] if kind == "int8_tensor" else weight
        size = shared.shape[1] if form.bits == 8 else group_size
        grid = storable_grid(minmax_grid(shared, form.bits, size, kind != "int4_zero"))
        if kind == "int8_tensor":
            each = (len(weight), 1)
            grid = Grid(grid.scale.expand(each), grid.zero.expand(each), 8, weight.shape[1])
        tensors |= form.tensors(layer, quantize(weight, grid))
    folder.mkdir()
    config = checkpoint.config | {"quantization_config": form.config()}
    save_checkpoint(folder, config, tensors, aside_from=source)
    return folder


def dequantized(model: Llama) -> Llama:
    """The same model with dense layers that hold the dequantized weights."""

    def dense(projection: Projection) -> Projection:
        return Projection(
            tuple(Dense(part.dense.to(model.dtype), part.bias) for part in projection.parts)
        )

    names = ("qkv", "output", "gate_up", "down")
    layers = tuple(
        replace(one, **{name: dense(getattr(one, name)) for name in names}) for one in model.layers
    )
    head = Dense(model.head.dense.to(model.dtype))
    return replace(model, layers=layers, head=head)


def random_tokens(rows: int, length: int, seed: int = 0, vocabulary: int = 96) -> Tensor:
    """Tokens that are neither BOS, EOS nor padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (rows, length), generator=generator)
