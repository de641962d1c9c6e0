"""Longer stretches of the held-out text than the windows that `prepare` cuts from it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer

from inferlab.data.cleaning import clean_articles
from inferlab.data.corpus import Article
from inferlab.data.windows import Stream, cut_windows, tokenise
from inferlab.errors import InferlabError
from inferlab.store import read_json, read_rows


def heldout_inputs(model: Path, corpus: Path, windows: Path, count: int, length: int) -> Tensor:
    """`count` stretches of `length` held-out tokens, spread evenly, none overlapping.

    `model` gives the tokenizer, `windows` (what `prepare` wrote) the titles of the held-out
    articles and whether a stretch begins with BOS. Returns int64 [count, length]. Raises
    InferlabError when there is too little text, or when the articles are not those prepared.
    """
    manifest = read_json(windows / "manifest.json")
    tokenizer = AutoTokenizer.from_pretrained(model)
    articles = read_rows(corpus / "articles.jsonl")
    stream = tokenise(tokenizer, heldout_articles(articles, manifest), "heldout")
    check_same_text(stream, manifest)
    cut = cut_windows(stream, count, length, manifest["bos"], tokenizer.bos_token_id)
    return cut["input_ids"].long()


def heldout_articles(articles: Sequence[Any], manifest: Mapping[str, Any]) -> list[Article]:
    """The articles that the manifest lists as held out, as plain text, in its order.

    Raises InferlabError when one is missing.
    """
    titles = manifest["titles"]["heldout"]
    wanted = set(titles)
    plain = clean_articles([article for article in articles if article["title"] in wanted], 1)
    found = {article["title"]: article for article in plain}
    if missing := [title for title in titles if title not in found]:
        raise InferlabError(
            f"data/corpus lacks {len(missing)} of the {len(titles)} articles that data/windows "
            f"names as held out, for instance {missing[0]!r}; run prepare again"
        )
    return [found[title] for title in titles]


def check_same_text(stream: Stream, manifest: Mapping[str, Any]) -> None:
    """Raise InferlabError unless the stream has as many tokens as `prepare` found."""
    if (found := len(stream.input_ids)) != (prepared := manifest["tokens"]["heldout"]):
        raise InferlabError(
            f"the held-out articles have {found} tokens, but data/windows was made of {prepared}; "
            "run prepare again"
        )
