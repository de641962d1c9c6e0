"""The study of GPTQ on one layer: its tables against the error they explain, and its stage."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_gptq import COLUMNS, GROUP, correlated
from test_pipeline_smoke import write_project

from inferlab.errors import InferlabError
from inferlab.quantization import gptq_study as study
from inferlab.quantization.affine import quantize
from inferlab.quantization.gptq import output_error
from inferlab.quantization.methods.gptq import GptqParams
from inferlab.run import checked
from stages import calibrate, gptq_layer

PARAMS = GptqParams(
    bits=4,
    group_size=GROUP,
    symmetric=True,
    token_weights="none",
    damping=0.01,
    activation_order=True,
    scale_search="hessian",
    signed_scales=True,
    refinements=2,
)


@pytest.fixture
def subject() -> study.Subject:
    return study.Subject(*correlated())


def test_columns_add_up_to_the_output_error(subject: study.Subject) -> None:
    results = study.column_results(subject, PARAMS)
    table = study.column_table(subject, results)
    for name, (found, order) in results.items():
        rows = [row for row in table if row["result"] == name]
        assert [row["column"] for row in rows] == order.tolist()
        assert [row["columns_done"] for row in rows] == list(range(1, COLUMNS + 1))
        whole = output_error(subject.weight, found.dequantize(), subject.hessian)
        assert rows[-1]["cumulative"] == pytest.approx(whole, rel=1e-3)
        assert sum(row["share"] for row in rows) == pytest.approx(whole, rel=1e-3)


def test_share_of_a_column_ignores_the_columns_after_it(subject: study.Subject) -> None:
    order = torch.arange(COLUMNS)
    one = study.baseline(subject, PARAMS)
    codes = one.codes.clone()
    codes[:, 50:] = 0
    other = quantize(subject.weight, one.grid)
    other.codes.copy_(codes)
    shares = [
        [row["share"] for row in study.column_table(subject, {"": (found, order)})[:50]]
        for found in (one, other)
    ]
    assert shares[0] == pytest.approx(shares[1], rel=1e-4)


def test_each_option_is_shown_alone_and_left_out(subject: study.Subject) -> None:
    rows = {row["recipe"]: row for row in study.option_table(subject, PARAMS)}
    options = ["groups", "activation order", "scale search", "signed scale search", "refinement"]
    expected = ["bare", *(f"only {o}" for o in options), "all", *(f"all but {o}" for o in options)]
    assert list(rows) == expected
    assert rows["only groups"]["rounded_over_rtn"] == pytest.approx(1)
    assert rows["all"]["over_rtn"] == min(row["over_rtn"] for row in rows.values())
    assert rows["all"]["bits_per_weight"] == 4 + (16 + 4) / GROUP
    assert rows["bare"]["bits_per_weight"] == 4 + (16 + 4) / COLUMNS
    for row in rows.values():
        assert row["over_rtn"] < row["rounded_over_rtn"]


def test_steps_tell_one_row_in_full(subject: study.Subject) -> None:
    table = study.step_table(subject, PARAMS, 2)
    assert [row["column"] for row in table] == list(range(COLUMNS))
    assert table[0]["value"] == table[0]["weight"] == pytest.approx(float(subject.weight[2, 0]))
    for row in table:
        assert row["quantized"] == pytest.approx((row["code"] - 8) * row["scale"], abs=1e-6)
        assert row["error"] == pytest.approx(row["value"] - row["quantized"])
    for row in table[:-1]:
        assert row["passed_on_to"] > row["column"]
    assert (table[-1]["passed_on_to"], table[-1]["passed_on"]) == (COLUMNS - 1, 0)


@pytest.mark.parametrize("row", [-1, 16])
def test_row_that_the_layer_does_not_have(subject: study.Subject, row: int) -> None:
    with pytest.raises(InferlabError, match=rf"gptq_layer.row must be 0 to 15, .* got {row}"):
        study.step_table(subject, PARAMS, row)


def test_summary_says_that_compensation_beats_rounding(subject: study.Subject) -> None:
    found = checked(study.summary(subject, PARAMS), "summary")
    assert found["output_error_gptq"] < found["output_error_gptq_rtn_scales"]
    assert found["output_error_gptq_rtn_scales"] < found["output_error_rtn"]
    assert found["naive_codes_differing"] == 0
    assert found["damped_condition"] < found["hessian_condition"]
    assert len(found) <= 12


@pytest.fixture
def project(workspace: Path, tiny_llama: Path) -> dict[str, Any]:
    """The content of params.yaml in a folder where `calibrate` has run."""
    write_project(tiny_llama)
    calibrate.main()
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["gptq_layer"]["layer"] = "model.layers.1.mlp.up_proj"
    content["gptq_layer"]["gptq"]["group_size"] = 32
    return content


@pytest.mark.smoke
def test_stage_on_a_tiny_model(project: dict[str, Any]) -> None:
    Path("params.yaml").write_text(yaml.safe_dump(project))
    gptq_layer.main()
    metrics = json.loads(Path("metrics/gptq_layer.json").read_text())
    assert metrics["output_error_gptq"] < metrics["output_error_rtn"]
    with Path("plots/gptq_layer/steps.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 64
    assert Path("plots/gptq_layer/columns.png").stat().st_size > 10_000


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("layer", "model.layers.1.mlp.up_prj", "did you mean model.layers.1.mlp.up_proj?"),
        ("row", 128, "gptq_layer.row must be 0 to 127"),
        ("gptq", {"bits": 5}, "gptq_layer.gptq.bits must be one of 2, 3, 4, 8; got 5"),
        ("gptq", {"group_size": 128}, "group_size 128 does not divide the 64 columns"),
    ],
)
def test_bad_input_stops_the_stage_without_output(
    project: dict[str, Any], key: str, value: Any, message: str
) -> None:
    section = project["gptq_layer"]
    section[key] = section[key] | value if isinstance(value, dict) else value
    Path("params.yaml").write_text(yaml.safe_dump(project))
    with pytest.raises(SystemExit) as caught:
        gptq_layer.main()
    assert message in str(caught.value)
    assert not Path("metrics/gptq_layer.json").exists()
    assert not list(Path("plots/gptq_layer").glob("*")) if Path("plots/gptq_layer").exists() else 1
