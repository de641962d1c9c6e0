"""Each fault in params.yaml has its one line; every section of the repository's files loads."""

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import Field

from inferlab import params
from inferlab.errors import InferlabError, lookup
from inferlab.models.adapters import LLAMA
from inferlab.profile import merge
from inferlab.run import RunParams

ROOT = Path(__file__).parent.parent
PROFILES = sorted(ROOT.glob("params/*.yaml"))


@params.section
class Inner:
    rate: float


@params.section
class Example:
    bits: Literal[2, 3, 4, 8]
    mode: Literal["fast", "slow"]
    group_size: Annotated[int, Field(ge=0)]
    sizes: tuple[int, ...]
    inner: Inner
    name: str | None

    def __post_init__(self) -> None:
        if self.group_size == 7:
            raise ValueError("group_size 7 is unlucky")


GOOD: dict[str, Any] = {
    "bits": 4,
    "mode": "fast",
    "group_size": 64,
    "sizes": [1, 2],
    "inner": {"rate": 0.5},
    "name": None,
}


def load(folder: Path, content: dict[str, Any], path: str = "quantize.example") -> Example:
    file = folder / "params.yaml"
    file.write_text(yaml.safe_dump({"quantize": {"example": content}}))
    return params.load(path, Example, file)


def fault(folder: Path, content: dict[str, Any]) -> str:
    """The message for a faulty section, with the file's folder taken off."""
    with pytest.raises(InferlabError) as caught:
        load(folder, content)
    return str(caught.value).replace(f"{folder}/", "")


def test_good_section_is_read_and_frozen(tmp_path: Path) -> None:
    loaded = load(tmp_path, GOOD)
    assert loaded == Example(4, "fast", 64, (1, 2), Inner(0.5), None)
    with pytest.raises(AttributeError):
        loaded.bits = 3  # type: ignore[misc]


def test_integer_is_taken_where_a_fraction_is_asked(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD | {"inner": {"rate": 1}}).inner.rate == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"bits": 5},
            "example.bits must be one of 2, 3, 4, 8; got 5 (params.yaml: quantize.example.bits)",
        ),
        (
            {"mode": "fsat"},
            "example.mode must be one of 'fast', 'slow'; got 'fsat' "
            "(params.yaml: quantize.example.mode)",
        ),
        (
            {"group_size": -1},
            "example.group_size must be greater than or equal to 0; got -1 "
            "(params.yaml: quantize.example.group_size)",
        ),
        (
            {"group_size": "64"},
            "example.group_size must be a valid integer; got '64' "
            "(params.yaml: quantize.example.group_size)",
        ),
        (
            {"group_size": 64.5},
            "example.group_size must be a valid integer; got 64.5 "
            "(params.yaml: quantize.example.group_size)",
        ),
        (
            {"group_size": True},
            "example.group_size must be a valid integer; got True "
            "(params.yaml: quantize.example.group_size)",
        ),
        (
            {"sizes": [1, "x"]},
            "example.sizes.1 must be a valid integer; got 'x' "
            "(params.yaml: quantize.example.sizes.1)",
        ),
        (
            {"inner": {"rate": float("nan")}},
            "example.inner.rate must be a finite number; got nan "
            "(params.yaml: quantize.example.inner.rate)",
        ),
        (
            {"inner": {"rate": float("inf")}},
            "example.inner.rate must be a finite number; got inf "
            "(params.yaml: quantize.example.inner.rate)",
        ),
        (
            {"groupsize": 1},
            "example.groupsize is not a parameter; known: bits, group_size, inner, mode, name, "
            "sizes; did you mean group_size? (params.yaml: quantize.example.groupsize)",
        ),
        (
            {"inner": {"rate": 1.0, "rats": 2}},
            "example.inner.rats is not a parameter (params.yaml: quantize.example.inner.rats)",
        ),
        (
            {"group_size": 7},
            "example: group_size 7 is unlucky (params.yaml: quantize.example)",
        ),
    ],
)
def test_fault_names_key_file_and_what_is_right(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    assert fault(tmp_path, GOOD | change) == message


def test_missing_key(tmp_path: Path) -> None:
    content = {key: value for key, value in GOOD.items() if key != "bits"}
    assert fault(tmp_path, content) == (
        "example.bits is missing (params.yaml: quantize.example.bits)"
    )


def test_two_faults_give_two_lines(tmp_path: Path) -> None:
    lines = fault(tmp_path, GOOD | {"bits": 5, "mode": "x"}).splitlines()
    assert [line.split()[0] for line in lines] == ["example.bits", "example.mode"]


@pytest.mark.parametrize("content", [None, 3, [1], "text"])
def test_section_that_holds_no_keys(tmp_path: Path, content: Any) -> None:
    assert "(params.yaml: quantize.example)" in fault(tmp_path, content)


def test_unknown_section_suggests_a_known_one(tmp_path: Path) -> None:
    with pytest.raises(InferlabError) as caught:
        load(tmp_path, GOOD, "quantize.exampel")
    assert "quantize has no 'exampel'; known: example; did you mean example?" in str(caught.value)
    with pytest.raises(InferlabError, match="the file has no 'quantise'; known: quantize"):
        load(tmp_path, GOOD, "quantise.example")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "params.yaml is not YAML: "),
        ("- a\n- b\n", "params.yaml must hold one section a stage; found list"),
        ("", "params.yaml must hold one section a stage; found NoneType"),
    ],
)
def test_file_that_holds_no_sections(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(InferlabError) as caught:
        params.load("run", RunParams, tmp_path / "params.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InferlabError, match=r"params.yaml is missing; run from the project"):
        params.load("run", RunParams, tmp_path / "params.yaml")


def test_lookup_names_the_known_and_the_close() -> None:
    assert lookup({"gptq": 1}, "gptq", "method") == 1
    with pytest.raises(InferlabError) as caught:
        lookup({"gptq": 1, "nf4": 2}, "gtpq", "method")
    assert str(caught.value) == "unknown method 'gtpq'; known: gptq, nf4; did you mean gptq?"
    with pytest.raises(InferlabError) as caught:
        lookup({"gptq": 1}, "zzz", "method")
    assert str(caught.value) == "unknown method 'zzz'; known: gptq"


@pytest.mark.parametrize("profile", [None, *PROFILES], ids=lambda file: file and file.stem)
def test_every_stage_loads_its_section(
    profile: Path | None,
    dvc_stages: list[Any],
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each stage's own call of `stage` reads its section and goes no further.

    Together they read every section that params.yaml has, and each declares to DVC what it reads.
    """
    content = yaml.safe_load(Path("params.yaml").read_text())
    if profile:
        content = merge(content, yaml.safe_load(profile.read_text()), "")
        Path("params.yaml").write_text(yaml.safe_dump(content))
    read: set[str] = set()
    for one in dvc_stages:
        _, _, module, *key = one.cmd.split()
        section = section_read(importlib.import_module(module), key, monkeypatch)
        declared = next(dep.params for dep in one.deps if hasattr(dep, "params"))
        assert {"run", section} <= set(declared), one.addressing
        read |= {"run", section}
    leaves = {
        f"{name}.{key}" if name in ("download", "quantize", "prune") else name
        for name, value in content.items()
        for key in value
    }
    assert leaves == read


def named(content: Any, key: str) -> list[Any]:
    """Every value that stands under `key`, at any depth."""
    if isinstance(content, list):
        return [value for one in content for value in named(one, key)]
    if not isinstance(content, dict):
        return []
    own = [content[key]] if key in content else []
    return own + [value for one in content.values() for value in named(one, key)]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the language model that parameters are made for, a Llama."""

    hidden: int
    intermediate: int
    layers: int
    context: int


@pytest.mark.parametrize(
    ("profile", "sizes"),
    [
        (None, Sizes(576, 1536, 30, 8192)),  # SmolLM2-135M
        ("gpu", Sizes(2048, 8192, 24, 8192)),  # SmolLM2-1.7B
    ],
)
def test_group_sizes_layers_and_lengths_fit_the_model(profile: str | None, sizes: Sizes) -> None:
    content = yaml.safe_load((ROOT / "params.yaml").read_text())
    if profile:
        overlay = yaml.safe_load((ROOT / f"params/{profile}.yaml").read_text())
        content = merge(content, overlay, "")
    columns = sizes.hidden, sizes.intermediate
    groups = named(content, "group_size")
    assert len(groups) >= 10
    assert [size for size in groups if size and any(width % size for width in columns)] == []
    layers = {
        f"{LLAMA.blocks}.{block}.{layer}"
        for block in range(sizes.layers)
        for group in LLAMA.groups
        for layer in group
    }
    asked = named(content, "layer")
    assert len(asked) == 3
    assert set(asked) | set(content["quantize"]["mixed"]["keep"]) <= layers
    fewer = content["draft"]["keep"], content["data_distillation"]["trained_blocks"]
    assert max(fewer) < sizes.layers
    fitting = ("tokens", "window_length", "max_model_len", "prompt_tokens", "check_tokens")
    asked = [count for key in fitting for count in named(content, key) if isinstance(count, int)]
    assert max(asked) <= sizes.context


def section_read(module: Any, key: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The section that a stage's script asks for, once it has loaded."""
    found = []

    @contextlib.contextmanager
    def loads_only(
        name: str, config: type, key: str | None = None, section: str | None = None
    ) -> Iterator[None]:
        path = section or (f"{name}.{key}" if key else name)
        params.load("run", RunParams)
        params.load(path, config)
        found.append(path)
        raise InterruptedError
        yield

    monkeypatch.setattr(module, "stage", loads_only)
    with pytest.raises(InterruptedError):
        module.main(*key)
    return found[0]
