"""Load a variant for scoring: the arithmetic of its format, on products that a CPU does fast.

Kernels made for decoding unpack 4-bit weights for every product, and emulations of INT8 round in
floating point. Scoring whole windows, where products are large, is half as fast with them. Here
4-bit weights are unpacked once, to the same bf16 values, and INT8 layers multiply integers.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from inferlab.models.loading import load_model, quantization_method, quieten
from inferlab.models.wide import widen
from inferlab.quantization.formats import read_gptq
from inferlab.store import Checkpoint, open_checkpoint

LEVELS = 127


class Int8Linear(nn.Module):
    """W8A8: int8 weights with a scale a channel, inputs rounded to int8 with a scale a token.

    `weight`: int8 [out, in]; `scale`: fp32 [out, 1] or [1]. The sums are exact, in int32.
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight.t())
        self.register_buffer("scale", scale.float().expand(len(weight), 1).t())
        self.register_buffer("bias", bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """`inputs` [..., in], fp32 or bf16; returns [..., out] in their dtype."""
        x = inputs.flatten(0, -2).float()
        step = x.abs().amax(1, keepdim=True).clamp_(min=1e-12) / LEVELS
        codes = x.div(step).round_().to(torch.int8)  # not in place: x may be the inputs
        sums = torch._int_mm(codes, self.weight).float()
        outputs = sums.mul_(step).mul_(self.scale)
        if self.bias is not None:
            outputs += self.bias
        return outputs.to(inputs.dtype).unflatten(0, inputs.shape[:-1])


def load_for_scoring(folder: Path, threads: int) -> PreTrainedModel:
    """The model in bf16, with plain or INT8 linear layers whatever the format of its weights.

    Raises InferlabError when the folder is no checkpoint of safetensors.
    """
    checkpoint = open_checkpoint(folder, quantized=True)
    method = quantization_method(checkpoint)
    if method in READERS:
        return READERS[method](checkpoint)
    model = load_model(folder, threads)
    if method == "bitsandbytes":
        _replace(model, _dequantized_4bit)
        widen(model)
    return model


def _read_gptq(checkpoint: Checkpoint) -> PreTrainedModel:
    declared = checkpoint.config["quantization_config"]
    version = 2 if declared.get("checkpoint_format") == "gptq_v2" else 1
    state = {}
    for name in checkpoint.names:
        layer, _, part = name.rpartition(".")
        if part == "qweight":
            parts = (f"{layer}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
            tensors = {part: checkpoint.tensor(part) for part in parts}
            quantized = read_gptq(tensors, layer, declared["bits"], version)
            state[f"{layer}.weight"] = quantized.dequantize()
        elif part not in ("qzeros", "scales", "g_idx"):
            state[name] = checkpoint.tensor(name)
    return _model(checkpoint, state)


def _read_int8(checkpoint: Checkpoint) -> PreTrainedModel:
    scales = {n: checkpoint.tensor(n) for n in checkpoint.names if n.endswith(".weight_scale")}
    state = {name: checkpoint.tensor(name) for name in checkpoint.names if name not in scales}
    model = _model(checkpoint, state)

    def int8(name: str, layer: nn.Module) -> nn.Module | None:
        if f"{name}.weight_scale" not in scales:
            return None
        weight = checkpoint.tensor(f"{name}.weight")
        return Int8Linear(weight, scales[f"{name}.weight_scale"], layer.bias)

    _replace(model, int8)
    return model


READERS: dict[str, Callable[[Checkpoint], PreTrainedModel]] = {
    "gptq": _read_gptq,
    "compressed-tensors": _read_int8,
}


def _model(checkpoint: Checkpoint, state: dict[str, Tensor]) -> PreTrainedModel:
    """The model of a checkpoint's architecture with the weights `state`."""
    quieten()
    plain = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    with init_empty_weights(include_buffers=False):
        config = AutoConfig.for_model(**plain)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = {name: tensor.bfloat16() for name, tensor in state.items()}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    widen(model)
    return model.eval()


def _dequantized_4bit(name: str, layer: nn.Module) -> nn.Module | None:
    """A plain layer for one of bitsandbytes' `Linear4bit`."""
    state = getattr(layer.weight, "quant_state", None) if hasattr(layer, "weight") else None
    if state is None:
        return None
    from bitsandbytes.functional import dequantize_4bit

    weight = dequantize_4bit(layer.weight.data, state).bfloat16()
    with torch.device("meta"):
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.bias = layer.bias
    return plain


def _replace(model: nn.Module, make: Callable[[str, nn.Module], nn.Module | None]) -> None:
    """Put what `make(name, layer)` returns in the place of each layer for which it is not None."""
    for name, layer in list(model.named_modules()):
        if (new := make(name, layer)) is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)
