"""Articles dealt out to calibration, training and held-out, so that no article is on two sides."""

import numpy as np

from inferlab.data.corpus import Article
from inferlab.errors import InferlabError

SPLITS = ("calibration", "heldout", "training")


def split_articles(
    articles: list[Article], calibration_share: float, heldout_share: float, seed: int
) -> dict[str, list[Article]]:
    """Deal out whole articles by the share of characters, the rest to training.

    Articles with the same title count as one. Each split gets at least one. Raises InferlabError
    when there are fewer than three.
    """
    unique = list({article["title"]: article for article in articles}.values())
    if len(unique) < len(SPLITS):
        raise InferlabError(
            f"the corpus has {len(unique)} articles that are long enough; at least {len(SPLITS)} "
            "are needed for calibration, held-out and training; give more text or lower "
            "prepare.shortest_article"
        )
    order = np.random.default_rng(seed).permutation(len(unique))
    shuffled = [unique[place] for place in order]
    total = sum(len(article["text"]) for article in shuffled)
    heldout = _take(shuffled, heldout_share * total, leave=2)
    calibration = _take(shuffled, calibration_share * total, leave=1)
    splits = {"calibration": calibration, "heldout": heldout, "training": shuffled}
    titles = [article["title"] for split in splits.values() for article in split]
    assert len(titles) == len(set(titles)) == len(unique), "an article is on two sides"
    return splits


def _take(articles: list[Article], characters: float, leave: int) -> list[Article]:
    """Pop articles until they hold `characters`; at least one, and at least `leave` stay."""
    taken = [articles.pop()]
    while len(articles) > leave and sum(len(article["text"]) for article in taken) < characters:
        taken.append(articles.pop())
    return taken
