"""Whole checkpoints through the driver: what is saved, what is reported, what is refused."""

import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from inferlab.calibration.capture import CalibrateParams, calibrate
from inferlab.calibration.statistics import Calibration
from inferlab.errors import InferlabError
from inferlab.models.adapters import layer_names, linear_groups
from inferlab.models.loading import load_model
from inferlab.quantization.affine import Quantized, minmax_grid, quantize
from inferlab.quantization.driver import (
    Job,
    Layer,
    errors_against_rtn,
    quantize_checkpoint,
)
from inferlab.quantization.formats import Dequantized, read_gptq, storable_grid
from inferlab.quantization.gptq import output_error
from inferlab.quantization.methods import METHODS, integer
from inferlab.store import open_checkpoint, read_json, save_tensors, write_json

ROOT = Path(__file__).parent.parent
SECTIONS = yaml.safe_load((ROOT / "params.yaml").read_text())["quantize"]
PLAIN: dict[str, Any] = {
    "scale_search": False,
    "smoothing": "none",
    "alpha": 0.5,
    "compensation": False,
}


def section(variant: str, **changes: Any) -> Any:
    """The parameters of a variant as the repository has them, but for `changes`."""
    return METHODS[variant].params(**SECTIONS[variant] | changes)


NEAREST = section("int4_rtn", bits=4, group_size=32, symmetric=True, scale_search=False)
GPTQ = section("gptq", bits=4, group_size=32, symmetric=True)
INT8 = section("int8", granularity="channel", **PLAIN)
TOKENS = torch.randint(3, 512, (2, 24), generator=torch.Generator().manual_seed(1))
MakeJob = Callable[[str], Job]


@pytest.fixture(scope="module")
def make_job(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Job]:
    """From a fixture's name to a job on that model, calibrated, with an empty output folder."""
    calibrations: dict[str, tuple[Calibration, Path]] = {}

    def make(name: str) -> Job:
        checkpoint = open_checkpoint(request.getfixturevalue(name))
        if name not in calibrations:
            folder = tmp_path_factory.mktemp(f"{name}_calibration")
            windows = torch.randint(3, 512, (6, 64), generator=torch.Generator().manual_seed(0))
            save_tensors(folder / "calibration.safetensors", {"input_ids": windows.int()})
            calibration = Calibration(folder)
            calibrate(checkpoint, windows[:4], CalibrateParams(4, 4, True), calibration)
            calibrations[name] = calibration, folder / "calibration.safetensors"
        calibration, windows_file = calibrations[name]
        output = tmp_path_factory.mktemp(f"{name}_variant")
        return Job(checkpoint, calibration, windows_file, output, threads=1)

    return make


def saved(job: Job, layer: str, version: int = 1) -> Quantized:
    """A layer of a variant in the GPTQ format."""
    variant = open_checkpoint(job.output, quantized=True)
    names = [f"{layer}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")]
    return read_gptq({name: variant.tensor(name) for name in names}, layer, 4, version)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(TOKENS).logits.float()


def dequantized_model(job: Job, weights: dict[str, Tensor]) -> Any:
    """The original model with other weights [out, in] in its linear layers."""
    model = load_model(job.checkpoint.folder, threads=1)
    for name, weight in weights.items():
        model.get_submodule(name).weight.data = weight.bfloat16()
    return model


def distance(found: Tensor, wanted: Tensor) -> float:
    """Root mean square difference over the spread of what was wanted."""
    return float((found - wanted).square().mean().sqrt() / wanted.std())


def test_job_gives_the_windows_that_calibrate_read(make_job: MakeJob) -> None:
    assert make_job("tiny_llama").calibration_windows().shape == (4, 64)


def test_layers_of_a_group_are_saved_as_if_alone(make_job: MakeJob) -> None:
    job = make_job("tiny_llama")
    report = METHODS["int4_rtn"].run(job, NEAREST)
    for layer in layer_names(linear_groups(job.checkpoint)):
        weight = job.checkpoint.tensor(f"{layer}.weight").float()
        alone = quantize(weight, storable_grid(minmax_grid(weight, 4, 32, True)))
        assert torch.equal(saved(job, layer).codes, alone.codes)
        assert torch.equal(saved(job, layer).dequantize(), alone.dequantize())
    assert report.layers_quantized == 14
    assert report.layers_fallback == 0
    assert report.packed
    assert report.output_error_vs_rtn == pytest.approx(1, abs=0.05)


def test_bits_per_weight_are_those_on_disk(make_job: MakeJob) -> None:
    job = make_job("tiny_llama")
    report = METHODS["int4_rtn"].run(job, NEAREST)
    layers = set(layer_names(linear_groups(job.checkpoint)))
    variant = open_checkpoint(job.output, quantized=True)
    stored = sum(
        variant.tensor(name).nbytes
        for name in variant.names
        if name.rpartition(".")[0] in layers and not name.endswith(".bias")
    )
    weights = sum(job.checkpoint.tensor(f"{layer}.weight").numel() for layer in layers)
    assert report.bits_per_weight == pytest.approx(8 * stored / weights)
    assert report.bits_per_weight >= 4 + (16 + 4) / 32


def test_everything_but_the_linear_layers_is_taken_over(make_job: MakeJob) -> None:
    job = make_job("tiny_llama")
    METHODS["int4_rtn"].run(job, NEAREST)
    variant = open_checkpoint(job.output, quantized=True)
    linear = {f"{layer}.weight" for layer in layer_names(linear_groups(job.checkpoint))}
    for name in set(job.checkpoint.names) - linear:
        assert torch.equal(variant.tensor(name), job.checkpoint.tensor(name))
    assert not linear & set(variant.names)
    declared = variant.config.pop("quantization_config")
    assert variant.config == job.checkpoint.config
    assert (declared["quant_method"], declared["bits"], declared["group_size"]) == ("gptq", 4, 32)
    assert (job.output / "tokenizer.json").is_file()
    assert (job.output / "generation_config.json").is_file()


def test_gptq_has_less_output_error_than_round_to_nearest(make_job: MakeJob) -> None:
    job = make_job("tiny_llama")
    report = METHODS["gptq"].run(job, GPTQ)
    assert report.output_error_vs_rtn < 0.8
    assert report.layers_fallback == 0
    by_hand = []
    for group in linear_groups(job.checkpoint):
        weight = torch.cat(group.weights(job.checkpoint)).float()
        hessian = job.calibration.load(group)["hessian"]
        result = torch.cat([saved(job, layer).dequantize() for layer in group.layers])
        nearest = quantize(weight, minmax_grid(weight, 4, 32, True)).dequantize()
        by_hand.append(
            output_error(weight, result, hessian) / output_error(weight, nearest, hessian)
        )
    assert report.output_error_vs_rtn == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-4)


def test_asymmetric_gptq_is_saved_as_version_2(make_job: MakeJob) -> None:
    job = make_job("tiny_llama")
    params = section("gptq", bits=4, group_size=32, symmetric=False)
    report = METHODS["gptq"].run(job, params)
    assert report.output_error_vs_rtn < 0.9
    config = open_checkpoint(job.output, quantized=True).config["quantization_config"]
    assert (config["checkpoint_format"], config["sym"]) == ("gptq_v2", False)
    group = linear_groups(job.checkpoint)[1]
    (weight,) = group.weights(job.checkpoint)
    assert distance(saved(job, group.name, version=2).dequantize(), weight.float()) < 0.15


def quantize_inputs(model: Any, layers: list[str]) -> None:
    """Round what each layer is given to 8 bits, with one symmetric scale a token."""

    def hook(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,) = inputs
        scale = x.abs().amax(-1, keepdim=True) / 127.5
        return ((x / scale).round().clamp(-128, 127) * scale,)

    for layer in layers:
        model.get_submodule(layer).register_forward_pre_hook(hook)


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_int8_checkpoint_runs_as_w8a8_in_transformers(make_job: MakeJob, granularity: Any) -> None:
    job = make_job("tiny_llama")
    report = METHODS["int8"].run(job, section("int8", granularity=granularity, **PLAIN))
    assert report.packed
    assert report.layers_quantized == 14
    assert 8 < report.bits_per_weight < 8.6
    variant = open_checkpoint(job.output, quantized=True)
    layers = layer_names(linear_groups(job.checkpoint))
    weights = {
        layer: variant.tensor(f"{layer}.weight").float() * variant.tensor(f"{layer}.weight_scale")
        for layer in layers
    }
    plain = dequantized_model(job, weights)
    found, weights_only = logits(load_model(job.output, threads=1)), logits(plain)
    quantize_inputs(plain, layers)
    assert distance(found, logits(plain)) < 0.01
    assert 0.01 < distance(found, weights_only) < 0.05
    assert distance(found, logits(load_model(job.checkpoint.folder, threads=1))) < 0.1


def test_int8_with_compensation_has_less_output_error(make_job: MakeJob) -> None:
    changes = PLAIN | {"compensation": True}
    report = METHODS["int8"].run(make_job("tiny_llama"), section("int8", **changes))
    assert report.output_error_vs_rtn < 0.8
    assert report.layers_fallback == 0


def test_int8_as_the_repository_has_it_stays_close_to_the_base(make_job: MakeJob) -> None:
    job = make_job("tiny_llama")
    METHODS["int8"].run(job, section("int8"))
    base = logits(load_model(job.checkpoint.folder, threads=1))
    assert distance(logits(load_model(job.output, threads=1)), base) < 0.1


@torch.no_grad()
def test_parts_of_a_loaded_int8_model_work_before_the_whole_was_called(make_job: MakeJob) -> None:
    job = make_job("tiny_llama")
    METHODS["int8"].run(job, INT8)
    model = load_model(job.output, threads=1)
    states = model.base_model(TOKENS)[0]
    by_parts = model.get_output_embeddings()(states).float()
    assert torch.equal(by_parts, logits(model))


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_int8_scale_covers_its_channel_or_its_own_layer(
    make_job: MakeJob, granularity: Any
) -> None:
    job = make_job("tiny_llama")
    METHODS["int8_tensor"].run(job, section("int8", granularity=granularity, **PLAIN))
    variant = open_checkpoint(job.output, quantized=True)
    for layer in layer_names(linear_groups(job.checkpoint)):
        weight = job.checkpoint.tensor(f"{layer}.weight").float()
        largest = (
            weight.abs().amax(1, True) if granularity == "channel" else weight.abs().max()[None]
        )
        scale = variant.tensor(f"{layer}.weight_scale")
        assert torch.equal(scale, (2 / 255 * largest).bfloat16().float())
        error = (variant.tensor(f"{layer}.weight").float() * scale - weight).abs()
        assert (error <= scale).all()
        assert error.mean() < 0.3 * scale.mean()


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("int8", INT8),
        ("int4_rtn", NEAREST),
        ("gptq", GPTQ),
    ],
)
def test_transposed_layers_are_saved_dequantized(make_job: MakeJob, name: str, params: Any) -> None:
    job = make_job("tiny_gpt2")
    report = METHODS[name].run(job, params)
    assert not report.packed
    assert report.layers_quantized == 8
    assert report.bits_per_weight < 9
    variant = open_checkpoint(job.output)
    assert "quantization_config" not in variant.config
    assert set(variant.names) == set(job.checkpoint.names)
    for layer in layer_names(linear_groups(job.checkpoint)):
        original = job.checkpoint.tensor(f"{layer}.weight").float()
        result = variant.tensor(f"{layer}.weight").float()
        assert result.shape == original.shape
        assert 0 < distance(result, original) < 0.15
        assert torch.equal(variant.tensor(f"{layer}.bias"), job.checkpoint.tensor(f"{layer}.bias"))


def test_bits_that_no_format_packs_are_simulated_and_said_so(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job("tiny_llama")
    with caplog.at_level(logging.WARNING):
        report = METHODS["int4_rtn"].run(job, section("int4_rtn", bits=3, group_size=32))
    assert not report.packed
    assert report.bits_per_weight == pytest.approx(3 + (16 + 3) / 32)
    assert "saved dequantized" in caplog.text
    weight = open_checkpoint(job.output).tensor("model.layers.0.mlp.down_proj.weight")
    assert max(len(row.unique()) for row in weight[:, :32]) <= 8


def test_layers_that_fall_back_are_counted_and_logged(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job("tiny_llama")
    down = "model.layers.1.mlp.gate_proj"

    def solver(layer: Layer, group_size: int) -> tuple[Quantized, bool]:
        grid = minmax_grid(layer.weight, 4, group_size, True)
        return quantize(layer.weight, grid), layer.name == down

    with caplog.at_level(logging.WARNING):
        report = quantize_checkpoint(job, solver, Dequantized(False), 4, 32, True)
    assert report.layers_fallback == 2  # gate and up are one group
    assert f"{down}: fell back to round-to-nearest" in caplog.text
    assert report.output_error_vs_rtn == pytest.approx(1)


@pytest.mark.parametrize("variant", ["gptq", "int8"])
def test_damping_that_had_to_grow_is_logged(
    make_job: MakeJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variant: str,
) -> None:
    """Eight tokens for 64 columns and more: no Hessian has a factor with next to no damping."""
    job, calibration = make_job("tiny_llama"), Calibration(tmp_path)
    calibrate(job.checkpoint, TOKENS[:1, :8], CalibrateParams(1, 1, False), calibration)
    job = replace(job, calibration=calibration)

    def grown(damping: float) -> list[str]:
        monkeypatch.setattr(integer, "DAMPING", damping)
        params = {
            "gptq": replace(GPTQ, token_weights="none", damping=damping),
            "int8": replace(INT8, compensation=True),
        }
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            METHODS[variant].run(job, params[variant])
        return [one.getMessage() for one in caplog.records if "damping" in one.getMessage()]

    lines = grown(1e-10)
    assert [line.split(":")[0] for line in lines] == [g.name for g in linear_groups(job.checkpoint)]
    assert re.search(
        r": damping grew from 1e-10 to 1e-0[4-9] .* \(0 of 64 columns dead\)", lines[0]
    )
    assert not grown(0.1)


def test_nf4_is_made_and_loaded_on_the_cpu(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device map transformers would put both models on a GPU that is there."""
    job, given = make_job("tiny_llama"), []
    choose = Bnb4BitHfQuantizer.update_device_map

    def seen(self: Bnb4BitHfQuantizer, device_map: Any) -> Any:
        given.append(device_map)
        return choose(self, device_map)

    monkeypatch.setattr(Bnb4BitHfQuantizer, "update_device_map", seen)
    METHODS["nf4"].run(job, section("nf4"))
    load_model(job.output, threads=1)
    assert given == [{"": "cpu"}, {"": "cpu"}]


def test_error_against_rtn_of_given_weights(make_job: MakeJob) -> None:
    job = make_job("tiny_gpt2")
    originals = {
        layer: weight
        for group in linear_groups(job.checkpoint)
        for layer, weight in zip(group.layers, group.weights(job.checkpoint), strict=True)
    }
    assert errors_against_rtn(job, originals.__getitem__, 4, 32, True) == 0

    def nearest(layer: str) -> Tensor:
        weight = originals[layer].float()
        return quantize(weight, minmax_grid(weight, 4, 32, True)).dequantize()

    def twice_as_far(layer: str) -> Tensor:
        return originals[layer] + 2 * (nearest(layer) - originals[layer])

    assert errors_against_rtn(job, nearest, 4, 32, True) == pytest.approx(1, rel=1e-4)
    assert errors_against_rtn(job, twice_as_far, 4, 32, True) == pytest.approx(4, rel=1e-4)


@pytest.mark.parametrize("name", ["int4_rtn", "gptq"])
@pytest.mark.parametrize("group_size", [48, 128])  # 128: wider than the layer
def test_group_size_that_does_not_divide_stops_before_any_work(
    make_job: MakeJob, name: str, group_size: int
) -> None:
    job = make_job("tiny_llama")
    with pytest.raises(InferlabError) as caught:
        METHODS[name].run(job, section(name, group_size=group_size))
    assert str(caught.value).startswith(
        f"group_size {group_size} does not divide the 64 columns of "
        "model.layers.0.self_attn.q_proj; sizes that do: 16, 32, 64"
    )
    assert not list(job.output.iterdir())


def test_gradients_that_calibrate_did_not_store_are_asked_for_before_any_work(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job("tiny_llama")
    plain = Calibration(tmp_path)
    windows = job.calibration_windows()
    calibrate(job.checkpoint, windows, CalibrateParams(4, 4, False), plain)
    with pytest.raises(InferlabError, match=r"without gradients; set calibrate.gradients to true"):
        METHODS["gptq"].run(replace(job, calibration=plain), section("gptq", group_size=32))
    assert not list(job.output.iterdir())


def test_already_quantized_checkpoint_is_refused(make_job: MakeJob) -> None:
    job = make_job("tiny_llama")
    METHODS["int4_rtn"].run(job, NEAREST)
    with pytest.raises(InferlabError) as caught:
        open_checkpoint(job.output)
    assert str(caught.value) == (
        f"{job.output} is already quantized (gptq); give the 16- or 32-bit original"
    )


def test_folder_that_is_no_checkpoint(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InferlabError, match=r"is no checkpoint: it has no config.json"):
        open_checkpoint(tmp_path)
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(InferlabError, match=r"holds pickled weights only .* never loaded"):
        open_checkpoint(tmp_path)
    weights.write_bytes(b"no safetensors")
    with pytest.raises(InferlabError, match="is not a readable safetensors file"):
        open_checkpoint(tmp_path)
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": "one.safetensors"}})
    with pytest.raises(InferlabError, match=r"lacks 1 of the shards .* instance one.safetensors"):
        open_checkpoint(tmp_path)
    assert read_json(tmp_path / "config.json")["model_type"] == "llama"
