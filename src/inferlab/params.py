"""Typed parameters: one section of `params.yaml` is read into one frozen dataclass."""

import json
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml
from pydantic.dataclasses import dataclass

from inferlab.errors import InferlabError, suggestion

PARAMS = Path("params.yaml")
Section = TypeVar("Section")

section = dataclass(
    frozen=True, config=pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
)
"""Class decorator for a section: frozen, refuses unknown keys, wrong types, NaN."""


def load(path: str, kind: type[Section], file: Path = PARAMS) -> Section:
    """Read the dotted section `path` of `file` into `kind`.

    Raises InferlabError with one line per fault, each naming the key, the file, what is wrong
    and what would be right.
    """
    raw = _descend(_read(file), path, file)
    try:
        # Through JSON, because strict mode then still reads a YAML list into a tuple.
        return pydantic.TypeAdapter(kind).validate_json(json.dumps(raw, default=str))
    except pydantic.ValidationError as error:
        known = [field for field in kind.__dataclass_fields__]  # type: ignore[attr-defined]
        lines = [_explain(fault, path, known, file) for fault in error.errors()]
        raise InferlabError("\n".join(lines)) from None


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        raise InferlabError(f"{file} is missing; run from the project's folder") from None
    except yaml.YAMLError as error:
        raise InferlabError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise InferlabError(f"{file} must hold one section a stage; found {type(content).__name__}")
    return content


def _descend(content: Any, path: str, file: Path) -> Any:
    for depth, name in enumerate(path.split(".")):
        if not isinstance(content, dict) or name not in content:
            where = ".".join(path.split(".")[:depth]) or "the file"
            known = content if isinstance(content, dict) else []
            raise InferlabError(f"{file}: {where} has no {name!r}; {suggestion(name, known)}")
        content = content[name]
    return content


def _explain(fault: Any, path: str, known: list[str], file: Path) -> str:
    """One line for one pydantic error: `gptq.bits must be …; got 5 (params.yaml: …)`."""
    keys = [str(part) for part in fault["loc"]]
    short = ".".join([path.split(".")[-1], *keys])
    place = f"({file}: {'.'.join([path, *keys])})"
    match fault["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            names = known if len(keys) == 1 else []
            hint = f"; {suggestion(keys[-1], names)}" if names else ""
            return f"{short} is not a parameter{hint} {place}"
        case "missing":
            return f"{short} is missing {place}"
        case "literal_error":
            allowed = fault["ctx"]["expected"].replace(" or ", ", ")
            return f"{short} must be one of {allowed}; got {fault['input']!r} {place}"
        case "value_error":
            return f"{short}: {fault['ctx']['error']} {place}"
        case _:
            rule = fault["msg"].replace("Input should", "must").replace("Value should", "must")
            return f"{short} {rule}; got {fault['input']!r} {place}"
