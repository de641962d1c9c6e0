"""33.2: errors by who shares a scale; the ratio follows from the scales; the stage end to end."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlab.errors import InferlabError
from inferlab.models.adapters import layer_names, linear_groups
from inferlab.quantization.channel_scales import (
    ChannelScalesParams,
    layer_errors,
    measure,
    metrics,
)
from inferlab.store import open_checkpoint, save_checkpoint
from stages import channel_scales

LAYER = "model.layers.0.self_attn.q_proj"
PARAMS = ChannelScalesParams(layer=LAYER, bits=8, group_size=16)


def spread_rows(seed: int, rows: int = 64, columns: int = 256) -> torch.Tensor:
    """Normal rows on widths from 0.1 to 10."""
    generator = torch.Generator().manual_seed(seed)
    widths = torch.logspace(-1, 1, rows)
    return torch.randn(rows, columns, generator=generator) * widths[:, None]


def test_by_hand() -> None:
    """Steps of 2/3 and 2; what is between codes −1.5, −0.5, 0.5 (in steps) is lost."""
    weight = torch.tensor([[1.0, 1.0], [3.0, -1.0]])
    one = measure("layer", weight, 2, 1)
    assert one.tensor_step == 2
    assert one.steps.tolist() == [pytest.approx(2 / 3), 2.0]
    # Codes stand for −2, −1, 0 and 1 step.
    assert one.row_mse["tensor"].tolist() == [1.0, 1.0]
    assert one.row_mse["channel"].tolist() == [pytest.approx(1 / 9), 1.0]
    assert one.mse("group") == pytest.approx((1 / 9 + 1 / 9 + 1 + 1 / 9) / 4)
    assert one.predicted["channel"] == pytest.approx((4 / 9 + 4) / 2 / 12)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ratio_follows_from_the_scales(seed: int) -> None:
    one = measure("layer", spread_rows(seed), 8, 32)
    assert one.ratio("channel") > 4
    assert one.predicted_ratio("channel") == pytest.approx(one.ratio("channel"), rel=0.05)
    # The largest of a group is always half a step off: 3 times the mean for one in 32.
    assert one.predicted_ratio("group") == pytest.approx(
        one.ratio("group") * (1 + 2 / 32), rel=0.05
    )


def test_prediction_fails_where_a_step_is_wider_than_most_weights() -> None:
    weight = spread_rows(0)
    weight[0, 0] = 1e4
    one = measure("layer", weight, 4, 32)
    assert one.predicted_ratio("channel") > 3 * one.ratio("channel")


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from([2, 4, 8]))
def test_finer_sharing_has_finer_steps(seed: int, bits: int) -> None:
    one = measure("layer", spread_rows(seed, 8, 32), bits, 8)
    assert one.predicted["group"] <= one.predicted["channel"] <= one.predicted["tensor"]
    assert float(one.steps.max()) == pytest.approx(one.tensor_step)


def test_layer_of_zeros_and_constant_channels_lose_what_they_must() -> None:
    zeros = measure("layer", torch.zeros(4, 32), 8, 16)
    assert (zeros.mse("tensor"), zeros.predicted["tensor"]) == (0, 0)
    assert zeros.ratio("channel") == zeros.predicted_ratio("channel") == 1
    constant = torch.tensor([3.0, -0.25, 0.0, 65504.0])[:, None].expand(4, 32)
    one = measure("layer", constant, 8, 16)
    for sharing in ("tensor", "channel", "group"):
        assert torch.isfinite(one.row_mse[sharing]).all()
    # All of a constant channel sit on the edge of its range, half a step from the last code.
    torch.testing.assert_close(one.row_mse["channel"], (one.steps / 2).square(), rtol=1e-4, atol=0)


def test_fp16_weights_near_the_maximum_do_not_overflow() -> None:
    weight = torch.full((4, 32), 65504.0, dtype=torch.float16)
    weight[1:] = 60000.0 * torch.linspace(-1, 1, 32)
    one = measure("layer", weight, 8, 16)
    assert one.mse("channel") < (2 * 65504 / 255) ** 2 / 2
    assert one.tensor_step == pytest.approx(2 * 65504 / 255)


def test_every_linear_layer_is_measured(tiny_llama: Path, tiny_gpt2: Path) -> None:
    for folder, layer in ((tiny_llama, LAYER), (tiny_gpt2, "transformer.h.0.attn.c_attn")):
        checkpoint = open_checkpoint(folder)
        params = ChannelScalesParams(layer=layer, bits=8, group_size=16)
        errors = layer_errors(checkpoint, params)
        assert [one.name for one in errors] == layer_names(linear_groups(checkpoint))
        values = metrics(errors, layer)
        assert values["prediction_correlation"] > 0.9
        assert values["prediction_error_pct_median"] < 10


def test_unknown_layer_is_answered_with_a_suggestion(tiny_llama: Path) -> None:
    params = ChannelScalesParams(layer="model.layers.0.self_attn.qproj", bits=8, group_size=0)
    with pytest.raises(InferlabError) as caught:
        layer_errors(open_checkpoint(tiny_llama), params)
    message = str(caught.value)
    assert message.startswith(
        "unknown linear layer (params.yaml: channel_scales.layer) 'model.layers.0.self_attn.qproj'"
    )
    assert message.endswith(f"did you mean {LAYER}?")


def test_group_size_that_does_not_divide_names_the_layer(tiny_llama: Path) -> None:
    params = ChannelScalesParams(layer=LAYER, bits=8, group_size=48)
    with pytest.raises(
        InferlabError, match=f"group_size 48 does not divide the 64 columns of {LAYER}"
    ):
        layer_errors(open_checkpoint(tiny_llama), params)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weight_that_is_not_finite_is_named(tiny_llama: Path, tmp_path: Path, bad: float) -> None:
    checkpoint = open_checkpoint(tiny_llama)
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
    save_checkpoint(tmp_path, checkpoint.config, tensors, aside_from=tiny_llama)
    with pytest.raises(InferlabError) as caught:
        layer_errors(open_checkpoint(tmp_path), PARAMS)
    assert str(caught.value).startswith(
        f"{tmp_path}: model.layers.1.mlp.up_proj has a weight that is not finite"
    )


@pytest.mark.smoke
def test_stage_writes_its_keys_tables_and_pictures(workspace: Path, tiny_llama: Path) -> None:
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["channel_scales"] |= {"layer": LAYER, "group_size": 16}
    Path("params.yaml").write_text(yaml.safe_dump(content))
    shutil.copytree(tiny_llama, "models/base")
    channel_scales.main()
    values = json.loads(Path("metrics/channel_scales.json").read_text())
    assert values["tensor_over_channel_min"] >= 1
    with Path("plots/channel_scales/layers.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 14
    with Path("plots/channel_scales/channels.csv").open() as file:
        rows = list(csv.DictReader(file))
    mean = sum(float(row["mse_channel"]) for row in rows) / len(rows)
    assert mean == pytest.approx(values["detail_mse_channel"], rel=1e-4)
    for name in ("scales", "prediction"):
        assert Path(f"plots/channel_scales/{name}.png").stat().st_size > 10_000
