"""Linear layers by how their weights are stored: 16 or 32 bits, INT8 a channel, INT4 in groups.

All are weight-only: activations stay in floating point. Each computes the same as a dense layer
with its dequantized weights, up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inferlab.models.wide import linear

FEW_ROWS = 16
"""Up to so many rows reading the weights costs most and they are multiplied as they are stored;
with more the arithmetic does, and a matrix product of floating point is faster."""

ROUNDED_ROWS = 4096
"""Rows that `int8_rows` works on at once; the whole head in fp32 would be the peak of loading."""

VECTOR_BYTES = 16
"""That torch's INT8 kernel loads at once. A tensor in a file begins at any multiple of 8 bytes."""


@dataclass(frozen=True)
class Dense:
    """`weight`: [out, in], fp32 or bf16; `bias`: [out]."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        """`inputs` [..., in] to [..., out]."""
        return linear(inputs, self.weight, self.bias)

    @property
    def ins(self) -> int:
        """Size of the input."""
        return self.weight.shape[1]

    @property
    def dense(self) -> Tensor:
        """The weights, [out, in], fp32."""
        return self.weight.float()

    @property
    def tensors(self) -> list[Tensor]:
        """What is kept in memory."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


@dataclass(frozen=True)
class Int8:
    """`codes`: [out, in], int8; `scale`: [out], fp32; weight = code · scale."""

    codes: Tensor
    scale: Tensor
    bias: Tensor | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        """`inputs` [..., in] to [..., out]."""
        rows, scale = inputs.flatten(0, -2), self.scale.to(inputs.dtype)
        if len(rows) <= FEW_ROWS and self._aligned:
            product = torch._weight_int8pack_mm(rows, self.codes, scale)
        else:
            product = linear(rows, self.codes.to(inputs.dtype)) * scale
        product = product if self.bias is None else product + self.bias
        return product.unflatten(0, inputs.shape[:-1])

    @property
    def ins(self) -> int:
        """Size of the input."""
        return self.codes.shape[1]

    @property
    def _aligned(self) -> bool:
        """Whether torch's kernel may read every row; it crashes where vectors are not aligned."""
        return self.codes.data_ptr() % VECTOR_BYTES == self.ins % VECTOR_BYTES == 0

    @property
    def dense(self) -> Tensor:
        """The weights, [out, in], fp32."""
        return self.codes * self.scale[:, None]

    @property
    def tensors(self) -> list[Tensor]:
        """What is kept in memory."""
        return [self.codes, self.scale] + ([] if self.bias is None else [self.bias])


@dataclass(frozen=True)
class Int4:
    """Four bits a weight, with a scale and a zero point a group: weight = (code − zero) · scale.

    `codes`: [out, in/2], uint8: a group of n weights is n/2 bytes, the first half of the group in
    their low bits and the second half in their high bits. `scale` [out, groups], fp16; `zero`
    [out, groups], uint8.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bias: Tensor | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        """`inputs` [..., in] to [..., out]."""
        return linear(inputs, self._weight(inputs.dtype), self.bias)

    @property
    def ins(self) -> int:
        """Size of the input."""
        return 2 * self.codes.shape[1]

    @property
    def group_size(self) -> int:
        """Weights of a row that share a scale."""
        return self.ins // self.scale.shape[1]

    @property
    def dense(self) -> Tensor:
        """The weights, [out, in], fp32."""
        return self._weight(torch.float32)

    @property
    def tensors(self) -> list[Tensor]:
        """What is kept in memory."""
        kept = [self.codes, self.scale, self.zero]
        return kept if self.bias is None else [*kept, self.bias]

    def _weight(self, dtype: torch.dtype) -> Tensor:
        packed = self.codes.unflatten(1, (self.scale.shape[1], -1))
        codes = torch.cat((packed & 15, packed >> 4), dim=-1)
        centred = codes.view(torch.int8) - self.zero.view(torch.int8)[..., None]
        return (centred.to(dtype) * self.scale[..., None].to(dtype)).flatten(1)


Linear = Dense | Int8 | Int4


@dataclass(frozen=True)
class Projection:
    """Layers that read the same input; their outputs stand one after another."""

    parts: tuple[Linear, ...]

    def __call__(self, inputs: Tensor) -> Tensor:
        """`inputs` [..., in] to [..., all outs]."""
        outputs = [part(inputs) for part in self.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def fused(parts: Sequence[Linear]) -> Projection:
    """One matrix instead of several, where all are of one kind: one product, but a copy."""
    kinds = {(type(part), part.bias is None) for part in parts}
    groups = {part.scale.shape[1:] for part in parts if isinstance(part, Int4)}
    if len(parts) == 1 or len(kinds) > 1 or len(groups) > 1:
        return Projection(tuple(parts))
    first = parts[0]
    joined = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in first.__dataclass_fields__
        if getattr(first, name) is not None
    }
    return Projection((replace(first, **joined),))


def int8_rows(weight: Tensor) -> Int8:
    """Round each row of `weight` [out, in] to 8 bits: scale = max|w| / 127, as bf16 holds it."""
    codes, scale = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    for start in range(0, len(weight), ROUNDED_ROWS):
        piece = slice(start, start + ROUNDED_ROWS)
        rows = weight[piece]
        largest = rows.abs().amax(dim=1).float() / 127
        scale[piece] = torch.where(largest > 0, largest, 1.0).bfloat16().float()
        codes[piece] = (rows / scale[piece, None]).round_().clamp_(-127, 127).to(torch.int8)
    return Int8(codes, scale)


def pack_halves(codes: Tensor, group_size: int) -> Tensor:
    """Four-bit `codes` [out, in], uint8, in the layout of `Int4`: [out, in/2]."""
    first, second = codes.unflatten(1, (-1, group_size)).chunk(2, dim=-1)
    return (first | second << 4).flatten(1).contiguous()
