"""YAML that people edit: a file with a mapping, or one line that says what is wrong with it."""

from pathlib import Path
from typing import Any

import yaml

from inferlab.errors import InferlabError


def read_mapping(file: Path) -> dict[str, Any]:
    """The mapping in a file. Raises InferlabError when it is missing or holds anything else."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InferlabError(f"{file} is missing") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InferlabError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        found = "nothing" if content is None else type(content).__name__
        raise InferlabError(f"{file} must hold names with values; found {found}")
    return content
