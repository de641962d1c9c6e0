"""The teacher: a pre-trained encoder, fine-tuned to classify documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from inferlab.data.documents import Documents
from inferlab.distillation.scored import Scored
from inferlab.distillation.training import (
    TrainingParams,
    accuracy,
    accuracy_error,
    class_f1,
    device,
    macro_f1,
    minimise,
)
from inferlab.errors import InferlabError
from inferlab.models.encoder import TextClassifier
from inferlab.params import section

BATCH = 128


@section
class TeacherParams:
    """The section `teacher`; 0 documents mean all of them."""

    documents: Annotated[int, Field(ge=0)]
    test_documents: Annotated[int, Field(ge=0)]
    max_tokens: Annotated[int, Field(ge=3)]
    frozen_layers: Annotated[int, Field(ge=0)]
    training: TrainingParams

    @property
    def limits(self) -> dict[str, int]:
        """How many documents of each split are taken."""
        return {"train": self.documents, "test": self.test_documents}


@dataclass(frozen=True)
class Taught:
    """A fine-tuned classifier, the loss of each step, and its scores of each split."""

    model: TextClassifier
    losses: list[float]
    scored: dict[str, Scored]


def teach(
    model: TextClassifier, splits: dict[str, Documents], params: TeacherParams, seed: int
) -> Taught:
    """Train the layers above the frozen ones and the head on `train`, then score every split.

    Frozen layers run only once for each document. Raises InferlabError when all would be frozen.
    """
    layers, frozen = len(model.layers), params.frozen_layers
    if frozen >= layers:
        raise InferlabError(
            f"teacher.frozen_layers must be below {layers}, the encoder's layers; got {frozen} "
            "(params.yaml: teacher.frozen_layers)"
        )
    model.to(device())
    for module in (*model.embeddings(), *model.layers[:frozen]):
        module.requires_grad_(False)
    train = splits["train"]
    states = lower_states(model, train.tokens, frozen)

    def loss(rows: Tensor) -> Tensor:
        blocked = model.blocked(train.tokens[rows].to(device()))
        above = model.run(states[rows].to(device()), blocked, frozen)
        return F.cross_entropy(model.head(above), train.labels[rows].to(device()))

    losses = minimise(model, loss, len(train), params.training, seed)
    scored = {
        name: score(model, one, lower_states(model, one.tokens, frozen), frozen)
        for name, one in splits.items()
        if name != "train"
    }
    scored["train"] = score(model, train, states, frozen)
    return Taught(model, losses, scored)


@torch.inference_mode()
def lower_states(model: TextClassifier, tokens: Tensor, layers: int) -> Tensor:
    """States after the first `layers` layers, bf16 [documents, tokens, hidden]."""
    parts = []
    with torch.autocast(device().type, dtype=torch.bfloat16):
        for part in tokens.split(BATCH):
            part = part.to(device())
            states, blocked = model.embed(part), model.blocked(part)
            for layer in model.layers[:layers]:
                states = layer(states, blocked)
            parts.append(states.bfloat16().cpu())
    return torch.cat(parts)


@torch.inference_mode()
def score(model: TextClassifier, documents: Documents, states: Tensor, first: int) -> Scored:
    """Go on from `states`, those before layer `first`, to logits and features.

    The features' first half is of the middle layer, or of layer `first` when that is above it.
    """
    middle = max(first, len(model.layers) // 2)
    logits, features = [], []
    with torch.autocast(device().type, dtype=torch.bfloat16):
        for part, lower in zip(documents.tokens.split(BATCH), states.split(BATCH), strict=True):
            part, lower = part.to(device()), lower.to(device())
            blocked = model.blocked(part)
            half = model.run(lower, blocked, first, middle)
            last = model.run(half, blocked, middle)
            logits.append(model.head(last).cpu())
            means = [token_mean(one, part != model.pad) for one in (half, last)]
            features.append(torch.stack(means, 1).bfloat16().cpu())
    return Scored(documents, torch.cat(logits), torch.cat(features))


def token_mean(states: Tensor, real: Tensor) -> Tensor:
    """Mean over the real tokens: [documents, hidden] of states [documents, tokens, hidden]."""
    weights = real.to(states.dtype)[:, :, None]
    return (states * weights).sum(1) / weights.sum(1).clamp(min=1)


def summary(taught: Taught) -> dict[str, float]:
    """The stage's metrics: scores on the official test split, and counts."""
    test, train = taught.scored["test"], taught.scored["train"]
    share = accuracy(test.logits, test.documents.labels)
    return {
        "accuracy": share,
        "accuracy_se": accuracy_error(share, len(test.documents)),
        "macro_f1": macro_f1(test.logits, test.documents.labels),
        "train_accuracy": accuracy(train.logits, train.documents.labels),
        "train_documents": len(train.documents),
        "test_documents": len(test.documents),
        "train_empty_documents": train.documents.empty,
        "test_empty_documents": test.documents.empty,
        "parameters": sum(weight.numel() for weight in taught.model.parameters()),
    }


def label_table(test: Scored, labels: Sequence[str]) -> list[dict[str, Any]]:
    """One row a label: its F1 on the test split, best first."""
    scores = class_f1(test.logits, test.documents.labels).tolist()
    rows = [{"label": name, "f1": round(f1, 4)} for name, f1 in zip(labels, scores, strict=True)]
    return sorted(rows, key=lambda row: -row["f1"])
