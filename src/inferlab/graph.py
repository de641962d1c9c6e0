"""What of the project a stage's script reaches, by import or by name: what its `deps` must list."""

import ast
import sys
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path("src")


def import_closure(script: Path) -> list[str]:
    """The script and every module of the package that it imports, directly or not, as paths.

    Importing a module also runs the packages that hold it, so their __init__ files are listed.
    Reads the code without running it; imports inside functions count too.
    """
    found: set[Path] = set()
    waiting = [script]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        for module in _imported(file):
            waiting += _files_of(module)
    modules = sorted(str(file) for file in found - {script})
    return [str(script), *modules]


def data_files(modules: Iterable[str]) -> list[str]:
    """Files and folders that modules of the package read: those beside them that they name."""
    named = (
        file.parent / node.value
        for file in map(Path, modules)
        if SOURCE in file.parents
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_name(node.value)
    )
    return sorted({str(path) for path in named if _is_data(path)})


def _is_name(text: str) -> bool:
    return text == Path(text).name and text.isprintable() and 0 < len(text.strip(".")) < 100


def _is_data(path: Path) -> bool:
    if path.is_dir():
        return path.name != "__pycache__" and not (path / "__init__.py").is_file()
    return path.is_file() and path.suffix != ".py"


def _imported(file: Path) -> set[str]:
    """Dotted names of the package that a file imports; `from a import b` may mean a or a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "inferlab"}


def _files_of(module: str) -> list[Path]:
    """The file of a module and of each package above it; nothing for a name that is no module."""
    parts = module.split(".")
    paths = [SOURCE.joinpath(*parts[: depth + 1]) for depth in range(len(parts))]
    files = [path / "__init__.py" for path in paths] + [paths[-1].with_suffix(".py")]
    return [file for file in files if file.is_file()]


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        closure = import_closure(Path(argument))
        print("\n".join([*closure, *data_files(closure)]))
