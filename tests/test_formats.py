"""Packed formats: words by hand, reading back, and the kernel of the library that defined them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inferlab.quantization.affine import Grid, Quantized, minmax_grid, quantize, searched_grid
from inferlab.quantization.formats import (
    PACKABLE,
    Dequantized,
    GptqFormat,
    Int8Format,
    pack,
    read_gptq,
    storable_grid,
    unpack,
)


def example(bits: int, symmetric: bool, group_size: int = 32) -> tuple[Tensor, Quantized]:
    """A weight [32, 64] and its quantized form; symmetric grids get scales of both signs."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(bits))
    make = searched_grid if symmetric else minmax_grid
    grid = storable_grid(make(weight, bits, group_size, symmetric))
    return weight, quantize(weight, grid)


def test_pack_by_hand() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=torch.uint8).t()
    assert pack(codes, 4).tolist() == [[0x87654321 - 2**32]]
    assert pack(codes.flip(0), 4).tolist() == [[0x12345678]]
    assert pack(torch.tensor([[0xFE], [0xDC], [0xBA], [0x08]]), 8).tolist() == [[0x08BADCFE]]
    two_bits = torch.tensor([[1], [2], [3]] + [[0]] * 13, dtype=torch.uint8)
    assert pack(two_bits, 2).tolist() == [[0b111001]]


@settings(deadline=None)
@given(st.sampled_from(PACKABLE), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**31))
def test_unpack_is_the_inverse_of_pack(bits: int, words: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (words * 32 // bits, columns)
    codes = torch.randint(0, 2**bits, shape, generator=generator).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.int32
    assert packed.shape == (words, columns)
    assert torch.equal(unpack(packed, bits), codes)


def test_storable_scales_are_exact_in_bf16_and_fp16() -> None:
    grid = storable_grid(Grid(torch.rand(4, 3) * 0.1 + 0.001, torch.zeros(4, 3), 4, 8))
    assert torch.equal(grid.scale.bfloat16().float(), grid.scale)
    assert torch.equal(grid.scale.half().float(), grid.scale)


@pytest.mark.parametrize("bits", PACKABLE)
@pytest.mark.parametrize(("symmetric", "version"), [(True, 1), (False, 2)])
def test_gptq_tensors_read_back_the_same(bits: int, symmetric: bool, version: int) -> None:
    _, quantized = example(bits, symmetric)
    target = GptqFormat(bits, 32, symmetric)
    tensors = target.tensors("layer", quantized)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "layer.qweight": (torch.int32, (64 * bits // 32, 32)),
        "layer.qzeros": (torch.int32, (2, 32 * bits // 32)),
        "layer.scales": (torch.float16, (2, 32)),
        "layer.g_idx": (torch.int32, (64,)),
    }
    assert tensors["layer.g_idx"].tolist() == [0] * 32 + [1] * 32
    assert target.config()["checkpoint_format"] == ("gptq" if version == 1 else "gptq_v2")
    again = read_gptq(tensors, "layer", bits, version)
    assert torch.equal(again.codes, quantized.codes)
    assert torch.equal(again.grid.zero, quantized.grid.zero)
    assert torch.equal(again.dequantize(), quantized.dequantize())


def test_version_1_stores_zero_minus_one() -> None:
    _, quantized = example(4, symmetric=True)
    tensors = GptqFormat(4, 32, True).tensors("layer", quantized)
    assert set(tensors["layer.qzeros"].flatten().tolist()) == {0x77777777}


@pytest.mark.parametrize("group_size", [0, 64])
def test_group_of_a_whole_row_is_declared_as_minus_one(group_size: int) -> None:
    assert GptqFormat(4, group_size, True).config()["group_size"] == (group_size or -1)


@pytest.mark.smoke
@pytest.mark.parametrize("bits", PACKABLE)
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptqmodel_dequantizes_to_the_same_weights(bits: int, symmetric: bool) -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    _, quantized = example(bits, symmetric)
    tensors = GptqFormat(bits, 32, symmetric).tensors("layer", quantized)
    kernel = TorchLinear(bits, 32, symmetric, False, in_features=64, out_features=32).eval()
    kernel.load_state_dict({name.split(".")[1]: tensor for name, tensor in tensors.items()})
    if symmetric:
        convert_gptq_v1_to_v2_format_module(kernel, bits, torch.int32)
    kernel.post_init()
    weight = kernel.dequantize_weight().t()
    assert torch.equal(weight.float(), quantized.dequantize().half().float())


@pytest.mark.parametrize("per_channel", [True, False])
def test_int8_tensors_are_signed_codes_and_scales(per_channel: bool) -> None:
    weight = torch.tensor([[1.0, -1.0, 0.0], [0.5, 0.25, -0.5]])
    scale = torch.tensor([[2 / 255], [1 / 255]]) if per_channel else torch.full((2, 1), 2 / 255)
    quantized = quantize(weight, Grid(scale, torch.full((2, 1), 128.0), 8, 3))
    tensors = Int8Format(per_channel).tensors("layer", quantized)
    assert tensors["layer.weight"].dtype == torch.int8
    assert tensors["layer.weight_scale"].dtype == torch.float32
    assert tensors["layer.weight_scale"].shape == ((2, 1) if per_channel else (1,))
    product = tensors["layer.weight"].float() * tensors["layer.weight_scale"]
    torch.testing.assert_close(product, quantized.dequantize())
    assert (product - weight).abs().max() <= 1.0001 / 255


def test_dequantized_weights_stand_as_the_layer_stores_them() -> None:
    _, quantized = example(3, symmetric=True)
    plain = Dequantized(transposed=False).tensors("layer", quantized)["layer.weight"]
    turned = Dequantized(transposed=True).tensors("layer", quantized)["layer.weight"]
    assert plain.dtype == torch.bfloat16
    assert torch.equal(plain, quantized.dequantize().bfloat16())
    assert torch.equal(turned, plain.t())
