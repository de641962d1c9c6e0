"""A file or folder of the user's."""

from pathlib import Path

from inferlab import params
from inferlab.errors import InferlabError
from inferlab.sources.fetched import Fetched


@params.section
class LocalSource:
    """`path` is a file or folder, absolute or relative to the project's folder."""

    path: str
    licence: str


def fetch_local(source: LocalSource, into: Path) -> Fetched:
    """Take the path as it is; `into` stays empty. Raises InferlabError when there is nothing."""
    path = Path(source.path).expanduser()
    if not path.exists():
        raise InferlabError(f"local.path {path} does not exist; give a file or folder of your own")
    return Fetched(path)
