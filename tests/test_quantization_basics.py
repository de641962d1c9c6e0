"""33.1: errors by hand, by brute force and by theory; the stage from end to end."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from inferlab.quantization.affine import Grid
from inferlab.quantization.basics import (
    BasicsParams,
    Input,
    Outcome,
    expected_mae,
    histogram,
    make_inputs,
    metrics,
    outcomes,
)
from stages import quantization_basics

PARAMS = BasicsParams(size=64, outlier_share=0.01, outlier_factor=50.0)


def grid_of(scale: float, zero: float, bits: int) -> Grid:
    return Grid(torch.tensor([[scale]]), torch.tensor([[zero]]), bits, 16)


def by_case(cases: list[Outcome]) -> dict[tuple[str, int, str], Outcome]:
    return {(case.source, case.bits, case.scheme): case for case in cases}


def test_errors_by_hand() -> None:
    """The largest magnitude, 7.5, sets an INT4 step of 1, so what is left is the fraction."""
    values = torch.tensor([[7.5, -7.5], [2.25, -0.4]])
    cases = by_case(outcomes({"normal": Input(values, ((1.0, 1.0),))}))
    case = cases["normal", 4, "symmetric"]
    assert case.step == 1
    assert case.errors.tolist() == [[-0.5, -0.5], [-0.25, pytest.approx(0.4)]]
    assert case.max_error == 0.5
    assert case.mae == pytest.approx((0.5 + 0.5 + 0.25 + 0.4) / 4)
    assert case.zeroed == 0.25


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("width", [0.3, 1.0, 40.0])
def test_expected_mae_is_the_integral_over_the_density(folded: bool, width: float) -> None:
    grid = grid_of(0.6, 3.0, 3)
    levels = (np.arange(8) - 3.0) * 0.6

    def magnitude(x: float) -> float:
        return float(np.abs(levels - x).min() * norm.pdf(x, scale=width))

    edges = [0.0, *[x for x in levels + 0.3 if x > 0], *[x for x in levels if x > 0]]
    reach = 9 * width + 5
    brute = quad(magnitude, 0, reach, points=sorted(set(edges)), limit=400)[0]
    if folded:
        brute *= 2
    else:
        brute += quad(magnitude, -reach, 0, points=[-x for x in (0.3, 0.6, 0.9, 1.2, 1.5, 1.8)])[0]
    found = expected_mae(Input(torch.empty(0), ((1.0, width),), folded), grid)
    assert found == pytest.approx(brute, rel=1e-6)


def test_expected_mae_of_a_mixture_is_that_of_its_parts() -> None:
    grid = grid_of(0.5, 8.0, 4)
    narrow, wide = (expected_mae(Input(torch.empty(0), ((1.0, w),)), grid) for w in (1.0, 9.0))
    mixed = expected_mae(Input(torch.empty(0), ((0.75, 1.0), (0.25, 9.0))), grid)
    assert mixed == pytest.approx(0.75 * narrow + 0.25 * wide)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31))
def test_no_error_is_above_half_a_step(seed: int) -> None:
    for case in outcomes(make_inputs(PARAMS, seed)):
        # An asymmetric zero point is rounded to a code, which moves the ends of its range.
        limit = 0.5 if case.scheme == "symmetric" else 1.0
        assert case.max_error <= limit * case.step * 1.0001


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_theory_holds_for_fine_steps_and_integration_for_all(seed: int) -> None:
    params = BasicsParams(size=256, outlier_share=0.002, outlier_factor=50.0)
    found = by_case(outcomes(make_inputs(params, seed)))
    for case in found.values():
        assert case.mae == pytest.approx(case.expected_mae, rel=0.02)
    for bits in (8, 4):
        case = found["normal", bits, "symmetric"]
        assert 4 * case.mae / case.step == pytest.approx(1, abs=0.01)
    coarse = found["with outliers", 4, "symmetric"]
    assert 4 * coarse.mae / coarse.step < 0.5


def test_outliers_cost_the_rest_and_asymmetry_helps_one_sided_values_only() -> None:
    values = metrics(outcomes(make_inputs(PARAMS, 0)))
    assert values["int8_mae_outliers"] > 10 * values["int8_mae"]
    assert values["int4_zeroed_outliers"] > 0.95
    assert values["int4_mae_one_sided_asymmetric_over_symmetric"] == pytest.approx(0.5, abs=0.03)
    assert values["int4_mae"] / values["int8_mae"] == pytest.approx(255 / 15, rel=0.05)


def test_histogram_is_a_density() -> None:
    cases = outcomes(make_inputs(PARAMS, 0))[:1]
    rows = histogram(cases)
    assert sum(float(row["density"]) for row in rows) / len(rows) == pytest.approx(1)
    assert {row["width"] for row in rows} == {"INT8"}


@pytest.mark.smoke
def test_stage_writes_its_keys_tables_and_picture(workspace: Path) -> None:
    quantization_basics.main()
    values = json.loads(Path("metrics/quantization_basics.json").read_text())
    assert {"int8_mae", "int8_max_error", "int4_mae", "int4_max_error"} <= set(values)
    assert values["mae_from_expected_max"] < 0.01
    with Path("plots/quantization_basics/errors.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert len({row["case"] for row in rows}) == 12
    assert Path("plots/quantization_basics/histogram.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("size", 4, "quantization_basics.size must be greater than or equal to 8; got 4"),
        ("outlier_share", 0.0, "quantization_basics.outlier_share must be greater than 0"),
        ("outlier_factor", 0.5, "quantization_basics.outlier_factor must be greater than 1"),
    ],
)
def test_bad_parameters_stop_with_one_line(
    workspace: Path, key: str, value: float, message: str
) -> None:
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["quantization_basics"][key] = value
    Path("params.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit, match=message):
        quantization_basics.main()
    assert not Path("metrics").exists()
