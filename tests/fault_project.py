"""The whole graph on the smoke profile in a clone of its own, and ways to disturb it."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from inferlab.profile import prepare

ROOT = Path(__file__).parent.parent
KEPT = ("dvc.lock", "metrics", "plots", "reports")
PATIENCE_SECONDS = 60.0
IMPORT_SECONDS = 3.0
"""Of a stage's process, before its own clock starts."""
DISK = "4g"


def stage_names(wanted: list[str]) -> list[str]:
    """Every stage of dvc.yaml as DVC names it, one an item of a matrix; or those `wanted`.

    A stage is wanted by its name or, for all of its items, by what stands before its `@`.
    """
    names = []
    for stage, content in yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].items():
        items = content.get("foreach") or next(iter(content.get("matrix", {}).values()), [])
        names += [f"{stage}@{item}" for item in items] or [stage]
    return [one for one in names if not wanted or {one, one.split("@")[0]} & set(wanted)]


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[str | None]:
    """Mount one on `folder`, unless something is there already. Yields why that failed, or None."""
    if folder.is_mount():
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        yield f"needs the right to mount a tmpfs; mount said {done.stderr.strip()!r}"
        return
    try:
        yield None
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@dataclass
class Project:
    """A workspace and what its undisturbed run left. `mark` is in the environment of all it starts.

    `base`: copies of what DVC does not cache; `files`: of each output, its files.
    """

    workspace: Path
    base: Path
    log: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    files: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path, targets: list[str]) -> "Project":
        """Clone the last commit into `folder` and run the graph; a finished run there is kept."""
        clone = folder / "inferlab"
        if not clone.exists():
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        project = cls(prepare("smoke", clone), folder / "base", folder / "dvc.log")
        if project.base.exists():
            project.restore()
        done = project.repro(*targets)
        assert done.returncode == 0, done.stderr
        shutil.rmtree(project.base, ignore_errors=True)
        project.base.mkdir()
        for name in KEPT:
            _copy(project.workspace / name, project.base / name)
        for stage in project.locked():
            project.files |= {out: project.listing(out) for out in project.outputs(stage)}
        return project

    @property
    def cache(self) -> Path:
        """DVC's, which is the clone's."""
        return self.workspace.parents[1] / ".dvc/cache"

    def environment(self) -> dict[str, str]:
        """Of every process: the clone's code, and no file beside what stages write."""
        return os.environ | {
            "FAULT_MARK": self.mark,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.workspace / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def start(self, command: list[str]) -> "subprocess.Popen[str]":
        """A process at the head of a group of its own."""
        return subprocess.Popen(
            command,
            cwd=self.workspace,
            env=self.environment(),
            stdout=subprocess.DEVNULL,
            stderr=self.log.open("w"),
            text=True,
            start_new_session=True,
        )

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """A process to its end."""
        return subprocess.run(
            command,
            cwd=self.workspace,
            env=self.environment(),
            capture_output=True,
            text=True,
        )

    def repro(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """`dvc repro`."""
        return self.run("dvc", "repro", *arguments)

    def locked(self) -> dict[str, Any]:
        """The stages of dvc.lock."""
        return yaml.safe_load((self.workspace / "dvc.lock").read_text())["stages"]

    def take_lock_from_git(self) -> None:
        """What a user does about a damaged one: `git checkout dvc.lock`.

        That of the undisturbed run stands for Git's.
        """
        _copy(self.base / "dvc.lock", self.workspace / "dvc.lock")

    def outputs(self, stage: str) -> list[str]:
        """Everything that the stage writes, metrics and plots too, from the undisturbed run."""
        kept = yaml.safe_load((self.base / "dvc.lock").read_text())["stages"]
        return [out["path"] for out in kept[stage]["outs"]]

    def listing(self, out: str) -> list[str]:
        """The files of an output, relative to the workspace; none when it is not there."""
        path = self.workspace / out
        files = [path] if path.is_file() else path.rglob("*")
        return sorted(str(one.relative_to(self.workspace)) for one in files if one.is_file())

    def seconds(self, stage: str) -> float:
        """How long the undisturbed run of the stage took."""
        return json.loads((self.base / timing(stage)).read_text())["seconds"]

    def values(self, stage: str) -> dict[str, float | str]:
        """The stage's metrics, but for its timing, and the hashes of its cached outputs."""
        found: dict[str, float | str] = {
            out["path"]: out["md5"]
            for out in self.locked()[stage]["outs"]
            if _is_cached(out["path"])
        }
        for out in self.outputs(stage):
            if out.startswith("metrics/") and not out.startswith("metrics/timing/"):
                for file in self.listing(out):
                    values = json.loads((self.workspace / file).read_text())
                    found |= {f"{file}: {key}": value for key, value in values.items()}
        return found

    def restore(self) -> None:
        """Make the workspace what the undisturbed run left."""
        for name in KEPT:
            _remove(self.workspace / name)
            _copy(self.base / name, self.workspace / name)
        cached = [out for stage in self.locked() for out in self.outputs(stage) if _is_cached(out)]
        if cached:
            done = self.run("dvc", "checkout", "--force", *cached)
            assert done.returncode == 0, done.stderr

    def remove(self, stage: str) -> None:
        """Remove the stage's outputs, as DVC does before it runs it."""
        for out in self.outputs(stage):
            _remove(self.workspace / out)

    def broken(self, stage: str) -> list[str]:
        """Outputs of the stage that are there, but not whole."""
        return [
            out for out in self.outputs(stage) if self.listing(out) not in ([], self.files[out])
        ]

    def leftovers(self) -> list[str]:
        """What stages had written aside."""
        return [str(path) for path in self.workspace.rglob("*.partial")]

    def processes(self) -> list[psutil.Process]:
        """Everything that still runs of what this project started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get("FAULT_MARK") == self.mark:
                    found.append(process)
        return found

    def survivors(self) -> list[str]:
        """Processes that do not end by themselves in a while, of which there should be none."""
        limit = time.monotonic() + PATIENCE_SECONDS
        while (found := self.processes()) and time.monotonic() < limit:
            time.sleep(0.2)
        lines = []
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                lines.append(" ".join(process.cmdline())[:200])
                process.kill()
        return lines

    def kill(self, stage: str, dice: random.Random) -> float:
        """SIGKILL to `dvc repro` and the stage at a random moment of a first run; seconds into it.

        A stage that is done before its moment is run once more, with an earlier one.
        """
        longest = IMPORT_SECONDS + self.seconds(stage)
        while True:
            self.forget(stage)
            process = self.start(["dvc", "repro", "--single-item", stage])
            self.wait_for(f"stages.{stage.split('@')[0]}", process)
            moment = dice.uniform(0, longest)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(moment)
                longest = 0.7 * moment
                continue
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not self.is_locked(stage):
                return moment
            longest = 0.7 * moment

    def is_locked(self, stage: str) -> bool:
        """Whether dvc.lock, which a kill may have cut off, has the stage: it was done."""
        with contextlib.suppress(yaml.YAMLError, KeyError, TypeError):
            return stage in self.locked()
        return False

    def wait_for(
        self, word: str, process: "subprocess.Popen[str]", but: str | None = None
    ) -> psutil.Process | None:
        """The first of the project's processes with `word` and not `but` among its arguments.

        None when `process` ends first.
        """
        while process.poll() is None:
            for one in self.processes():
                with contextlib.suppress(psutil.Error):
                    if word in (line := one.cmdline()) and but not in line:
                        return one
            time.sleep(0.1)
        return None

    def corrupt_cache(self, stage: str) -> tuple[str, Path]:
        """Change one byte of the largest cached file of the stage; its output, and that file.

        It stays read-only and keeps its times, as with a bad sector.
        """
        folder = self.cache / "files/md5"
        found = {}
        for out in self.locked()[stage]["outs"]:
            held = folder / out["md5"][:2] / out["md5"][2:]
            if held.suffix == ".dir":
                for entry in json.loads(held.read_text()):
                    found[folder / entry["md5"][:2] / entry["md5"][2:]] = out["path"]
        cached = max(found, key=lambda file: file.stat().st_size)
        state, content = cached.stat(), bytearray(cached.read_bytes())
        content[len(content) // 2] ^= 1
        cached.chmod(0o644)
        cached.write_bytes(content)
        cached.chmod(0o444)
        os.utime(cached, ns=(state.st_atime_ns, state.st_mtime_ns))
        return found[cached], cached

    def is_sound(self, cached: Path) -> bool:
        """Whether a file of the cache is what its name says."""
        content = cached.read_bytes()
        return hashlib.md5(content).hexdigest() == cached.parent.name + cached.name

    @contextlib.contextmanager
    def no_earlier_runs(self) -> Iterator[None]:
        """Hide what DVC remembers of runs: it would give their results instead of running again."""
        aside = (self.cache / "runs").rename(self.cache / "hidden")
        try:
            yield
        finally:
            shutil.rmtree(self.cache / "runs", ignore_errors=True)
            aside.rename(self.cache / "runs")

    def forget(self, stage: str) -> None:
        """Make the stage one that has never run, with `no_earlier_runs`."""
        self.remove(stage)
        shutil.rmtree(self.cache / "runs", ignore_errors=True)
        file = self.workspace / "dvc.lock"
        content = yaml.safe_load(file.read_text())
        content["stages"].pop(stage, None)
        file.write_text(yaml.safe_dump(content))

    @contextlib.contextmanager
    def full_disk(self, stage: str) -> Iterator[None]:
        """Leave half of the pages that the stage's outputs took."""
        page = os.sysconf("SC_PAGE_SIZE")
        sizes = [
            (self.workspace / f).stat().st_size for o in self.outputs(stage) for f in self.files[o]
        ]
        self.remove(stage)
        left = page * max(1, sum(-(-size // page) for size in sizes) // 2)
        filler = self.workspace.parents[2] / "filler"
        disk = os.statvfs(filler.parent)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - left)
        try:
            yield
        finally:
            filler.unlink()


def timing(stage: str) -> str:
    """Where the stage's seconds are."""
    return f"metrics/timing/{stage.replace('@', '/')}.json"


def _is_cached(out: str) -> bool:
    return not out.startswith(KEPT)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copy2(source, target)
