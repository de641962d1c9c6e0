"""Run the whole graph with an overlay of the parameters, in a workspace of its own.

The workspace `.profiles/<name>/` holds the project's files, `params.yaml` with the overlay
`params/<name>.yaml` merged in, and outputs of its own; it shares the cache. The committed
params.yaml, dvc.lock, metrics and plots are not touched.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from inferlab.errors import InferlabError, lookup, suggestion
from inferlab.yaml_files import read_mapping

RESULTS = ("metrics", "plots", "dvc.lock", ".dvc")


def merge(base: dict[str, Any], overlay: dict[str, Any], where: str) -> dict[str, Any]:
    """`base` with the values of `overlay`; blocks are merged key by key.

    A block that is null in `base` may be filled, and a block of `base` may be set to null. Raises
    InferlabError for a key that `base` does not have, or that does not change anything.
    """
    merged = dict(base)
    for key, value in overlay.items():
        place = f"{where}.{key}" if where else key
        if key not in base:
            raise InferlabError(
                f"{place} of the overlay is not in params.yaml; {suggestion(key, base)}"
            )
        if isinstance(base[key], dict) and isinstance(value, dict):
            merged[key] = merge(base[key], value, place)
        elif base[key] == value:
            raise InferlabError(
                f"{place} of the overlay is {value!r} in params.yaml already; drop it"
            )
        else:
            merged[key] = value
    return merged


def prepare(name: str, root: Path) -> Path:
    """Make or refresh the workspace of the profile `name`; its outputs stay. Returns its folder.

    Raises InferlabError for an unknown profile, for a params.yaml or overlay that is no YAML or
    does not fit the other, and outside a Git repository.
    """
    overlays = {file.stem: file for file in (root / "params").glob("*.yaml")}
    overlay = read_mapping(lookup(overlays, name, "profile"))
    params = merge(read_mapping(root / "params.yaml"), overlay, "")
    workspace = root / ".profiles" / name
    for path in _project_files(root):
        if Path(path).parts[0] not in RESULTS and (root / path).is_file():
            _copy(root / path, workspace / path)
    (workspace / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    settings = workspace / ".dvc" / "config"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text(
        f"[core]\n    no_scm = true\n    analytics = false\n    check_update = false\n"
        f"[cache]\n    dir = {(root / '.dvc' / 'cache').resolve()}\n"
    )
    return workspace


def _project_files(root: Path) -> list[str]:
    """What Git tracks, and what it would if it were added."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=root,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        reason = " ".join(listed.stderr.split())
        raise InferlabError(f"a profile copies what Git lists of {root}, but {reason}")
    return [path for path in listed.stdout.split("\0") if path]


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or target.read_bytes() != source.read_bytes():
        shutil.copy2(source, target)


def main() -> None:
    """`python -m inferlab.profile smoke`: prepare the workspace and run the graph in it."""
    if len(sys.argv) != 2:
        sys.exit("inferlab: name one profile, as in python -m inferlab.profile smoke")
    name, root = sys.argv[1], Path.cwd()
    try:
        workspace = prepare(name, root)
    except InferlabError as error:
        sys.exit(f"inferlab: {error}")
    print(f"profile {name}: running in {workspace.relative_to(root)}", flush=True)
    finished = subprocess.run(["dvc", "repro"], cwd=workspace)
    if finished.returncode == 0:
        print(f"results: {workspace.relative_to(root)}/metrics and plots beside it")
    sys.exit(finished.returncode)


if __name__ == "__main__":
    main()
