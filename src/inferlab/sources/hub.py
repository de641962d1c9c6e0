"""A model or data set of the Hugging Face Hub at a revision."""

from pathlib import Path
from typing import Literal

import httpx

from inferlab import params
from inferlab.errors import InferlabError
from inferlab.sources.fetched import Fetched

WANTED = {
    "model": ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"],
    "dataset": ["*.parquet", "*.jsonl", "*.csv", "*.txt"],
}
UNWANTED = ["onnx/*", "openvino/*", "original/*", "consolidated*"]


@params.section
class HubSource:
    """`path` names a file or folder inside the repository; null takes all of it."""

    repo: str
    revision: str
    path: str | None
    licence: str
    repo_type: Literal["model", "dataset"] = "model"


def fetch_hub(source: HubSource, into: Path) -> Fetched:
    """Download a snapshot, safetensors and text only; the fact `commit` is what it resolved to.

    Raises InferlabError when there is no network or no such repository, revision or path.
    """
    from huggingface_hub import constants, errors, snapshot_download

    constants.HF_HUB_OFFLINE = False  # inferlab switches the hub off for everything else
    wanted = WANTED[source.repo_type]
    if source.path:
        inside = source.path.rstrip("/")
        wanted = [inside, *(f"{inside}/{pattern}" for pattern in wanted)]
    what = f"{source.repo} at revision {source.revision}"
    try:
        snapshot = snapshot_download(
            source.repo,
            repo_type=source.repo_type,
            revision=source.revision,
            cache_dir=into,
            allow_patterns=wanted,
            ignore_patterns=UNWANTED,
        )
    except (errors.LocalEntryNotFoundError, httpx.TransportError):
        raise InferlabError(
            f"no network: could not fetch {what} from the Hugging Face Hub; "
            "connect and run again, or give this asset as `local` in params.yaml"
        ) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, errors.RevisionResolutionError) as e:
        raise InferlabError(f"the Hugging Face Hub refused {what}: {_first_line(e)}") from None
    path = Path(snapshot) / (source.path or "")
    if not path.exists():
        raise InferlabError(f"{what} holds no {source.path}")
    return Fetched(path, {"commit": Path(snapshot).name})


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
