"""The variant `mixed`: what is kept, what is saved, who loads it, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from inferlab.calibration.statistics import Accumulator, Calibration
from inferlab.errors import InferlabError
from inferlab.models.adapters import layer_names, linear_groups
from inferlab.models.loading import load_model
from inferlab.quantization.driver import Job
from inferlab.quantization.methods import METHODS
from inferlab.quantization.mixed_precision import (
    Unit,
    choose,
    curve,
    largest_over_median,
    named_groups,
    outlier_share,
    ranked,
)
from inferlab.store import Checkpoint, open_checkpoint, save_checkpoint, save_tensors

ROOT = Path(__file__).parent.parent
SECTION = yaml.safe_load((ROOT / "params.yaml").read_text())["quantize"]["mixed"]
PLAIN = {"smoothing": "none", "compensation": False}
TOKENS = torch.randint(3, 512, (2, 24), generator=torch.Generator().manual_seed(1))


def section(**changes: Any) -> Any:
    """The parameters as the repository has them, without smoothing, but for `changes`."""
    content = SECTION | {"int8": SECTION["int8"] | PLAIN} | changes
    return TypeAdapter(METHODS["mixed"].params).validate_json(json.dumps(content))


def unit(name: str, weights: int, nats: float, share: float = 0.0) -> Unit:
    return Unit(name, (f"{name}.a", f"{name}.b"), weights, nats, share)


def job_on(checkpoint: Checkpoint, folder: Path) -> Job:
    """A job on `checkpoint`, with Hessians of random inputs."""
    calibration = Calibration(folder / "calibration")
    calibration.folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    groups = linear_groups(checkpoint)
    for block in {group.block for group in groups}:
        found = {}
        for group in (one for one in groups if one.block == block):
            seen = Accumulator()
            inputs = torch.randn(192, group.weights(checkpoint)[0].shape[1], generator=generator)
            seen.observe(inputs, torch.ones(192))
            found[group.name] = seen.statistics()
        calibration.save(block, found)
    windows = folder / "calibration.safetensors"
    ids = torch.randint(3, 512, (3, 64), generator=generator).int()
    save_tensors(windows, {"input_ids": ids})
    (folder / "variant").mkdir()
    return Job(checkpoint, calibration, windows, folder / "variant", threads=1)


def changed(
    checkpoint: Checkpoint, folder: Path, config: dict[str, Any], **tensors: Any
) -> Checkpoint:
    """A copy of `checkpoint` with other settings and tensors; None removes one."""
    names = {name: checkpoint.tensor(name) for name in checkpoint.names} | tensors
    kept = {name: tensor for name, tensor in names.items() if tensor is not None}
    folder.mkdir()
    save_checkpoint(folder, checkpoint.config | config, kept, aside_from=checkpoint.folder)
    return open_checkpoint(folder)


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return load_model(folder, threads=1)(TOKENS).logits.float()


def test_choice_by_hand() -> None:
    units = [unit("wide", 100, 9.0), unit("narrow", 10, 2.0), unit("outlying", 10, 0.1, 0.5)]
    assert [one.name for one in ranked(units, "sensitivity")] == ["narrow", "wide", "outlying"]
    assert [one.name for one in choose(units, "sensitivity", 0.2)] == ["narrow", "outlying"]
    assert [one.name for one in choose(units, "outlier_share", 0.1)] == ["outlying"]
    assert choose(units, "sensitivity", 0.0) == []


def test_curve_by_hand() -> None:
    units = [unit("wide", 30, 6.0), unit("narrow", 10, 4.0)]
    rows = curve(units, "sensitivity")
    assert [row["nats"] for row in rows] == [10.0, 6.0, 0.0]
    assert [row["layers_16bit"] for row in rows] == [0, 2, 4]
    assert [row["share_16bit"] for row in rows] == [0, 0.25, 1]
    assert [row["megabytes"] for row in rows] == pytest.approx([40e-6, 50e-6, 80e-6])


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 1), st.floats(0, 1)), min_size=1),
    st.floats(0, 0.99),
    st.sampled_from(["sensitivity", "outlier_share"]),
)
def test_choice_stays_within_its_budget(
    drawn: list[tuple[int, float, float]], share: float, rule: Any
) -> None:
    units = [unit(f"u{n}", *values) for n, values in enumerate(drawn)]
    kept = choose(units, rule, share)
    total, weights = (sum(one.weights for one in some) for some in (units, kept))
    assert weights <= share * total
    assert all(one.weights > share * total - weights for one in units if one not in kept)


def test_outliers_by_hand() -> None:
    values = torch.zeros(1000)
    values[:2] = torch.tensor([5.0, -5.0])
    assert outlier_share([values], 3.0) == 0.002
    assert outlier_share([values, torch.zeros(1000)], 3.0) == 0.001
    assert outlier_share([torch.full((8,), 3.0)], 3.0) == 0
    assert largest_over_median(torch.tensor([1.0, -8.0, 2.0])) == 4
    assert largest_over_median(torch.zeros(3)) == 0


@pytest.mark.parametrize("rule", ["sensitivity", "outlier_share"])
def test_what_is_kept_is_saved_as_it_was_and_named(
    tiny_llama: Path, tmp_path: Path, rule: str
) -> None:
    job = job_on(open_checkpoint(tiny_llama), tmp_path)
    report = METHODS["mixed"].run(job, section(rule=rule, share_16bit=0.3))
    saved = open_checkpoint(job.output, quantized=True)
    ignored = saved.config["quantization_config"]["ignore"]
    groups = linear_groups(job.checkpoint)
    assert report.layers_16bit == len(ignored) - 1
    assert report.layers_quantized + report.layers_16bit == 14
    for group in groups:
        together = {layer in ignored for layer in group.layers}
        assert len(together) == 1  # engines fuse them
        for layer in group.layers:
            weight = saved.tensor(f"{layer}.weight")
            if layer in ignored:
                assert torch.equal(weight, job.checkpoint.tensor(f"{layer}.weight"))
            else:
                assert weight.dtype == torch.int8
    total = sum(w.numel() for group in groups for w in group.weights(job.checkpoint))
    kept = sum(w.numel() for g in groups if g.name in ignored for w in g.weights(job.checkpoint))
    assert 0 < kept <= 0.3 * total
    assert report.bits_per_weight == pytest.approx(8 + 8 * kept / total, abs=0.6)


def test_transformers_loads_it_and_it_is_closer_than_int8(tiny_llama: Path, tmp_path: Path) -> None:
    base = logits(tiny_llama)
    distance = {}
    for share in (0.0, 0.5):
        job = job_on(open_checkpoint(tiny_llama), tmp_path / str(share))
        METHODS["mixed"].run(job, section(share_16bit=share))
        distance[share] = float((logits(job.output) - base).square().mean())
    assert 0 < distance[0.5] < 0.8 * distance[0.0]


def test_named_layers_are_kept_with_those_that_read_the_same_input(
    tiny_llama: Path, tmp_path: Path
) -> None:
    job = job_on(open_checkpoint(tiny_llama), tmp_path)
    keep = ["model.layers.1.mlp.up_proj"]
    METHODS["mixed"].run(job, section(rule="outlier_share", share_16bit=0.0, keep=keep))
    ignored = open_checkpoint(job.output, quantized=True).config["quantization_config"]["ignore"]
    assert ignored == ["lm_head", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]


def test_layer_that_does_not_exist_is_answered_with_a_suggestion(
    tiny_llama: Path, tmp_path: Path
) -> None:
    job = job_on(open_checkpoint(tiny_llama), tmp_path)
    with pytest.raises(InferlabError) as caught:
        METHODS["mixed"].run(job, section(keep=["model.layers.1.mlp.upproj"]))
    message = str(caught.value)
    assert message.startswith(
        "unknown linear layer (params.yaml: quantize.mixed.keep) 'model.layers.1.mlp.upproj'"
    )
    assert message.endswith("did you mean model.layers.1.mlp.up_proj?")
    assert not list(job.output.iterdir())


def test_nothing_left_to_quantize_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama)
    job = job_on(checkpoint, tmp_path)
    every = [group.name for group in linear_groups(checkpoint)]
    assert named_groups(linear_groups(checkpoint), every) == set(every)
    with pytest.raises(InferlabError, match="all 8 groups of linear layers are kept in 16 bits"):
        METHODS["mixed"].run(job, section(rule="outlier_share", share_16bit=0.0, keep=every))


@pytest.mark.parametrize("name", ["int8", "int8_tensor", "int4_rtn", "mixed"])
def test_tied_embeddings_stay_tied_and_are_never_quantized(
    tiny_llama: Path, tmp_path: Path, name: str
) -> None:
    tied = {"tie_word_embeddings": True}
    tensors: dict[str, Any] = {"lm_head.weight": None}
    checkpoint = changed(open_checkpoint(tiny_llama), tmp_path / "tied", tied, **tensors)
    job = job_on(checkpoint, tmp_path / "job")
    METHODS[name].run(job, plain_section(name))
    saved = open_checkpoint(job.output, quantized=True)
    assert saved.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in saved
    embedding = "model.embed_tokens.weight"
    assert torch.equal(saved.tensor(embedding), checkpoint.tensor(embedding))
    if name != "int4_rtn":
        model = load_model(job.output, threads=1)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("name", ["int8", "mixed"])
def test_biases_are_kept(tiny_llama: Path, tmp_path: Path, name: str) -> None:
    original = open_checkpoint(tiny_llama)
    generator = torch.Generator().manual_seed(0)
    biases = {
        f"{layer}.bias": torch.randn(
            original.shape(f"{layer}.weight")[0], generator=generator
        ).bfloat16()
        for layer in layer_names(linear_groups(original))
        if "self_attn" in layer
    }
    checkpoint = changed(original, tmp_path / "biased", {"attention_bias": True}, **biases)
    job = job_on(checkpoint, tmp_path / "job")
    METHODS[name].run(job, plain_section(name))
    saved = open_checkpoint(job.output, quantized=True)
    assert all(torch.equal(saved.tensor(bias), value) for bias, value in biases.items())
    base, found = logits(checkpoint.folder), logits(job.output)
    assert (found - base).square().mean().sqrt() < 0.1 * base.std()


@pytest.mark.parametrize("name", ["int8", "int8_tensor", "int4_rtn", "gptq", "mixed"])
@pytest.mark.parametrize("case", ["zeros", "constant", "fp16"])
def test_odd_weights_give_finite_variants(
    tiny_llama: Path, tmp_path: Path, name: str, case: str
) -> None:
    layer = "model.layers.0.mlp.down_proj.weight"
    original = open_checkpoint(tiny_llama)
    weight = original.tensor(layer).clone()
    if case == "zeros":
        weight.zero_()
    elif case == "constant":
        weight[3] = 0.25
    else:
        weight = weight.half()
        weight[5, 7] = 65504.0
    checkpoint = changed(original, tmp_path / case, {}, **{layer: weight})
    job = job_on(checkpoint, tmp_path / "job")
    report = METHODS[name].run(job, plain_section(name))
    numbers = (report.output_error_vs_rtn, report.bits_per_weight)
    assert all(torch.isfinite(torch.tensor(number)) for number in numbers)
    saved = open_checkpoint(job.output, quantized=True)
    floats = (saved.tensor(n) for n in saved.names if saved.tensor(n).is_floating_point())
    assert all(torch.isfinite(tensor).all() for tensor in floats)


@pytest.mark.parametrize("name", ["int8", "int4_rtn", "gptq", "mixed"])
def test_weight_that_is_not_finite_is_named(tiny_llama: Path, tmp_path: Path, name: str) -> None:
    layer = "model.layers.1.mlp.up_proj"
    original = open_checkpoint(tiny_llama)
    job = job_on(original, tmp_path / "job")
    weight = original.tensor(f"{layer}.weight").clone()
    weight[2, 2] = torch.nan
    checkpoint = changed(original, tmp_path / "bad", {}, **{f"{layer}.weight": weight})
    with pytest.raises(InferlabError, match=f"{layer} has a weight that is not finite"):
        METHODS[name].run(replace(job, checkpoint=checkpoint), plain_section(name))


def plain_section(name: str) -> Any:
    """A method's parameters for the tiny model, without smoothing."""
    if name == "mixed":
        return section()
    content = yaml.safe_load((ROOT / "params.yaml").read_text())["quantize"][name]
    if name.startswith("int8"):
        content |= PLAIN
    else:
        content["group_size"] = 32
    return METHODS[name].params(**content)
