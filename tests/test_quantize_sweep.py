"""The sweep: which recipes, what each point is made of, and its stage on a tiny model."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from inferlab.calibration.capture import CalibrateParams, calibrate
from inferlab.calibration.statistics import Calibration
from inferlab.errors import InferlabError
from inferlab.models.adapters import linear_groups
from inferlab.quantization.methods.gptq import GptqParams
from inferlab.quantization.sweep import (
    QuantizeSweepParams,
    Recipe,
    SweepPoint,
    quantized_group,
    recipes,
    summary,
    sweep,
    with_ratios,
)
from inferlab.store import open_checkpoint, save_tensors
from stages import quantize_sweep

GPTQ = GptqParams(4, 32, True, "none", 0.01, True, "none", True, 0)
PARAMS = QuantizeSweepParams((SweepPoint(2, 32), SweepPoint(8, 0)), 2, 1, "threading", GPTQ)
WINDOWS = torch.randint(3, 512, (4, 64), generator=torch.Generator().manual_seed(0)).int()
HELDOUT = {
    "input_ids": WINDOWS.flip(1),
    "words": torch.full((4,), 10).int(),
    "bytes": torch.full((4,), 60).int(),
}


@pytest.fixture(scope="module")
def calibration(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    found = Calibration(tmp_path_factory.mktemp("calibration"))
    calibrate(open_checkpoint(tiny_llama), WINDOWS, CalibrateParams(4, 4, True), found)
    return found


@pytest.fixture(scope="module")
def rows(tiny_llama: Path, calibration: Calibration) -> list[dict[str, Any]]:
    return with_ratios(sweep(tiny_llama, calibration, HELDOUT, PARAMS, threads=1))


def test_recipes_cross_points_methods_and_grids() -> None:
    found = {
        (one.method, one.params.bits, one.params.group_size, one.params.symmetric)
        for one in recipes(PARAMS)
    }
    assert len(found) == len(recipes(PARAMS)) == 8
    assert ("rtn", 2, 32, False) in found
    assert ("gptq", 8, 0, True) in found


def test_more_bits_are_better_and_eight_lose_next_to_nothing(rows: list[dict[str, Any]]) -> None:
    assert [row["method"] for row in rows].count("base") == 1
    ratios = {(r["method"], r["grid"], r["bits"]): r["ratio_to_base"] for r in rows}
    for method in ("rtn", "gptq"):
        for grid in ("symmetric", "asymmetric"):
            assert abs(ratios[method, grid, 8] - 1) < 0.02
            assert abs(ratios[method, grid, 2] - 1) > abs(ratios[method, grid, 8] - 1)


def test_bits_a_weight_count_scales_and_zero_points(rows: list[dict[str, Any]]) -> None:
    two = [row["bits_per_weight"] for row in rows if row["bits"] == 2]
    assert two == pytest.approx([2 + (16 + 2) / 32] * 4)
    assert rows[0]["bits_per_weight"] == 16


def test_gptq_has_less_output_error_than_rounding(
    tiny_llama: Path, calibration: Calibration
) -> None:
    checkpoint = open_checkpoint(tiny_llama)
    for group in linear_groups(checkpoint):
        statistics = calibration.load(group)
        weight = torch.cat(group.weights(checkpoint)).float()
        errors = []
        for method in ("rtn", "gptq"):
            found, sizes = quantized_group(checkpoint, group, statistics, Recipe(method, GPTQ))
            difference = weight - found.dequantize()
            errors.append(float((difference @ statistics["hessian"] * difference).sum()))
            assert sum(sizes) == len(weight)
        assert errors[1] < errors[0]


def test_summary_counts_points_and_takes_the_narrowest(rows: list[dict[str, Any]]) -> None:
    found = summary(rows, PARAMS)
    assert found["points"] == 4
    assert 0 <= found["points_gptq_at_or_below_rtn"] <= 4
    narrow = next(
        row["ratio_to_base"]
        for row in rows
        if (row["method"], row["grid"], row["bits"]) == ("gptq", "symmetric", 2)
    )
    assert found["ratio_gptq_symmetric_narrowest"] == narrow


def test_parallel_points_are_the_same(
    tiny_llama: Path, calibration: Calibration, rows: list[dict[str, Any]]
) -> None:
    again = sweep(tiny_llama, calibration, HELDOUT, PARAMS, threads=2)
    assert with_ratios(again) == rows


def test_group_that_does_not_divide_stops_before_any_work(
    tiny_llama: Path, calibration: Calibration
) -> None:
    params = QuantizeSweepParams((SweepPoint(4, 48),), 1, 1, "threading", GPTQ)
    with pytest.raises(InferlabError, match="group_size 48 does not divide the 64 columns of"):
        sweep(tiny_llama, calibration, HELDOUT, params, threads=1)


@pytest.mark.smoke
def test_stage_writes_its_table(
    workspace: Path, tiny_llama: Path, calibration: Calibration
) -> None:
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["run"]["threads"] = 1
    content["quantize_sweep"] |= {
        "points": [{"bits": 3, "group_size": 32}],
        "backend": "threading",
    }
    Path("params.yaml").write_text(yaml.safe_dump(content))
    shutil.copytree(tiny_llama, "models/base")
    shutil.copytree(calibration.folder, "data/calibration")
    Path("data/windows").mkdir()
    save_tensors(Path("data/windows/heldout.safetensors"), HELDOUT)
    quantize_sweep.main()
    with Path("plots/quantize_sweep/points.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 5
    assert json.loads(Path("metrics/quantize_sweep.json").read_text())["points"] == 2
    assert Path("plots/quantize_sweep/bits.png").stat().st_size > 1000
    assert json.loads(Path("metrics/timing/quantize_sweep.json").read_text())["seconds_a_point"] > 0
