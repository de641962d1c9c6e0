"""Build a `Llama` from a variant's folder, whatever its weights are stored as.

Tensors that the runtime uses as they are stay memory mapped: the file's pages are the weights, and
count as cache of the operating system. INT4 is repacked, and what has another dtype than asked for
is converted. With quantized layers the output head is held in 8 bits too, a copy made here: in 16
bits it would be the largest read of each decoded token.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from inferlab.errors import InferlabError, lookup
from inferlab.models.runtime.config import LlamaConfig, read_config
from inferlab.models.runtime.linear import (
    Dense,
    Int4,
    Int8,
    Linear,
    Projection,
    fused,
    int8_rows,
    pack_halves,
)
from inferlab.models.runtime.llama import Layer, Llama
from inferlab.models.runtime.reading import ReadTensors
from inferlab.quantization.formats import read_gptq
from inferlab.store import Checkpoint, open_checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
METHODS = ("compressed-tensors", "gptq")


def load_llama(folder: Path, dtype: str = "bf16", mapped: bool = True) -> Llama:
    """The model of a folder: 16- or 32-bit, compressed-tensors INT8, or 4-bit in the GPTQ format.

    `dtype`: of activations and of weights that are not quantized. Not `mapped`, all weights are
    read into memory of the process's own, q, k and v, and gate and up into one matrix each, which
    saves calls where no kernel is compiled.
    Raises InferlabError for an unknown dtype, architecture or format, a tensor that is missing or
    of another shape than config.json says, and a shard that is missing.
    """
    kind = lookup(DTYPES, dtype, "dtype of the runtime")
    checkpoint = open_checkpoint(folder, quantized=True)
    if not mapped:
        checkpoint = replace(checkpoint, changed=ReadTensors(checkpoint.files))
    config = read_config(checkpoint)
    reader = _Reader(checkpoint, config, kind, mapped)
    layers = tuple(reader.layer(number) for number in range(config.layers))
    embedding = reader.dense("model.embed_tokens.weight", config.vocabulary, config.hidden)
    head = reader.head(embedding, quantized=_is_quantized(layers))
    return Llama(config, embedding, layers, reader.norm("model.norm"), head)


class _Reader:
    """Reads checked tensors of one checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, config: LlamaConfig, dtype: torch.dtype, mapped: bool
    ) -> None:
        self.checkpoint, self.config, self.dtype = checkpoint, config, dtype
        self.join: Callable[..., Projection] = Projection if mapped else fused
        self.settings = checkpoint.config.get("quantization_config") or {}
        method = self.settings.get("quant_method")
        if self.settings and method not in METHODS:
            raise InferlabError(
                f"{checkpoint.folder} is quantized by {method!r}; the runtime reads "
                f"{' and '.join(METHODS)}, and plain checkpoints"
            )

    def layer(self, number: int) -> Layer:
        """The decoder block `number`."""
        size, prefix = self.config, f"model.layers.{number}"
        heads, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return Layer(
            self.norm(f"{prefix}.input_layernorm"),
            self.projection(attention, {"q_proj": heads, "k_proj": kv, "v_proj": kv}, size.hidden),
            self.projection(attention, {"o_proj": size.hidden}, heads),
            self.norm(f"{prefix}.post_attention_layernorm"),
            self.projection(
                mlp, dict.fromkeys(("gate_proj", "up_proj"), size.intermediate), size.hidden
            ),
            self.projection(mlp, {"down_proj": size.hidden}, size.intermediate),
            self.head_norm(f"{attention}.q_norm"),
            self.head_norm(f"{attention}.k_norm"),
        )

    def projection(self, module: str, outs: dict[str, int], ins: int) -> Projection:
        """Layers of one input, by name and output size."""
        return self.join(tuple(self.linear(f"{module}.{n}", out, ins) for n, out in outs.items()))

    def linear(self, layer: str, out: int, ins: int) -> Linear:
        """One layer, as its tensors say that it is stored."""
        has_bias = f"{layer}.bias" in self.checkpoint
        bias = self.dense(f"{layer}.bias", out) if has_bias else None
        if f"{layer}.qweight" in self.checkpoint:
            return self._int4(layer, out, ins, bias)
        if f"{layer}.weight_scale" in self.checkpoint:
            codes = self.tensor(f"{layer}.weight", (torch.int8,), out, ins)
            scale = self.checkpoint.tensor(f"{layer}.weight_scale").float().flatten()
            if len(scale) not in (1, out):
                raise InferlabError(
                    f"{self.checkpoint.folder}: {layer}.weight_scale must hold a scale a channel "
                    f"({out}) or one; found {len(scale)}"
                )
            return Int8(codes, scale.expand(out).contiguous(), bias)
        return Dense(self.dense(f"{layer}.weight", out, ins), bias)

    def head(self, embedding: Tensor, quantized: bool) -> Linear:
        """The output head, which tied embeddings share with the input."""
        weight = embedding
        if not self.config.tied:
            weight = self.dense("lm_head.weight", self.config.vocabulary, self.config.hidden)
        return int8_rows(weight) if quantized else Dense(weight)

    def norm(self, module: str) -> Tensor:
        """The weight of a norm over the hidden state."""
        return self.dense(f"{module}.weight", self.config.hidden)

    def head_norm(self, module: str) -> Tensor | None:
        """The weight of a norm over a head, where the architecture has one."""
        name = f"{module}.weight"
        return self.dense(name, self.config.head_dim) if name in self.checkpoint else None

    def dense(self, name: str, *shape: int) -> Tensor:
        """A tensor of floating point, in the dtype of the runtime."""
        return self.tensor(name, FLOATS, *shape).to(self.dtype)

    def tensor(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> Tensor:
        """A tensor whose shape and dtype are as expected."""
        try:
            found = self.checkpoint.shape(name)
        except SafetensorError as error:
            raise InferlabError(
                f"{self.checkpoint.folder}: {name} is not in the file that should hold it "
                f"({error}); copy the whole folder anew"
            ) from None
        if found != shape:
            raise InferlabError(
                f"{self.checkpoint.folder}: {name} must be {list(shape)} by config.json; "
                f"found {list(found)}"
            )
        tensor = self.checkpoint.tensor(name)
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InferlabError(f"{self.checkpoint.folder}: {name} must be {wanted}; found {kind}")
        return tensor

    def _int4(self, layer: str, out: int, ins: int, bias: Tensor | None) -> Int4:
        bits, folder = self.settings.get("bits"), self.checkpoint.folder
        if bits != 4:
            raise InferlabError(
                f"{folder}: the runtime reads 4-bit GPTQ weights; found {bits} bits"
            )
        self.tensor(f"{layer}.qweight", (torch.int32,), ins // 8, out)
        names = [f"{layer}.{part}" for part in ("qweight", "qzeros", "scales")]
        tensors = {name: self.checkpoint.tensor(name) for name in names}
        version = 2 if self.settings.get("checkpoint_format") == "gptq_v2" else 1
        quantized = read_gptq(tensors, layer, bits, version)
        group = quantized.grid.group_size
        order = self.checkpoint.tensor(f"{layer}.g_idx")
        if not torch.equal(order, torch.arange(ins, dtype=order.dtype) // group):
            raise InferlabError(
                f"{folder}: {layer} was saved in activation order (desc_act), which "
                "the runtime does not read; save it with desc_act false"
            )
        codes = pack_halves(quantized.codes, group)
        zero = quantized.grid.zero.to(torch.uint8)
        return Int4(codes, quantized.grid.scale.half(), zero, bias)


def _is_quantized(layers: tuple[Layer, ...]) -> bool:
    parts = [part for layer in layers for one in layer.projections for part in one.parts]
    return any(not isinstance(part, Dense) for part in parts)
