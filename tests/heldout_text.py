"""A project folder for tests of stages that cut held-out text anew: parameters and text."""

from pathlib import Path
from typing import Any

import yaml
from conftest import TEXT
from transformers import AutoTokenizer

from inferlab.data.windows import tokenise
from inferlab.store import write_json, write_rows

TITLES = ("b", "a")


def write_heldout(model: Path, copies: int = 3) -> None:
    """In the current folder: two held-out articles, one of another split, and the manifest."""
    articles = [
        {"title": title, "text": f"{title}. {TEXT}\n" * copies, "format": "plain"}
        for title in ("a", "training", "b")
    ]
    Path("data/corpus").mkdir(parents=True)
    Path("data/windows").mkdir(parents=True)
    write_rows(Path("data/corpus/articles.jsonl"), articles)
    tokenizer = AutoTokenizer.from_pretrained(model)
    of_title = {a["title"]: {**a, "text": str(a["text"]).strip()} for a in articles}
    stream = tokenise(tokenizer, [of_title[title] for title in TITLES], "heldout")  # type: ignore[misc]
    manifest = {
        "bos": "none",
        "tokens": {"heldout": len(stream.input_ids)},
        "titles": {"heldout": list(TITLES)},
    }
    write_json(Path("data/windows/manifest.json"), manifest)


def set_params(name: str, **changes: Any) -> None:
    """Change keys of a section of the params.yaml in the current folder; one thread."""
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["run"]["threads"] = 1
    content[name] |= changes
    Path("params.yaml").write_text(yaml.safe_dump(content))
