"""bf16 products through fp32: what hardware would give, whether the processor has it or not."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from inferlab.models import wide

ROWS, INS, OUTS = 32, 96, 48


@pytest.fixture(params=[False, True], ids=["without_bf16", "with_bf16"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(wide, "multiplies_bf16", lambda device: request.param)
    return request.param


def factors(dtype: torch.dtype, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, INS), (OUTS, INS), (OUTS,)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def exact(*tensors: Tensor) -> Tensor:
    return F.linear(*(tensor.bfloat16().double() for tensor in tensors))


def within_a_rounding(found: Tensor, expected: Tensor) -> bool:
    """bf16 keeps 8 bits: half a step is at most 2⁻⁸ of the value; sums of fp32 add a little."""
    return bool(((found.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-4).all())


def test_product_is_exact_but_for_one_rounding(processor: bool) -> None:
    x, w, b = factors(torch.bfloat16)
    found = wide.linear(x, w, b)
    assert found.dtype == torch.bfloat16
    assert within_a_rounding(found, exact(x, w, b))
    assert within_a_rounding(wide.linear(x, w), exact(x, w))


def test_without_bf16_products_are_those_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    product = F.linear
    monkeypatch.setattr(wide, "multiplies_bf16", lambda device: False)
    monkeypatch.setattr(
        wide.F, "linear", lambda x, *more: seen.append(x.dtype) or product(x, *more)
    )
    wide.linear(*factors(torch.bfloat16))
    wide.linear(*factors(torch.bfloat16, wide.FEWEST_ROWS - 1))
    wide.linear(*factors(torch.float32))
    assert seen == [torch.float32, torch.bfloat16, torch.float32]


def test_fp32_is_left_alone(processor: bool) -> None:
    tensors = factors(torch.float32)
    assert torch.equal(wide.linear(*tensors), F.linear(*tensors))


def test_autocast_rounds_to_bf16_and_has_its_gradient(processor: bool) -> None:
    x, w, b = (tensor.requires_grad_() for tensor in factors(torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = wide.linear(x, w, b)
    assert found.dtype == torch.bfloat16
    assert within_a_rounding(found.detach(), exact(*(t.detach() for t in (x, w, b))))
    found.float().square().sum().backward()
    slope = 2 * found.detach().double()
    expected = slope @ w.detach().double(), slope.t() @ x.detach().double(), slope.sum(0)
    for tensor, gradient in zip((x, w, b), expected, strict=True):
        assert tensor.grad.dtype == torch.float32
        assert (tensor.grad.double() - gradient).norm() / gradient.norm() < 0.01


def test_widen_takes_plain_layers_and_keeps_their_weights(processor: bool) -> None:
    class Packed(nn.Linear):
        """One of a library's."""

    model = nn.Sequential(nn.Linear(INS, OUTS), nn.ReLU(), Packed(OUTS, 4)).bfloat16()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = factors(torch.bfloat16)[0]
    expected = exact(x, *model[0].parameters())
    wide.widen(model)
    assert [type(layer) for layer in model] == [wide.WideLinear, nn.ReLU, Packed]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert within_a_rounding(model[0](x).detach(), expected)


@pytest.fixture
def model() -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **sizes, **heads)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def outcome(model: PreTrainedModel) -> tuple[Tensor, list[Tensor]]:
    """The logits of a padded batch, and the gradients of their sum of squares."""
    tokens = torch.arange(80).reshape(2, 40)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    model.zero_grad()
    logits = model(tokens, attention_mask=mask).logits.float()[1:]
    logits.square().sum().backward()
    return logits.detach(), [weight.grad.float() for weight in model.parameters()]


def test_a_model_and_its_gradients_stay_the_same(processor: bool, model: PreTrainedModel) -> None:
    logits, gradients = outcome(model)
    wide.widen(model)
    assert model.config._attn_implementation == ("sdpa" if processor else wide.ATTENTION)
    found, slopes = outcome(model)
    assert (found - logits).norm() / logits.norm() < 0.01
    for slope, gradient in zip(slopes, gradients, strict=True):
        assert (slope - gradient).norm() / gradient.norm() < 0.02


def test_a_widened_model_is_saved_as_any_other(
    processor: bool, model: PreTrainedModel, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "before")
    wide.widen(model)
    model.save_pretrained(tmp_path / "after")
    before, after = ((tmp_path / name / "config.json").read_text() for name in ("before", "after"))
    assert after == before
