"""Labelled text for classification, with its official split into train and test."""

from pathlib import Path

from inferlab.data.tables import column, read_tables
from inferlab.errors import InferlabError
from inferlab.store import write_rows

LABEL_COLUMNS = ("label_text", "label", "category", "class")
SPLITS = ("train", "test")


def write_labelled_text(source: Path, folder: Path) -> str:
    """Write train.jsonl and test.jsonl with `label` and `text`; returns their sizes.

    `source` is a folder with a table for each split, told by its name. Raises InferlabError when
    a split is missing or empty, or when the test has labels that the training lacks.
    """
    labels = {}
    counts = {}
    for split in SPLITS:
        rows = [
            {"label": column(row, LABEL_COLUMNS, source), "text": column(row, ("text",), source)}
            for row in read_tables(source, split)
            if row.get("text")
        ]
        if not rows:
            raise InferlabError(f"{source} holds no labelled text in its {split} split")
        labels[split] = {row["label"] for row in rows}
        counts[split] = len(rows)
        write_rows(folder / f"{split}.jsonl", rows)
    if unknown := labels["test"] - labels["train"]:
        raise InferlabError(f"{source}: the test has labels unseen in train: {min(unknown)}")
    return f"{counts['train']} train and {counts['test']} test texts, {len(labels['train'])} labels"
