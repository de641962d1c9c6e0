"""Token windows: all of one length, so that nothing is ever padded and no pad token is needed.

BOS policy: `none` cuts windows straight from the articles' tokens; `window` starts each window
with the tokenizer's BOS token, followed by one token of text less.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from inferlab.data.corpus import Article
from inferlab.errors import InferlabError

Bos = Literal["none", "window"]
BETWEEN_ARTICLES = "\n\n"


@dataclass(frozen=True)
class Stream:
    """The tokens of a split's articles, one after the other.

    input_ids: int32 [tokens]; ends: int64 [tokens], where each token ends in `text`.
    """

    name: str
    text: str
    input_ids: NDArray[np.int32]
    ends: NDArray[np.int64]
    article_tokens: list[int]


def tokenise(tokenizer: PreTrainedTokenizerBase, articles: list[Article], name: str) -> Stream:
    """Tokenise each article on its own, without special tokens.

    Raises InferlabError when the tokenizer cannot say where its tokens stand in the text.
    """
    if not tokenizer.is_fast:
        raise InferlabError(
            "the tokenizer gives no offsets, which word and byte counts need; "
            "save it with a tokenizer.json"
        )
    texts = [article["text"] + BETWEEN_ARTICLES for article in articles]
    encoded = [
        tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for text in texts
    ]
    starts = np.cumsum([0, *map(len, texts)])
    ends = [
        start + np.array([end for _, end in one["offset_mapping"]], dtype=np.int64)
        for start, one in zip(starts, encoded, strict=False)
    ]
    ids = [np.array(one["input_ids"], dtype=np.int32) for one in encoded]
    return Stream(
        name, "".join(texts), np.concatenate(ids), np.concatenate(ends), [len(one) for one in ids]
    )


def cut_windows(
    stream: Stream, count: int, length: int, bos: Bos, bos_token_id: int | None
) -> dict[str, Tensor]:
    """Cut `count` windows of `length` tokens, spread evenly over the stream, none overlapping.

    Returns input_ids: int32 [count, length], and the words and UTF-8 bytes of the text of the
    scored tokens 1..length-1, words and bytes: int32 [count]. A word is what stands between white
    space, also where a window cuts it. Raises InferlabError when the stream is too short, or when
    the policy asks for a BOS token that the tokenizer lacks.
    """
    if bos == "window" and bos_token_id is None:
        raise InferlabError(
            "prepare.bos is 'window', but the tokenizer has no BOS token; set prepare.bos to 'none'"
        )
    taken = length - 1 if bos == "window" else length
    available = len(stream.input_ids) // taken
    if available < count:
        raise InferlabError(
            f"the {stream.name} text is too short: {len(stream.input_ids)} tokens found, "
            f"{count * taken} needed for {count} windows of {length}; "
            "give more text, or fewer or shorter windows"
        )
    starts = np.linspace(0, available - 1, count).round().astype(int) * taken
    ids = np.stack([stream.input_ids[start : start + taken] for start in starts])
    if bos == "window":
        ids = np.concatenate([np.full((count, 1), bos_token_id, dtype=np.int32), ids], axis=1)
    texts = [_scored_text(stream, start, taken, bos) for start in starts]
    return {
        "input_ids": torch.from_numpy(ids),
        "words": torch.tensor([len(text.split()) for text in texts], dtype=torch.int32),
        "bytes": torch.tensor([len(text.encode()) for text in texts], dtype=torch.int32),
    }


def _scored_text(stream: Stream, start: int, taken: int, bos: Bos) -> str:
    """The text after the window's token 0, which is not scored, up to the end of its last one."""
    before = start - 1 if bos == "window" else start
    begin = int(stream.ends[before]) if before >= 0 else 0
    return stream.text[begin : int(stream.ends[start + taken - 1])]
