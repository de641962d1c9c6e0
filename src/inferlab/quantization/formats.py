"""Checkpoint formats: how quantized matrices are laid out so that other engines load them.

Each format turns one layer into named tensors and says what config.json must declare.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inferlab.quantization.affine import Grid, Quantized

INT32_BITS = 32
PACKABLE = (2, 4, 8)


@dataclass(frozen=True)
class GptqFormat:
    """The format of AutoGPTQ and gptqmodel, which vLLM and transformers read too.

    qweight int32 [in/per, out] holds `per` = 32/bits codes of one column after another, the first
    in the low bits; qzeros int32 [groups, out/per] holds the zero points likewise; scales fp16
    [groups, out]; g_idx int32 [in] gives each input's group. Version 1 stores zero − 1, which has
    no room for a zero point of 0, so asymmetric grids are saved as version 2 (gptqmodel loads it;
    vLLM's GPTQ loader takes symmetric ones only).
    """

    bits: int
    group_size: int
    symmetric: bool

    packed = True

    def tensors(self, layer: str, quantized: Quantized) -> dict[str, Tensor]:
        """The tensors of one layer, for `quantized` [out, in]."""
        grid, columns = quantized.grid, quantized.codes.shape[1]
        zeros = grid.zero - 1 if self.symmetric else grid.zero
        return {
            f"{layer}.qweight": pack(quantized.codes.t(), self.bits),
            f"{layer}.qzeros": pack(zeros, self.bits).t().contiguous(),
            f"{layer}.scales": grid.scale.t().half(),
            f"{layer}.g_idx": torch.arange(columns, dtype=torch.int32) // grid.group_size,
        }

    def config(self) -> dict[str, object]:
        """`quantization_config` of config.json."""
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq" if self.symmetric else "gptq_v2",
            "bits": self.bits,
            "group_size": self.group_size or -1,
            "sym": self.symmetric,
            "desc_act": False,
            "lm_head": False,
        }


@dataclass(frozen=True)
class Int8Format:
    """compressed-tensors W8A8: int8 weights, activations quantized a token at a time when run.

    weight int8 [out, in]; weight_scale fp32 [out, 1] a channel, or [1] a tensor. The layers
    `kept` stay in 16 bits.
    """

    per_channel: bool
    kept: tuple[str, ...] = ()
    bits = 8
    packed = True

    def tensors(self, layer: str, quantized: Quantized) -> dict[str, Tensor]:
        """The tensors of one layer, for `quantized` [out, in] on a symmetric 8-bit grid."""
        scale = quantized.grid.scale
        return {
            f"{layer}.weight": (quantized.codes.int() - 128).to(torch.int8),
            f"{layer}.weight_scale": scale if self.per_channel else scale[0],
        }

    def config(self) -> dict[str, object]:
        """`quantization_config` of config.json."""
        weights = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "dynamic": False,
            "strategy": "channel" if self.per_channel else "tensor",
        }
        inputs = weights | {"dynamic": True, "strategy": "token"}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", *self.kept],
        }


@dataclass(frozen=True)
class Dequantized:
    """No packing: the quantized values in bf16, for widths and layers that no format stores."""

    transposed: bool
    packed = False

    def tensors(self, layer: str, quantized: Quantized) -> dict[str, Tensor]:
        """The tensors of one layer, for `quantized` [out, in]."""
        weight = quantized.dequantize().bfloat16()
        return {f"{layer}.weight": weight.t() if self.transposed else weight}

    def config(self) -> None:
        """Nothing to declare: any engine loads it as a plain checkpoint."""
        return None


Format = GptqFormat | Int8Format | Dequantized


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [n, m] of `bits` bits along n: int32 [n/per, m], the first in the low bits."""
    per = INT32_BITS // bits
    words = torch.zeros(len(codes) // per, codes.shape[1], dtype=torch.int64)
    for position in range(per):
        words |= codes[position::per].long() << (bits * position)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(words: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: int32 [n/per, m] to uint8 [n, m]."""
    shifts = torch.arange(0, INT32_BITS, bits).view(1, -1, 1)
    codes = (words.long().unsqueeze(1) >> shifts) & (2**bits - 1)
    return codes.flatten(0, 1).to(torch.uint8)


def read_gptq(tensors: Mapping[str, Tensor], layer: str, bits: int, version: int = 1) -> Quantized:
    """Read one layer of the GPTQ format (version 1 or 2) back, [out, in]."""
    codes = unpack(tensors[f"{layer}.qweight"], bits).t()
    zero = unpack(tensors[f"{layer}.qzeros"].t(), bits).float() + (1 if version == 1 else 0)
    scale = tensors[f"{layer}.scales"].t().float()
    return Quantized(codes, Grid(scale, zero, bits, codes.shape[1] // scale.shape[1]))


def storable_grid(grid: Grid) -> Grid:
    """The grid with scales as bf16 holds them: readers in any precision then agree exactly."""
    return replace(grid, scale=grid.scale.bfloat16().float())
