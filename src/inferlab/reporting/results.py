"""What a run has left: metrics, tables and pictures by study, read into plain values."""

import base64
import csv
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferlab.errors import InferlabError
from inferlab.reporting.studies import caption

PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Picture:
    """A PNG as a data URI, its size in pixels, and what it shows."""

    source: str
    width: int
    height: int
    caption: str


def read_metrics(folder: Path, stage: str) -> dict[str, dict[str, float]]:
    """The metrics of a stage by key (the stage's own name when it has one file); empty: none.

    Raises InferlabError for a file that is no JSON object.
    """
    single = folder / f"{stage}.json"
    files = [single] if single.is_file() else sorted((folder / stage).glob("*.json"))
    return {file.stem: _object(file) for file in files}


def read_table(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV; none when it is missing."""
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def read_pictures(folder: Path, stage: str) -> list[Picture]:
    """The pictures of a stage, by name. Raises InferlabError for a file that is no PNG."""
    return [_picture(file, stage) for file in sorted((folder / stage).glob("*.png"))]


def read_manifest(file: Path) -> dict[str, Any]:
    """Where an asset came from; empty when the file is missing."""
    return _object(file) if file.is_file() else {}


def _picture(file: Path, stage: str) -> Picture:
    content = file.read_bytes()
    if not content.startswith(PNG):
        raise InferlabError(f"{file} is no PNG; run dvc repro {stage} again")
    width, height = struct.unpack(">II", content[16:24])  # of the header chunk, which is first
    encoded = base64.b64encode(content).decode("ascii")
    return Picture(f"data:image/png;base64,{encoded}", width, height, caption(stage, file.stem))


def _object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InferlabError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, Mapping):
        raise InferlabError(f"{file} must hold an object; found {type(content).__name__}")
    return dict(content)
