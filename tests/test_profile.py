"""A profile runs in a workspace of its own: what is merged, what is copied, what is left alone."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from inferlab import profile
from inferlab.errors import InferlabError
from inferlab.profile import merge, prepare

BASE: dict[str, Any] = {
    "run": {"seed": 0, "threads": 0},
    "sizes": [1, 2, 3],
    "model": {"wheel": {"name": "a"}, "local": None},
}
FILES = {
    "params/small.yaml": "run: {threads: 2}\n",
    "src/module.py": "one = 1\n",
    "metrics/result.json": "{}\n",
    "plots/result.csv": "a\n",
    "dvc.lock": "locked\n",
    ".gitignore": "/data/\n/.profiles/\n",
    "data/large": "not in Git\n",
    ".dvc/config": "[core]\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(BASE))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "src/module.py"], cwd=tmp_path, check=True)
    return tmp_path


def files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_blocks_are_merged_key_by_key_and_lists_are_replaced() -> None:
    assert merge(BASE, {"run": {"threads": 2}, "sizes": [1]}, "") == {
        "run": {"seed": 0, "threads": 2},
        "sizes": [1],
        "model": {"wheel": {"name": "a"}, "local": None},
    }
    assert BASE["run"]["threads"] == 0


def test_one_block_may_take_the_place_of_another() -> None:
    overlay = {"model": {"wheel": None, "local": {"path": "here"}}}
    assert merge(BASE, overlay, "")["model"] == {"wheel": None, "local": {"path": "here"}}


def test_key_that_the_base_lacks_is_refused() -> None:
    with pytest.raises(InferlabError) as caught:
        merge(BASE, {"run": {"thread": 2}}, "")
    assert str(caught.value) == (
        "run.thread of the overlay is not in params.yaml; known: seed, threads; "
        "did you mean threads?"
    )
    with pytest.raises(InferlabError, match=r"^rum of the overlay is not in params\.yaml"):
        merge(BASE, {"rum": {}}, "")


def test_key_that_changes_nothing_is_refused() -> None:
    with pytest.raises(InferlabError) as caught:
        merge(BASE, {"run": {"seed": 0}}, "")
    assert str(caught.value) == "run.seed of the overlay is 0 in params.yaml already; drop it"


def test_workspace_has_the_sources_and_no_results(project: Path) -> None:
    workspace = prepare("small", project)
    assert workspace == project / ".profiles" / "small"
    assert files(workspace) == {
        "params.yaml",
        "params/small.yaml",
        "src/module.py",
        ".gitignore",
        ".dvc/config",
    }
    merged = yaml.safe_load((workspace / "params.yaml").read_text())
    assert merged == merge(BASE, {"run": {"threads": 2}}, "")
    assert list(merged) == list(yaml.safe_load((project / "params.yaml").read_text()))


def test_project_itself_is_left_alone(project: Path) -> None:
    before = {name: (project / name).read_bytes() for name in [*FILES, "params.yaml"]}
    prepare("small", project)
    assert {name: (project / name).read_bytes() for name in before} == before


def test_cache_is_shared(project: Path) -> None:
    settings = (prepare("small", project) / ".dvc" / "config").read_text()
    assert f"dir = {project.resolve() / '.dvc' / 'cache'}\n" in settings
    assert "no_scm = true" in settings


def test_refreshing_follows_the_sources_and_keeps_the_outputs(project: Path) -> None:
    workspace = prepare("small", project)
    (workspace / "metrics").mkdir()
    (workspace / "metrics/result.json").write_text('{"mine": 1}')
    (workspace / "dvc.lock").write_text("mine")
    (project / "src/module.py").write_text("one = 2\n")
    prepare("small", project)
    assert (workspace / "src/module.py").read_text() == "one = 2\n"
    assert (workspace / "metrics/result.json").read_text() == '{"mine": 1}'
    assert (workspace / "dvc.lock").read_text() == "mine"


def test_unknown_profile_names_the_known(project: Path) -> None:
    with pytest.raises(InferlabError) as caught:
        prepare("smal", project)
    assert str(caught.value) == "unknown profile 'smal'; known: small; did you mean small?"
    assert not (project / ".profiles").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("params.yaml", "run: [", "params.yaml is not YAML: while parsing a flow"),
        ("params.yaml", "- run", "params.yaml must hold names with values; found list"),
        ("params/small.yaml", "a: b: c", "small.yaml is not YAML: mapping values are not allowed"),
        ("params/small.yaml", "# later", "small.yaml must hold names with values; found nothing"),
    ],
)
def test_file_that_is_no_mapping_is_one_line(
    name: str, content: str, message: str, project: Path
) -> None:
    (project / name).write_text(content)
    with pytest.raises(InferlabError) as caught:
        prepare("small", project)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (project / ".profiles").exists()


def test_missing_params_are_named(project: Path) -> None:
    (project / "params.yaml").unlink()
    with pytest.raises(InferlabError, match=r"params\.yaml is missing$"):
        prepare("small", project)


def test_folder_that_git_does_not_know_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(project / "nowhere"))
    with pytest.raises(InferlabError) as caught:
        prepare("small", project)
    assert str(caught.value).startswith(f"a profile copies what Git lists of {project}, but fatal:")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("names", [[], ["smoke", "gpu"]])
def test_one_profile_at_a_time(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["profile", *names])
    with pytest.raises(SystemExit, match="inferlab: name one profile"):
        profile.main()
