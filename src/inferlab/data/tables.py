"""Rows from the file formats that text data comes in."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas

from inferlab import store
from inferlab.errors import InferlabError, lookup

Row = dict[str, Any]
AS_TEXT: dict[str, Any] = {"dtype": str, "keep_default_na": False}
"""Every field as it stands: pandas would otherwise take the text `NA` for a missing one."""


def read_tables(source: Path, name: str = "") -> list[Row]:
    """Rows of a file, or of all files of a folder whose names hold `name`; keys in lower case.

    Raises InferlabError when no file fits or a file is of no known format.
    """
    files = [source] if source.is_file() else _fitting(source, name)
    if not files:
        raise InferlabError(
            f"{source} holds no table with {name!r} in its name; known formats: {', '.join(TABLES)}"
        )
    return [
        {str(key).lower(): value for key, value in row.items()}
        for file in files
        for row in lookup(TABLES, file.suffix, f"format of {file.name}:")(file)
    ]


def column(row: Row, names: Sequence[str], where: Path) -> str:
    """The text of the first of the columns `names` that the row has."""
    for name in names:
        if row.get(name) is not None:
            return str(row[name]).strip()
    raise InferlabError(
        f"{where}: a row has none of the columns {', '.join(names)}; it has {', '.join(row)}"
    )


def _fitting(folder: Path, name: str) -> list[Path]:
    files = sorted(file for file in folder.rglob("*") if file.suffix in TABLES)
    return [file for file in files if name in file.name]


def _read_orange(file: Path) -> list[Row]:
    """Orange's tab format: names, types and roles stand in three header lines."""
    return _records(pandas.read_csv(file, sep="\t", skiprows=[1, 2], quoting=3, **AS_TEXT))


def _read_csv(file: Path) -> list[Row]:
    return _records(pandas.read_csv(file, **AS_TEXT))


def _read_parquet(file: Path) -> list[Row]:
    return _records(pandas.read_parquet(file))


def _records(table: pandas.DataFrame) -> list[Row]:
    return table.astype(object).where(table.notna(), None).to_dict("records")


TABLES: dict[str, Callable[[Path], list[Row]]] = {
    ".csv": _read_csv,
    ".jsonl": store.read_rows,
    ".parquet": _read_parquet,
    ".tab": _read_orange,
}
