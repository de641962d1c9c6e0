"""Smoothing leaves the model as it was and its inputs tamer; the statistics follow exactly."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from inferlab.calibration.capture import CalibrateParams, calibrate
from inferlab.calibration.statistics import Calibration
from inferlab.models.adapters import linear_groups
from inferlab.models.loading import load_model
from inferlab.quantization.smoothing import fixed, searched, smooth
from inferlab.store import Checkpoint, open_checkpoint, save_checkpoint

WINDOWS = torch.randint(3, 512, (4, 64), generator=torch.Generator().manual_seed(0)).int()


def calibrated(checkpoint: Checkpoint, folder: Path) -> Calibration:
    folder.mkdir()
    calibration = Calibration(folder)
    calibrate(checkpoint, WINDOWS, CalibrateParams(4, 4, False), calibration)
    return calibration


def saved(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    folder.mkdir()
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names}
    save_checkpoint(folder, checkpoint.config, tensors, aside_from=checkpoint.folder)
    return open_checkpoint(folder)


@pytest.fixture
def outlying(tiny_llama: Path, tmp_path: Path) -> Checkpoint:
    """The tiny Llama with two channels of its first norm sixty times as large as the rest."""
    checkpoint = open_checkpoint(tiny_llama)
    name = "model.layers.0.input_layernorm.weight"
    weight = checkpoint.tensor(name).clone()
    weight[[5, 40]] *= 60
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names} | {name: weight}
    (tmp_path / "outlying").mkdir()
    save_checkpoint(tmp_path / "outlying", checkpoint.config, tensors, aside_from=tiny_llama)
    return open_checkpoint(tmp_path / "outlying")


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    return load_model(folder, threads=1)(WINDOWS.long()).logits.float()


@pytest.mark.parametrize("alpha", [0.3, 0.5, 1.0])
def test_smoothed_model_computes_the_same(
    outlying: Checkpoint, tmp_path: Path, alpha: float
) -> None:
    smoothed, _ = smooth(outlying, calibrated(outlying, tmp_path / "before"), fixed(alpha))
    again = saved(smoothed, tmp_path / "smoothed")
    changed = [n for n in again.names if not torch.equal(again.tensor(n), outlying.tensor(n))]
    assert "model.layers.0.self_attn.q_proj.weight" in changed
    torch.testing.assert_close(logits(again.folder), logits(outlying.folder), rtol=0, atol=0)


def test_statistics_are_those_of_the_smoothed_model(outlying: Checkpoint, tmp_path: Path) -> None:
    smoothed, promised = smooth(outlying, calibrated(outlying, tmp_path / "before"), fixed(0.5))
    again = saved(smoothed, tmp_path / "smoothed")
    measured = calibrated(again, tmp_path / "after")
    for group in linear_groups(again):
        torch.testing.assert_close(
            promised.load(group)["hessian"], measured.load(group)["hessian"], rtol=1e-4, atol=1e-6
        )


def test_outliers_of_the_inputs_move_into_the_weights(outlying: Checkpoint, tmp_path: Path) -> None:
    before = calibrated(outlying, tmp_path / "before")
    smoothed, after = smooth(outlying, before, fixed(0.5))
    group = linear_groups(outlying)[0]

    def spread(values: Tensor) -> float:
        return float(values.max() / values.median())

    inputs = [spread(one.load(group)["hessian"].diagonal().sqrt()) for one in (before, after)]
    weights = [
        spread(torch.cat(group.weights(one)).float().abs().amax(0)) for one in (outlying, smoothed)
    ]
    assert inputs[0] > 40
    assert inputs[1] < 15
    assert weights[0] < 3 < weights[1]


def test_original_is_left_as_it_was(outlying: Checkpoint, tmp_path: Path) -> None:
    before = {name: outlying.tensor(name).clone() for name in outlying.names}
    smooth(outlying, calibrated(outlying, tmp_path / "before"), fixed(0.5))
    assert all(torch.equal(outlying.tensor(name), before[name]) for name in before)


def test_searched_scale_is_the_best_of_its_candidates(outlying: Checkpoint, tmp_path: Path) -> None:
    before = calibrated(outlying, tmp_path / "before")
    group = linear_groups(outlying)[0]
    statistics = before.load(group)
    weight = torch.cat(group.weights(outlying)).float()
    sample = statistics["sample"].float()

    def error(scale: Tensor) -> float:
        inputs, scaled = sample / scale, weight * scale
        step, width = (part.abs().amax(1, keepdim=True) for part in (inputs, scaled))
        codes = torch.round(inputs / step * 127) @ torch.round(scaled / width * 127.5).t()
        return float((codes * step * width.t() / 127 / 127.5 - sample @ weight.t()).square().mean())

    best = error(searched(weight, statistics))
    assert best < 0.5 * error(torch.ones(len(scale_of := fixed(0.5)(weight, statistics))))
    assert best <= 1.01 * min(error(scale_of), error(fixed(0.75)(weight, statistics)))


def test_searched_smoothing_computes_the_same(outlying: Checkpoint, tmp_path: Path) -> None:
    smoothed, _ = smooth(outlying, calibrated(outlying, tmp_path / "before"), searched)
    again = saved(smoothed, tmp_path / "smoothed")
    torch.testing.assert_close(logits(again.folder), logits(outlying.folder), rtol=0, atol=0)
