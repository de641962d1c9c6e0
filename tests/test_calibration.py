"""Calibration statistics by hand, and against plain hooks on the whole model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM

from inferlab.calibration.capture import run_blocks
from inferlab.calibration.statistics import (
    GRAM_BLOCK,
    Accumulator,
    Calibration,
    overview,
    summary,
)
from inferlab.errors import InferlabError
from inferlab.models.adapters import adapter_for, layer_names, linear_groups
from inferlab.quantization.gptq import damped
from inferlab.store import load_tensors, open_checkpoint, save_checkpoint, save_tensors
from stages import calibrate

WINDOWS = torch.randint(3, 512, (5, 40), generator=torch.Generator().manual_seed(0)).int()
GROUPS_A_BLOCK = 4


@pytest.fixture(params=["tiny_llama", "tiny_gpt2"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def captured(folder: Path, batch: int, gradients: bool = False) -> dict[str, dict[str, Tensor]]:
    blocks = run_blocks(open_checkpoint(folder), WINDOWS, batch, gradients)
    return {name: seen.statistics() for _, block in blocks for name, seen in block.items()}


def hooked(folder: Path) -> dict[str, Tensor]:
    """The input [tokens, in] of every linear layer, by plain hooks on the model in one piece."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    inputs: dict[str, Tensor] = {}
    for name in layer_names(linear_groups(open_checkpoint(folder))):
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, given, name=name: inputs.__setitem__(name, given[0].flatten(0, 1).float())
        )
    with torch.no_grad():
        model(WINDOWS.long())
    return inputs


def differentiated(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs [tokens, in] and norms of the loss gradient at the outputs [tokens], by layer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    for name in layer_names(linear_groups(open_checkpoint(folder))):

        def keep(_: object, given: tuple[Tensor], output: Tensor, name: str = name) -> None:
            inputs[name], outputs[name] = given[0].detach().flatten(0, 1).float(), output
            output.retain_grad()

        model.get_submodule(name).register_forward_hook(keep)
    logits = model(WINDOWS.long()).logits[:, :-1].float()
    targets = WINDOWS[:, 1:].long()
    torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    ).backward()
    return inputs, {n: out.grad.flatten(0, 1).float().norm(dim=1) for n, out in outputs.items()}


def test_weighted_sums_by_hand() -> None:
    seen = Accumulator("h")
    seen.observe(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([1.0, 3.0]))
    seen.observe(torch.tensor([[0.0, 1.0]]), torch.tensor([4.0]))
    # 1·[1, 2]ᵀ[1, 2] + 3·[3, 0]ᵀ[3, 0] + 4·[0, 1]ᵀ[0, 1] = [[28, 2], [2, 8]], over 8 and doubled
    expected = torch.tensor([[28.0, 2.0], [2.0, 8.0]]) / 4
    torch.testing.assert_close(seen.statistics()["weighted_hessian"], expected)
    unweighted = torch.tensor([[10.0, 2.0], [2.0, 5.0]]) * 2 / 3
    torch.testing.assert_close(seen.statistics()["hessian"], unweighted)


@pytest.mark.parametrize("columns", [GRAM_BLOCK, GRAM_BLOCK + 7, 2 * GRAM_BLOCK + 1])
def test_wide_inputs_are_multiplied_in_blocks(columns: int) -> None:
    # What a bf16 model gives, and weights whose roots are powers of 2: no factor is rounded.
    inputs = torch.randn(20, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights = 4.0 ** torch.randint(-2, 3, (20,), generator=torch.Generator().manual_seed(1))
    seen = Accumulator()
    seen.observe(inputs, weights)
    seen.observe(inputs, weights)
    inputs = inputs.float()
    found = seen.statistics()
    torch.testing.assert_close(found["hessian"], 2 * inputs.t() @ inputs / 20)
    expected = 2 * (inputs.t() * weights) @ inputs / weights.sum()
    torch.testing.assert_close(found["weighted_hessian"], expected)
    assert torch.equal(found["hessian"], found["hessian"].t())


def test_statistics_by_hand() -> None:
    seen = Accumulator()
    seen.observe(torch.tensor([[1.0, -2.0, 0.0], [3.0, 0.0, 0.0]]))
    seen.observe(torch.tensor([[-1.0, 4.0, 0.0]]))
    found = seen.statistics()
    # XᵀX = [[11, −6, 0], [−6, 20, 0], [0, 0, 0]], over 3 tokens and doubled
    expected = torch.tensor([[22.0, -12.0, 0.0], [-12.0, 40.0, 0.0], [0.0, 0.0, 0.0]]) / 3
    torch.testing.assert_close(found["hessian"], expected)
    assert found["minimum"].tolist() == [-1.0, -2.0, 0.0]
    assert found["maximum"].tolist() == [3.0, 4.0, 0.0]
    torch.testing.assert_close(found["mean"], torch.tensor([3.0, 2.0, 0.0]) / 3)
    torch.testing.assert_close(found["square"], torch.tensor([11.0, 20.0, 0.0]) / 3)
    torch.testing.assert_close(found["fourth"], torch.tensor([83.0, 272.0, 0.0]) / 3)
    assert found["token_absmax"].tolist() == [2.0, 3.0, 4.0]


def test_hessian_of_bf16_inputs_is_summed_in_fp32() -> None:
    """In bf16 a sum of ones would stop at 256."""
    seen = Accumulator()
    for _ in range(3):
        seen.observe(torch.ones(1000, 4, dtype=torch.bfloat16))
    assert seen.tokens == 3000
    torch.testing.assert_close(seen.statistics()["hessian"], torch.full((4, 4), 2.0))
    assert seen.statistics()["hessian"].dtype == torch.float32


def test_weights_round_inputs_to_bf16_at_most_and_the_hessian_stays_definite() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 64, generator=generator).bfloat16()
    weights = torch.rand(400, generator=generator)
    seen = Accumulator()
    seen.observe(inputs, weights)
    found = seen.statistics()["weighted_hessian"].double()
    exact = 2 * (inputs.double().t() * weights.double()) @ inputs.double() / weights.double().sum()
    assert (found - exact).abs().max() < 2**-8 * exact.diagonal().max()
    assert torch.linalg.eigvalsh(found).min() > 0


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_the_precision_of_other_products_stays_as_it_was(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    Accumulator().observe(torch.ones(2, 2))
    assert torch.get_float32_matmul_precision() == precision
    torch.set_float32_matmul_precision(before)


def test_value_that_is_not_finite_is_refused() -> None:
    seen = Accumulator("h.3.mlp")
    seen.observe(torch.tensor([[1.0, float("inf")]]))
    with pytest.raises(InferlabError, match=r"^h\.3\.mlp: the .* inputs is not finite"):
        seen.statistics()


def test_overview_reports_dead_columns_outliers_and_kurtosis() -> None:
    seen = Accumulator()
    seen.observe(torch.tensor([[1.0, 1.0, 8.0, 0.0], [-1.0, 1.0, 0.0, 0.0]]))
    (row,) = overview({"block.layer": seen.statistics()})
    assert row["layer"] == "block.layer"
    assert (row["tokens"], row["columns"], row["dead_columns"]) == (2, 4, 1)
    assert row["absmax"] == 8
    assert row["absmax_over_median"] == 8
    assert row["kurtosis"] == pytest.approx((1 + 1 + 2) / 3)


def test_all_columns_dead_still_gives_finite_rows() -> None:
    seen = Accumulator()
    seen.observe(torch.zeros(3, 2))
    (row,) = overview({"layer": seen.statistics()})
    assert row["dead_columns"] == 2
    assert row["kurtosis"] == 0
    assert row["absmax_over_median"] == 0


def test_summary_counts_groups_with_too_few_tokens() -> None:
    statistics = {}
    for name, columns in (("narrow", 2), ("wide", 4)):
        seen = Accumulator()
        seen.observe(torch.eye(3, columns))
        statistics[name] = seen.statistics()
    result = summary(overview(statistics))
    assert result["tokens"] == 3
    assert result["groups"] == 2
    assert result["groups_short_of_tokens"] == 1
    assert result["dead_columns"] == 1
    assert json.dumps(result)


def test_statistics_are_read_back_a_group_at_a_time(tiny_llama: Path, tmp_path: Path) -> None:
    group = linear_groups(open_checkpoint(tiny_llama))[0]
    calibration = Calibration(tmp_path)
    one, other = ({"hessian": torch.eye(2) * n, "token_absmax": torch.ones(7)} for n in (1, 2))
    calibration.save(3, {"h.3.a": one, "h.3.ab": other})
    calibration.save(0, {"h.0.a": one})
    found = calibration.load(replace(group, block=3, name="h.3.a"))
    assert set(found) == {"hessian", "token_absmax"}
    assert torch.equal(found["hessian"], one["hessian"])
    assert calibration.tokens() == 7
    with pytest.raises(InferlabError, match=r"has no statistics of h.3.b; run calibrate"):
        calibration.load(replace(group, block=3, name="h.3.b"))
    with pytest.raises(InferlabError, match="not a readable safetensors file"):
        calibration.load(replace(group, block=4, name="h.4.a"))


def test_capture_equals_plain_hooks_on_the_whole_model(folder: Path) -> None:
    found, inputs = captured(folder, batch=len(WINDOWS)), hooked(folder)
    groups = linear_groups(open_checkpoint(folder))
    assert set(found) == {group.name for group in groups}
    for group in groups:
        for layer in group.layers:
            x = inputs[layer]
            hessian = 2 * x.t() @ x / len(x)
            scale = float(hessian.diagonal().mean())
            torch.testing.assert_close(
                found[group.name]["hessian"], hessian, rtol=2e-2, atol=1e-2 * scale
            )
            torch.testing.assert_close(
                found[group.name]["token_absmax"], x.abs().amax(1), rtol=5e-2, atol=1e-3
            )
            torch.testing.assert_close(
                found[group.name]["maximum"], x.amax(0), rtol=5e-2, atol=5e-2
            )


def test_batch_size_does_not_matter(folder: Path) -> None:
    whole = captured(folder, batch=len(WINDOWS))
    for batch in (1, 2):
        for name, found in captured(folder, batch).items():
            scale = float(whole[name]["hessian"].diagonal().mean())
            torch.testing.assert_close(
                found["hessian"], whole[name]["hessian"], rtol=2e-2, atol=1e-2 * scale
            )
            assert len(found["token_absmax"]) == WINDOWS.numel()


@pytest.mark.parametrize("gradients", [False, True])
def test_each_block_comes_once_with_its_groups(folder: Path, gradients: bool) -> None:
    blocks = list(run_blocks(open_checkpoint(folder), WINDOWS[:1], 1, gradients))
    assert [number for number, _ in blocks] == ([1, 0] if gradients else [0, 1])
    for number, block in blocks:
        assert len(block) == GROUPS_A_BLOCK
        assert all(f".{number}." in name for name in block)


def test_gradients_change_nothing_but_add_the_weighted_hessian(folder: Path) -> None:
    plain, both = captured(folder, 5), captured(folder, 5, gradients=True)
    assert set(plain) == set(both)
    for name, found in both.items():
        assert set(found) - set(plain[name]) == {"weighted_hessian"}
        torch.testing.assert_close(found["hessian"], plain[name]["hessian"])


@pytest.mark.parametrize("batch", [2, 5])
def test_tokens_are_weighed_by_the_gradient_of_the_loss(folder: Path, batch: int) -> None:
    found = captured(folder, batch, gradients=True)
    inputs, norms = differentiated(folder)
    for group in linear_groups(open_checkpoint(folder)):
        squares = torch.stack([norms[layer].square() for layer in group.layers]).sum(0)
        weights, x = squares.sqrt(), inputs[group.layers[0]]
        expected = 2 * (x.t() * weights) @ x / weights.sum()
        scale = float(expected.diagonal().mean())
        torch.testing.assert_close(
            found[group.name]["weighted_hessian"], expected, rtol=5e-2, atol=3e-2 * scale
        )
        plain = 2 * x.t() @ x / len(x)
        assert not torch.allclose(plain, expected, rtol=5e-2, atol=3e-2 * scale)


def test_hessians_are_symmetric_and_positive_definite_once_damped(tiny_llama: Path) -> None:
    for found in captured(tiny_llama, 2, gradients=True).values():
        for name in ("hessian", "weighted_hessian"):
            assert torch.equal(found[name], found[name].t())
            assert not torch.linalg.cholesky_ex(damped(found[name], 1e-4)).info


def test_dead_inputs_of_a_real_layer_are_reported(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    tensors = load_tensors(tmp_path / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][[2, 5]] = 0
    save_tensors(tmp_path / "model.safetensors", tensors)
    rows = {row["layer"]: row for row in overview(captured(tmp_path, batch=5))}
    assert rows["model.layers.1.self_attn.q_proj"]["dead_columns"] == 2
    assert sum(row["dead_columns"] for row in rows.values()) == 2


def test_groups_of_both_architectures(tiny_llama: Path, tiny_gpt2: Path) -> None:
    llama = linear_groups(open_checkpoint(tiny_llama))
    assert [group.layers for group in llama[:2]] == [
        tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv"),
        ("model.layers.0.self_attn.o_proj",),
    ]
    assert [group.block for group in llama] == [0] * 4 + [1] * 4
    checkpoint = open_checkpoint(tiny_llama)
    assert [tuple(part.shape) for part in llama[0].weights(checkpoint)] == [
        (128, 64),
        (64, 64),
        (64, 64),
    ]
    gpt2 = linear_groups(open_checkpoint(tiny_gpt2))
    assert [tuple(part.shape) for part in gpt2[0].weights(open_checkpoint(tiny_gpt2))] == [
        (192, 64)
    ]


def altered(source: Path, target: Path, dropped: str, **changes: str) -> Path:
    """A copy of a checkpoint without the tensors whose name holds `dropped`."""
    checkpoint = open_checkpoint(source)
    kept = {name: checkpoint.tensor(name) for name in checkpoint.names if dropped not in name}
    save_checkpoint(target, {**checkpoint.config, **changes}, kept, aside_from=source)
    return target


def test_unknown_architecture_is_told_the_known_and_how_to_add_one(
    tiny_llama: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(altered(tiny_llama, tmp_path, "nothing", model_type="lama"))
    with pytest.raises(InferlabError) as caught:
        adapter_for(checkpoint)
    message = str(caught.value)
    assert "unknown architecture (model_type of config.json) 'lama'; known: gpt2, llama" in message
    assert "did you mean llama?" in message
    assert "to add one, name its layers in src/inferlab/models/adapters.py" in message
    assert "\n" not in message


def test_missing_layer_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(altered(tiny_llama, tmp_path, "layers.1.mlp.up_proj"))
    with pytest.raises(InferlabError, match=r"the layer model.layers.1.mlp.up_proj has no weight"):
        linear_groups(checkpoint)


def test_no_linear_layer_names_what_is_there(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(altered(tiny_llama, tmp_path, ".layers."))
    with pytest.raises(
        InferlabError, match=r"no linear layer found under model.layers.\*"
    ) as caught:
        linear_groups(checkpoint)
    assert "the first tensors are lm_head.weight, model.embed_tokens.weight" in str(caught.value)


def test_more_windows_than_were_prepared_names_the_key_to_raise(
    tiny_llama: Path, workspace: Path
) -> None:
    (workspace / "models").mkdir()
    (workspace / "models" / "base").symlink_to(tiny_llama)
    (workspace / "data" / "windows").mkdir(parents=True)
    prepared = {"input_ids": torch.zeros(2, 8, dtype=torch.int32)}
    save_tensors(workspace / "data" / "windows" / "calibration.safetensors", prepared)
    with pytest.raises(
        SystemExit, match=r"only 2 were prepared; raise prepare\.(\w+) \("
    ) as caught:
        calibrate.main()
    key = str(caught.value).split("raise prepare.")[1].split()[0]
    assert key in yaml.safe_load((workspace / "params.yaml").read_text())["prepare"]
    assert not (workspace / "data" / "calibration").exists()
