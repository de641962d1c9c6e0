"""`inferlab studies`: every stage with its key figure."""

import json
import string
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from inferlab.cli import app
from inferlab.errors import InferlabError
from inferlab.reporting.key_figures import FIGURES, description, study_rows

ROOT = Path(__file__).parent.parent
STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]


def project(folder: Path, metrics: dict[str, dict[str, float]]) -> Path:
    graph = {
        "stages": {
            "cascade": {"desc": "33.23 - the student first.", "cmd": "x"},
            "evaluate": {"matrix": {"variant": ["a"]}, "desc": "Quality of a variant - all."},
        }
    }
    (folder / "dvc.yaml").write_text(yaml.safe_dump(graph))
    for name, values in metrics.items():
        file = folder / "metrics" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    return folder


def test_rows_by_hand(tmp_path: Path) -> None:
    names = ("base", "int8", "gptq")
    metrics = {f"evaluate/{name}": {"token_perplexity": 10.0 + i} for i, name in enumerate(names)}
    metrics |= {f"timing/evaluate/{name}": {"seconds": 2.4} for name in names}
    rows = study_rows(project(tmp_path, metrics))
    assert rows == [
        ["cascade", "33.23", "the student first", "-", "-"],
        [
            "evaluate",
            "",
            "Quality of a variant - all",
            "perplexity 10.00, INT8 11.00, GPTQ 12.00",
            "7 for 3",
        ],
    ]


def test_every_numbered_study_has_a_figure_and_every_figure_a_stage() -> None:
    assert set(FIGURES) <= set(STAGES)
    numbers = {name: description(entry).partition(" - ")[0] for name, entry in STAGES.items()}
    numbered = {name for name, number in numbers.items() if number.startswith("33.")}
    assert numbered <= set(FIGURES)
    assert {numbers[name] for name in numbered} == {f"33.{number}" for number in range(1, 31)}


def test_the_committed_run_has_the_key_of_every_stage_that_it_ran() -> None:
    lock = yaml.safe_load((ROOT / "dvc.lock").read_text())["stages"]
    ran = {name.partition("@")[0] for name in lock}
    missing = {row[0] for row in study_rows(ROOT) if row[0] in FIGURES and row[3] == "-"}
    assert len(ran & set(FIGURES)) > 30
    assert missing & ran == set()


def test_figures_name_metrics() -> None:
    for stage, text in FIGURES.items():
        assert [name for _, name, _, _ in string.Formatter().parse(text) if name], stage


def test_folder_without_a_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InferlabError, match=r"dvc\.yaml is missing; name a project's folder"):
        study_rows(tmp_path)


def test_markdown(tmp_path: Path) -> None:
    folder = project(tmp_path, {"timing/cascade": {"seconds": 3.0}})
    result = CliRunner().invoke(app, ["studies", "--folder", str(folder), "--markdown"])
    assert result.exit_code == 0
    assert "| cascade | 33.23 | the student first | - | 3 |" in result.output


@pytest.mark.parametrize("text", ["stages:", "stages: {}", "vars: [params.yaml]"])
def test_graph_without_stages_has_no_rows(text: str, tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text(text)
    assert study_rows(tmp_path) == []


def test_stage_without_a_description_has_its_row(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text("stages: {train: {cmd: x}}")
    assert study_rows(tmp_path) == [["train", "", "", "-", "-"]]


def test_graph_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text("stages: [")
    with pytest.raises(InferlabError, match=r"dvc\.yaml is not YAML: while parsing a flow"):
        study_rows(tmp_path)
