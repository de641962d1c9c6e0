"""Labelled text as tensors: cleaned, tokenized to one length, with labels as numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from inferlab.data.posts import strip_post
from inferlab.data.tables import Row
from inferlab.errors import InferlabError, suggestion


@dataclass(frozen=True)
class Documents:
    """tokens: int32 [documents, tokens], padded on the right; labels: int64 [documents].

    `empty` of the split's documents had nothing left after cleaning and are not among them.
    """

    tokens: Tensor
    labels: Tensor
    empty: int = 0

    def __len__(self) -> int:
        return len(self.labels)


def make_splits(
    rows: dict[str, list[Row]], tokenizer: Tokenizer, limits: dict[str, int], seed: int
) -> tuple[tuple[str, ...], dict[str, Documents]]:
    """The labels' names, and the documents of each split."""
    labels = label_names(rows)
    return labels, {
        split: make_documents(rows[split], labels, tokenizer, limit, seed)
        for split, limit in limits.items()
    }


def label_names(rows: dict[str, list[Row]]) -> tuple[str, ...]:
    """The labels of all splits, sorted. Raises InferlabError when a split lacks one."""
    names = {split: {row["label"] for row in found} for split, found in rows.items()}
    everything = set().union(*names.values())
    for split, own in names.items():
        if missing := sorted(everything - own):
            raise InferlabError(
                f"data/labelled_text: {split}.jsonl has {len(own)} of the {len(everything)} labels "
                f"and lacks {', '.join(missing)}; each split needs documents of every label"
            )
    return tuple(sorted(everything))


def make_documents(
    rows: Sequence[Row], labels: Sequence[str], tokenizer: Tokenizer, limit: int, seed: int
) -> Documents:
    """Clean and tokenize `limit` of the documents (0: all), each label in proportion.

    Raises InferlabError on a label that is not among `labels`, or when one has no document.
    """
    number_of = {name: number for number, name in enumerate(labels)}
    for row in rows:
        if row["label"] not in number_of:
            hint = suggestion(row["label"], labels)
            raise InferlabError(f"the label {row['label']!r} is not in the label map; {hint}")
    bodies = [(strip_post(row["text"]), number_of[row["label"]]) for row in rows]
    kept = [(text, label) for text, label in bodies if text]
    numbers = np.array([label for _, label in kept], dtype=np.int64)
    chosen = _proportional(numbers, limit, seed)
    if missing := sorted(set(range(len(labels))) - set(numbers[chosen].tolist())):
        raise InferlabError(
            f"{len(chosen)} documents hold none of the label {labels[missing[0]]!r} that is not "
            "empty after cleaning; take more documents"
        )
    encoded = tokenizer.encode_batch([kept[place][0] for place in chosen])
    tokens = torch.tensor([one.ids for one in encoded], dtype=torch.int32)
    return Documents(tokens, torch.from_numpy(numbers[chosen]), len(rows) - len(kept))


def load_tokenizer(folder: Path, length: int) -> Tokenizer:
    """The tokenizer of a checkpoint, set to cut and pad every text to `length` tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pad = tokenizer.token_to_id("[PAD]")
    if pad is None:
        raise InferlabError(f"{folder}: the tokenizer has no [PAD] token; give a BERT checkpoint")
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=pad)
    return tokenizer


def _proportional(labels: np.ndarray, limit: int, seed: int) -> np.ndarray:
    """Places of `limit` documents, drawn so that each label keeps its share; in shuffled order.

    Each document's rank within its label, as a share of the label's documents, sorts them.
    """
    order = np.random.default_rng(seed).permutation(len(labels))
    if not limit or limit >= len(labels):
        return order
    shares = np.empty(len(labels))
    for label in np.unique(labels):
        own = order[labels[order] == label]
        shares[own] = (np.arange(len(own)) + 0.5) / len(own)
    return order[np.argsort(shares[order], kind="stable")][:limit]
