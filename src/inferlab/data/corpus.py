"""A text corpus as articles, before any cleaning."""

import bz2
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypedDict
from xml.etree import ElementTree

from inferlab.data.tables import read_tables
from inferlab.errors import InferlabError
from inferlab.store import write_rows

PIECE = 20_000
"""Characters of a piece of a text that comes as one file and so has no articles of its own."""
WIKITEXT_TITLE = re.compile(r"^ = ([^=]+) = \n$")


class Article(TypedDict):
    """`text` is wiki mark-up or plain text."""

    title: str
    text: str
    format: Literal["wiki", "plain"]


def write_corpus(source: Path, folder: Path) -> str:
    """Write articles.jsonl; returns how many articles and characters.

    `source` is a Wikipedia dump (.xml, .xml.bz2), a text file, a folder of text files (each an
    article), or a table (or folder of tables) with a column `text`. Raises InferlabError when it
    holds no text.
    """
    articles = list(_articles(source))
    characters = sum(len(article["text"]) for article in articles)
    if not characters:
        raise InferlabError(f"{source} holds no text; give .txt files, a table or a wiki dump")
    write_rows(folder / "articles.jsonl", articles)
    return f"{len(articles)} articles, {characters} characters before cleaning"


def _articles(source: Path) -> Iterator[Article]:
    name = source.name
    if ".xml" in name:
        yield from _dump(source)
    elif source.suffix == ".txt":
        yield from _pieces(source.stem, _read_text(source))
    elif source.is_dir() and (files := sorted(source.rglob("*.txt"))):
        for file in files:
            yield _plain(str(file.relative_to(source).with_suffix("")), _read_text(file))
    else:
        yield from _wikitext([str(row.get("text") or "") for row in read_tables(source)])


def _dump(file: Path) -> Iterator[Article]:
    """The pages of a MediaWiki export that are articles and no redirects."""
    with bz2.open(file) if file.suffix == ".bz2" else file.open("rb") as stream:
        for _, element in ElementTree.iterparse(stream):
            if element.tag.rpartition("}")[2] != "page":
                continue
            page = {child.tag.rpartition("}")[2]: child for child in element.iter()}
            if page["ns"].text == "0" and "redirect" not in page and page["text"].text:
                yield {
                    "title": page["title"].text or "",
                    "text": page["text"].text or "",
                    "format": "wiki",
                }
            element.clear()


def _wikitext(lines: list[str]) -> Iterator[Article]:
    """Rows of text; WikiText's rows are lines, and its ` = Title = ` starts an article."""
    starts = [row for row, line in enumerate(lines) if WIKITEXT_TITLE.match(line)]
    if not starts:
        yield from (_plain(f"row {row}", line) for row, line in enumerate(lines) if line.strip())
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield _plain(lines[start].strip(" =\n"), "".join(lines[start:end]))


def _pieces(title: str, text: str) -> Iterator[Article]:
    """A text cut at ends of lines into pieces of about PIECE characters."""
    start = number = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        yield _plain(f"{title}, piece {number}", text[start:end])
        start, number = end, number + 1


def _plain(title: str, text: str) -> Article:
    return {"title": title, "text": text, "format": "plain"}


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InferlabError(f"{file} is not UTF-8 text: {error}") from None
