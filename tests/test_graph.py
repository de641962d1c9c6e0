"""The graph in dvc.yaml is the one that the code has: modules, stages, variants, parameters."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from inferlab import graph
from inferlab.quantization.methods import METHODS

ROOT = Path(__file__).parent.parent
STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
SCRIPTS = sorted(ROOT.glob("stages/*.py"))


@pytest.fixture(autouse=True)
def project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", STAGES)
def test_dependencies_are_the_import_closure(name: str, dvc_stages: list[Any]) -> None:
    closure = graph.import_closure(Path("stages") / f"{name}.py")
    items = [one for one in dvc_stages if one.name.split("@")[0] == name]
    assert items
    for one in items:
        paths = [dep.def_path for dep in one.deps]
        own = [path for path in paths if path.startswith(("stages/", "src/"))]
        assert sorted(own) == sorted([*closure, *graph.data_files(closure)])
        assert len(paths) == len(set(paths))


def test_import_closure_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = {
        "src/inferlab/__init__.py": "",
        "src/inferlab/a.py": "import inferlab.deep.b",
        "src/inferlab/deep/__init__.py": "",
        "src/inferlab/deep/b.py": "def late():\n    from inferlab.deep.c import name",
        "src/inferlab/deep/c.py": "from inferlab import a, VERSION",
        "src/inferlab/unused.py": "",
        "stages/one.py": "import os\nfrom inferlab import a\nfrom torch import inferlab",
    }
    for file, content in code.items():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(content)
    assert graph.import_closure(Path("stages/one.py")) == [
        "stages/one.py",
        "src/inferlab/__init__.py",
        "src/inferlab/a.py",
        "src/inferlab/deep/__init__.py",
        "src/inferlab/deep/b.py",
        "src/inferlab/deep/c.py",
    ]


def test_data_beside_a_module_counts_when_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("src/inferlab/deep")
    for place in ("configs", "code"):
        (folder / place).mkdir(parents=True)
    for name in ("prices.csv", "unnamed.csv", "configs/a.json", "code/__init__.py", "other.py"):
        (folder / name).write_text("")
    module = folder / "b.py"
    module.write_text('FILES = ("prices.csv", "configs", "code", "other.py", "gone.csv", "..", "")')
    found = graph.data_files([str(module), "stages/one.py"])
    assert found == [f"{folder}/configs", f"{folder}/prices.csv"]


def test_every_script_is_a_stage_and_every_stage_a_script() -> None:
    assert {script.stem for script in SCRIPTS} == set(STAGES)


@pytest.mark.parametrize("name", STAGES)
def test_stage_says_in_one_sentence_what_it_makes(name: str) -> None:
    description = STAGES[name].get("do", STAGES[name])["desc"]
    assert description.endswith(".")
    assert "\n" not in description


def test_commands_are_the_script_and_at_most_a_key(dvc_stages: list[Any]) -> None:
    for one in dvc_stages:
        name, _, key = one.name.partition("@")
        assert one.cmd.split() == ["python", "-m", f"stages.{name}", *([key] if key else [])]


def test_variants_are_the_methods() -> None:
    matrix = STAGES["quantize"]["matrix"]["variant"]
    assert set(matrix) == set(METHODS)
    assert STAGES["evaluate"]["matrix"]["variant"][0] == "base"
    assert set(METHODS) <= set(STAGES["evaluate"]["matrix"]["variant"])
    assert set(yaml.safe_load(Path("params.yaml").read_text())["quantize"]) == set(METHODS)


def test_what_is_read_as_an_artefact_is_made_upstream(dvc_stages: list[Any]) -> None:
    made = {Path(out.def_path) for one in dvc_stages for out in one.outs}
    for one in dvc_stages:
        for path in (Path(dep.def_path) for dep in one.deps):
            if path.parts[0] in ("models", "data", "metrics", "plots"):
                assert any(path == out or path in out.parents for out in made), (one.name, path)


def test_every_output_keeps_the_run_cache(dvc_stages: list[Any]) -> None:
    """A plain uncached output would switch DVC's run cache off for its stage."""
    for one in dvc_stages:
        for out in one.outs:
            assert out.use_cache or out.metric or out.plot, (one.name, out.def_path)
            in_git = out.def_path.split("/")[0] in ("metrics", "plots")
            assert out.use_cache != in_git, (one.name, out.def_path)


def test_every_stage_reports_its_time(dvc_stages: list[Any]) -> None:
    for one in dvc_stages:
        timing = f"metrics/timing/{one.name.replace('@', '/')}.json"
        assert timing in [out.def_path for out in one.outs if out.metric], one.name
