"""The one exception that a user is meant to read, and the look-up that suggests a name."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

Value = TypeVar("Value")


class InferlabError(Exception):
    """What is wrong and what would be right, in one line; shown without a traceback."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """`known: a, b` and, when one of them is close to `name`, `did you mean a?`."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"known: {', '.join(names)}{hint}"


def lookup(registry: Mapping[str, Value], name: str, what: str) -> Value:
    """Take `name` from a literal dict of methods. Raises InferlabError naming the known ones."""
    if name not in registry:
        raise InferlabError(f"unknown {what} {name!r}; {suggestion(name, registry)}")
    return registry[name]
