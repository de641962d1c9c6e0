"""Documents together with what a model says of them, as files that later stages read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from inferlab.data.documents import Documents
from inferlab.errors import InferlabError
from inferlab.store import load_tensors, read_json, save_tensors, write_json

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Scored:
    """Documents, logits fp32 [documents, labels] and features [documents, 2, hidden].

    Features are a document's mean states in the middle and at the end of the model.
    """

    documents: Documents
    logits: Tensor
    features: Tensor


def save_scored(folder: Path, splits: dict[str, Scored], labels: Sequence[str]) -> None:
    """Write one file a split into the existing `folder`, and the labels' names."""
    for split, scored in splits.items():
        tensors = {
            "tokens": scored.documents.tokens,
            "labels": scored.documents.labels,
            "logits": scored.logits,
            "features": scored.features,
        }
        save_tensors(folder / f"{split}.safetensors", tensors)
    write_json(folder / MANIFEST, {"labels": list(labels)})


def load_scored(folder: Path, split: str) -> Scored:
    """What `save_scored` wrote of one split."""
    tensors = load_tensors(folder / f"{split}.safetensors")
    documents = Documents(tensors["tokens"], tensors["labels"])
    return Scored(documents, tensors["logits"], tensors["features"])


def save_answers(folder: Path, logits: Tensor, test: Scored, labels: Sequence[str]) -> None:
    """Write a student's logits [seeds, documents, labels] of the test split, beside its labels.

    Documents stand in the order of the teacher's test split.
    """
    tensors = {"logits": logits, "labels": test.documents.labels}
    save_tensors(folder / "test.safetensors", tensors)
    write_json(folder / MANIFEST, {"labels": list(labels)})


def load_checked(folder: Path, split: str, labels: Sequence[str]) -> Scored:
    """Like `load_scored`. Raises InferlabError unless the logits are of these labels."""
    require_same_labels(load_labels(folder), labels, folder)
    return load_scored(folder, split)


def load_labels(folder: Path) -> tuple[str, ...]:
    """The names of the labels, in the order of the logits."""
    return tuple(read_json(folder / MANIFEST)["labels"])


def require_same_labels(teacher: Sequence[str], student: Sequence[str], where: Path) -> None:
    """Raise InferlabError unless both have the same labels in the same order."""
    if tuple(teacher) == tuple(student):
        return
    alone = sorted(set(teacher) ^ set(student))
    what = f"{alone[0]!r} is known to one only" if alone else "their order differs"
    raise InferlabError(
        f"{where}: teacher and student must have the same labels; the teacher has {len(teacher)}, "
        f"the student {len(student)}, and {what}; run the stage teacher again"
    )
