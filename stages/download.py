"""Fetch one asset and bring it into the form that the pipeline reads."""

import sys

from inferlab.run import stage
from inferlab.sources.assets import AssetParams, write_asset

FOLDERS = {
    "language_model": "models/base",
    "encoder": "models/encoder",
    "corpus": "data/corpus",
    "labelled_text": "data/labelled_text",
    "questions": "data/questions",
}


def main(key: str) -> None:
    """Fetch the asset `key`."""
    with stage("download", AssetParams, key) as run:
        write_asset(run.params, run.folder(FOLDERS[key]))


if __name__ == "__main__":
    main(sys.argv[1])
