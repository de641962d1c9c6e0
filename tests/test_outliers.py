"""33.3: the tables of the study by hand, and the stage from end to end."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from inferlab.quantization.mixed_precision import RULES, kurtosis
from inferlab.quantization.outliers import correlation_table, curve_table, metrics, units_of
from inferlab.store import save_tensors
from stages import calibrate, outliers


def layer(number: int, part: str, **columns: float) -> dict[str, Any]:
    """A row of the table of layers; q and k are one group."""
    row = {
        "layer": f"h.{number}.{part}",
        "group": f"h.{number}.{'q' if part in 'qk' else part}",
        "weights": 100,
        "outlier_share": 0.01,
        "kurtosis": 3.0,
        "largest_over_median": 5.0,
        "input_largest_over_median": 10.0 + number,
        "input_kurtosis": 4.0,
        "int8_error_tensor": 1e-3,
        "int8_error_channel": 1e-4,
        "zeroed": 0.1,
        "noise": 0.01,
        "nats": 0.001,
    }
    return row | columns


LAYERS = [
    layer(0, "q", nats=0.004, outlier_share=0.02, weights=300),
    layer(0, "k", nats=0.001, outlier_share=0.06, weights=100),
    layer(0, "down", nats=0.003, outlier_share=0.01),
    layer(1, "q", nats=0.002, outlier_share=0.04),
    layer(1, "down", nats=0.010, outlier_share=0.03),
]


def test_groups_add_up_their_layers() -> None:
    units = {unit.name: unit for unit in units_of(LAYERS)}
    assert list(units) == ["h.0.q", "h.0.down", "h.1.q", "h.1.down"]
    first = units["h.0.q"]
    assert first.layers == ("h.0.q", "h.0.k")
    assert first.weights == 400
    assert first.nats == pytest.approx(0.005)
    assert first.outlier_share == pytest.approx((0.02 * 300 + 0.06 * 100) / 400)
    assert (first.input_outliers, units["h.1.q"].input_outliers) == (10, 11)
    after = units_of([row | {"nats_smoothed": 0.5} for row in LAYERS], "_smoothed")
    assert [unit.nats for unit in after] == [1.0, 0.5, 0.5, 0.5]


def test_rank_correlations_by_hand() -> None:
    rows = [
        layer(n, "down", outlier_share=share, nats=nats, noise=-nats)
        for n, (share, nats) in enumerate([(0.1, 1), (0.2, 8), (0.3, 27), (0.4, 64)])
    ]
    found = {row["pair"]: row["rank_correlation"] for row in correlation_table(rows)}
    assert found["outlier_share with nats"] == pytest.approx(1)
    assert found["outlier_share with noise"] == pytest.approx(-1)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_kurtosis_of_known_distributions(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    assert kurtosis(torch.randn(100_000, generator=generator)) == pytest.approx(3, abs=0.1)
    assert kurtosis(torch.rand(100_000, generator=generator)) == pytest.approx(1.8, abs=0.02)
    assert kurtosis(torch.tensor([1.0, -1.0, 1.0, -1.0])) == 1
    assert kurtosis(torch.full((4,), 2.0)) == 0


def test_metrics_by_hand() -> None:
    units = units_of(LAYERS)
    curves = curve_table(units, units)
    mixtures = [
        {"mixture": "all INT8", "nats": 0.02, "nats_predicted": 0.02},
        {"mixture": "all INT8 smoothed", "nats": 0.01, "nats_predicted": 0.011},
    ]
    found = metrics(LAYERS, curves, mixtures, remaining=0.5)
    # Of 20 thousandths: without h.1.down (10) half is left; it comes second to last by outliers.
    assert (found["layers_16bit"], found["share_16bit"]) == (1, pytest.approx(100 / 700))
    assert (found["layers_16bit_by_outlier_share"]) == 4
    assert found["outlier_share_max"] == 0.06
    assert (found["nats_int8"], found["nats_int8_smoothed"]) == (0.02, 0.01)
    assert {row["rule"] for row in curves} == {*RULES, "sensitivity_smoothed"}


@pytest.fixture(params=["tiny_llama", "tiny_gpt2"])
def project(request: pytest.FixtureRequest, workspace: Path) -> Path:
    """A calibrated project on a tiny model."""
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["run"]["threads"] = 1
    content["calibrate"] |= {"windows": 4, "batch": 4}
    content["outliers"] |= {
        "sensitivity": {"windows": 2, "tokens": 48},
        "heldout": {"windows": 2, "tokens": 48},
    }
    Path("params.yaml").write_text(yaml.safe_dump(content))
    shutil.copytree(request.getfixturevalue(request.param), "models/base")
    Path("data/windows").mkdir(parents=True)
    for seed, name in enumerate(("calibration", "heldout")):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 512, (4, 64), generator=generator).int()
        save_tensors(Path(f"data/windows/{name}.safetensors"), {"input_ids": ids})
    calibrate.main()
    return workspace


def table(name: str) -> list[dict[str, str]]:
    with Path(f"plots/outliers/{name}.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.smoke
def test_stage_writes_its_keys_tables_and_pictures(project: Path) -> None:
    outliers.main()
    values = json.loads(Path("metrics/outliers.json").read_text())
    assert {"outlier_share_max", "layers_16bit", "rank_correlation"} <= set(values)
    layers, curves, mixtures = table("layers"), table("curve"), table("mixtures")
    assert len(layers) in (14, 8)
    for rule in (*RULES, "sensitivity_smoothed"):
        own = [float(row["nats"]) for row in curves if row["rule"] == rule]
        assert len(own) == 9
        assert own == sorted(own, reverse=True)
        assert own[-1] == pytest.approx(0, abs=1e-6)
    measured = {row["mixture"]: float(row["nats"]) for row in mixtures}
    assert measured["50 % in 16 bits by sensitivity"] < measured["all INT8"]
    # Smoothing changes the weights and not what the model computes.
    references = [float(row["token_perplexity_16bit"]) for row in mixtures]
    assert references == pytest.approx([references[0]] * len(mixtures), rel=1e-5)
    for name in ("layers", "smoothing", "curve"):
        assert Path(f"plots/outliers/{name}.png").stat().st_size > 10_000


@pytest.mark.smoke
@pytest.mark.parametrize("project", ["tiny_llama"], indirect=True)
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sigmas", 0.0, "outliers.sigmas must be greater than 0; got 0.0"),
        ("shares_16bit", [1.0], "outliers.shares_16bit.0 must be less than 1; got 1.0"),
        ("shares_16bit", [], "outliers.shares_16bit"),
        ("heldout", {"windows": 0, "tokens": 8}, "outliers.heldout.windows must be greater than 0"),
    ],
)
def test_bad_parameters_stop_with_one_line_and_no_output(
    project: Path, key: str, value: object, message: str
) -> None:
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["outliers"][key] = value
    Path("params.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit) as stopped:
        outliers.main()
    assert str(stopped.value).startswith("inferlab: ") and message in str(stopped.value)
    assert not Path("metrics/outliers.json").exists()
