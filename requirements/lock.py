"""Resolve the direct requirements and pin everything they bring, with the hashes of all its files.

`python requirements/lock.py TORCH_VERSION > requirements/lock.txt`, from the project's environment.
"""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

LEFT_OUT = {
    "inferlab",
    "pip",
    "torch",  # a step of its own in the Makefile: its build differs from machine to machine
    "torchaudio",  # as the next two: its wheel does not load beside the CPU build of torch
    "torchcodec",
    "torchvision",
}


def resolved(direct: Path, torch_version: str, folder: Path) -> dict[str, str]:
    """Name and version of all that the requirements need, torch's own needs included."""
    report = folder / "report.json"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    wanted = ["--report", str(report), "--requirement", str(direct), f"torch=={torch_version}"]
    subprocess.run([*pip, *wanted], check=True, stdout=sys.stderr)
    found = (item["metadata"] for item in json.loads(report.read_text())["install"])
    return {item["name"].lower().replace("_", "-"): item["version"] for item in found}


def main() -> None:
    """Print the lock."""
    if "uv" not in {found.metadata["Name"] for found in distributions()}:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "uv"], check=True)
    with tempfile.TemporaryDirectory() as name:
        pins = Path(name) / "pins.txt"
        versions = resolved(Path(__file__).with_name("direct.txt"), sys.argv[1], Path(name))
        kept = {
            n: v for n, v in versions.items() if n not in LEFT_OUT and not n.startswith("nvidia")
        }
        pins.write_text("".join(f"{n}=={v}\n" for n, v in sorted(kept.items())))
        command = ["uv", "pip", "compile", str(pins), "--no-deps", "--generate-hashes"]
        style = ["--no-header", "--no-annotate", "--quiet", "--python-version", "3.11"]
        subprocess.run([sys.executable, "-m", *command, *style], check=True)


if __name__ == "__main__":
    main()
