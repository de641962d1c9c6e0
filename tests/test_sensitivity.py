"""W8A8 stand-ins and what they cost the model: against integers by hand and measured divergence."""

import copy
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr
from transformers import PreTrainedModel

from inferlab.errors import InferlabError
from inferlab.models.adapters import layer_names, linear_groups
from inferlab.models.loading import load_model
from inferlab.quantization.mixed_precision import TextParams, Unit
from inferlab.quantization.mixtures import Mixture, mixtures, run_mixtures
from inferlab.quantization.sensitivity import divergence, layer_effects, log_probabilities
from inferlab.quantization.w8a8 import rounded, running_as, w8a8_layers
from inferlab.store import open_checkpoint

WINDOWS = torch.randint(3, 512, (2, 64), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["tiny_llama", "tiny_gpt2"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def loaded(folder: Path) -> PreTrainedModel:
    return load_model(folder, threads=1).float()


def test_layer_by_hand() -> None:
    """Steps of 2 and 1 for the rows of weights, of 1 for the input."""
    weight = torch.tensor([[255.0, 2.0], [-127.5, 60.4]])
    layer = rounded(weight, torch.tensor([0.5, 0.0]))
    assert layer.scale.flatten().tolist() == [2.0, 1.0]
    inputs = torch.tensor([[127.0, 1.4]])
    # Codes 127 and 1 for both rows of weights; 60.4 becomes 60, −127.5 becomes −128.
    assert layer(inputs).tolist() == [[(127 * 127 + 1 * 1) * 2 + 0.5, -128 * 127 + 60.0]]


def test_layer_leaves_its_inputs_alone_and_keeps_their_dtype() -> None:
    layer = rounded(torch.randn(8, 16, generator=torch.Generator().manual_seed(0)))
    for dtype in (torch.float32, torch.bfloat16):
        inputs = torch.linspace(-3, 2, 48).view(3, 16).to(dtype)
        before = inputs.clone()
        assert layer(inputs).dtype == dtype
        assert torch.equal(inputs, before)


def test_stand_ins_leave_again_even_after_a_fault(folder: Path) -> None:
    model, layers = loaded(folder), w8a8_layers(open_checkpoint(folder))
    before = log_probabilities(model, WINDOWS[0])
    with pytest.raises(ValueError), running_as(model, layers, layers):
        during = log_probabilities(model, WINDOWS[0])
        raise ValueError
    assert 0 < divergence(before, during) < 0.05
    assert torch.equal(log_probabilities(model, WINDOWS[0]), before)


def test_divergence_by_hand() -> None:
    halves, quarters = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert divergence(halves, quarters) == pytest.approx(0.5 * (torch.tensor(4 / 3).log().item()))
    assert divergence(halves, halves) == 0


def test_effects_predict_the_measured_divergence(folder: Path) -> None:
    """One backward pass against running the model once for each layer."""
    model, layers = loaded(folder), w8a8_layers(open_checkpoint(folder))
    many = torch.randint(3, 512, (8, 64), generator=torch.Generator().manual_seed(1))
    effects = layer_effects(model, layers, many, seed=0)
    reference = [log_probabilities(model, window) for window in many]
    measured = []
    for name in layers:
        with running_as(model, layers, [name]):
            found = [log_probabilities(model, window) for window in many]
        pairs = zip(reference, found, strict=True)
        measured.append(sum(divergence(*pair) for pair in pairs) / len(many))
    predicted = [effects[name].nats for name in layers]
    assert spearmanr(predicted, measured).statistic > 0.8
    assert sum(predicted) == pytest.approx(sum(measured), rel=0.3)


def test_effects_of_nothing_are_nothing_and_the_model_is_left_as_it_was(tiny_llama: Path) -> None:
    model = loaded(tiny_llama)
    before = log_probabilities(model, WINDOWS[0])
    names = layer_names(linear_groups(open_checkpoint(tiny_llama)))
    copies = {name: copy.deepcopy(model.get_submodule(name)) for name in names}
    effects = layer_effects(model, copies, WINDOWS, seed=0)
    assert all((effect.nats, effect.noise) == (0, 0) for effect in effects.values())
    assert torch.equal(log_probabilities(model, WINDOWS[0]), before)


def test_inputs_rounded_to_zero_are_counted(tiny_llama: Path) -> None:
    """A norm with one channel 1,000 times the rest leaves nothing of the others."""
    model = loaded(tiny_llama)
    layers = w8a8_layers(open_checkpoint(tiny_llama))
    name = "model.layers.0.self_attn.q_proj"
    before = layer_effects(model, layers, WINDOWS, seed=0)[name].zeroed
    model.get_parameter("model.layers.0.input_layernorm.weight").data[7] *= 1e4
    after = layer_effects(model, layers, WINDOWS, seed=0)[name].zeroed
    assert before < 0.05
    assert after == pytest.approx(63 / 64, abs=0.05)


def test_inputs_that_are_not_finite_are_named(tiny_llama: Path) -> None:
    model, layers = loaded(tiny_llama), w8a8_layers(open_checkpoint(tiny_llama))
    model.get_parameter("model.layers.1.post_attention_layernorm.weight").data[0] = torch.inf
    with pytest.raises(InferlabError, match=r"^model\.layers\.1\.mlp\.(gate|up)_proj: its inputs"):
        layer_effects(model, layers, WINDOWS, seed=0)


def test_text_is_cut_to_what_is_asked_for() -> None:
    windows = torch.arange(40, dtype=torch.int32).view(4, 10)
    cut = TextParams(windows=2, tokens=3).cut(windows)
    assert cut.tolist() == [[0, 1, 2], [10, 11, 12]]
    assert cut.dtype == torch.int64
    assert TextParams(windows=9, tokens=99).cut(windows).shape == (4, 10)


def test_mixtures_are_run_as_they_say(tiny_llama: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama)
    model, layers = loaded(tiny_llama), w8a8_layers(checkpoint)
    units = [
        Unit(
            g.name, g.layers, sum(w.numel() for w in g.weights(checkpoint)), float(number + 1), 0.0
        )
        for number, g in enumerate(linear_groups(checkpoint))
    ]
    wanted = mixtures(units, ("sensitivity",), (0.2,))
    wanted.append(Mixture("all 16-bit", "none", tuple(units), 0.0))
    rows = run_mixtures(model, layers, wanted, WINDOWS)
    everything, some, nothing = rows
    assert everything["nats"] > some["nats"] > nothing["nats"] == pytest.approx(0, abs=1e-9)
    assert nothing["token_perplexity"] == pytest.approx(nothing["token_perplexity_16bit"])
    total = sum(unit.weights for unit in units)
    assert everything["megabytes"] == pytest.approx(total / 1e6)
    assert nothing["megabytes"] == pytest.approx(2 * total / 1e6)
    assert total < 1e6 * some["megabytes"] <= 1.2 * total
    assert (everything["layers_16bit"], nothing["layers_16bit"]) == (0, 14)
