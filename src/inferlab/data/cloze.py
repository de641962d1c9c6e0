"""Sentences whose last word is to be predicted, in the manner of LAMBADA (Paperno et al. 2016)."""

import re
from collections.abc import Iterator

import numpy as np

from inferlab import params
from inferlab.data.corpus import Article
from inferlab.data.tables import Row
from inferlab.errors import InferlabError

END_OF_SENTENCE = re.compile(r"(?<=[a-z)][a-z)][.!?])\s+(?=[A-Z])")
PLAIN_WORD = re.compile(r"^[a-z]{3,}$")


@params.section
class ClozeParams:
    """`context_sentences` of the same paragraph stand before the sentence."""

    sentences: int
    shortest_words: int
    longest_words: int
    context_sentences: int

    def __post_init__(self) -> None:
        if self.sentences < 2 or self.context_sentences < 0:
            raise ValueError("needs at least 2 sentences and 0 context sentences")
        if not 2 <= self.shortest_words <= self.longest_words:
            raise ValueError("needs 2 <= shortest_words <= longest_words")


def cloze(articles: list[Article], config: ClozeParams, seed: int) -> list[Row]:
    """Draw sentences at random; `context` is all but the last word, `word` is that one.

    The word is in plain lower-case letters, at least three, and does not end the sentence by
    chance of an abbreviation. Raises InferlabError when the articles have too few such sentences.
    """
    rows = {row["context"]: row for article in articles for row in _candidates(article, config)}
    if len(rows) < config.sentences:
        raise InferlabError(
            f"the held-out text is too short: {len(rows)} cloze sentences found, "
            f"{config.sentences} needed; give more text or lower prepare.cloze.sentences"
        )
    places = np.random.default_rng(seed).choice(len(rows), config.sentences, replace=False)
    found = list(rows.values())
    return [found[place] for place in sorted(places)]


def _candidates(article: Article, config: ClozeParams) -> Iterator[Row]:
    for paragraph in filter(str.strip, article["text"].split("\n")):
        sentences = END_OF_SENTENCE.split(paragraph.strip())
        for place in range(config.context_sentences, len(sentences)):
            *words, last = sentences[place].split()
            short_enough = config.shortest_words <= len(words) + 1 <= config.longest_words
            if short_enough and last.endswith(".") and PLAIN_WORD.match(last[:-1]):
                before = sentences[place - config.context_sentences : place]
                context = " ".join([*before, *words])
                yield {"context": context, "word": last[:-1], "title": article["title"]}
