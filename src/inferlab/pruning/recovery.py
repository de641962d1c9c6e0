"""What a pruned classifier is tested on, how it is compared, and its short retraining."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from inferlab.data.tables import Row
from inferlab.distillation.comparison import paired_difference
from inferlab.distillation.scored import Scored
from inferlab.distillation.students import Arm, logit_loss
from inferlab.distillation.training import TrainingParams, device, minimise
from inferlab.errors import InferlabError
from inferlab.models.encoder import TextClassifier
from inferlab.params import section

BATCH = 32


@section
class RecoveryParams:
    """One round of retraining; the rest of the loss, 1 − teacher_share, is that of the labels."""

    teacher_share: Annotated[float, Field(ge=0, le=1)]
    temperature: Annotated[float, Field(gt=0)]
    training: TrainingParams


@dataclass(frozen=True)
class Material:
    """tokens: int32 [documents, tokens]; labels: int64 [documents].

    `train_logits` fp32 [documents, labels] are the teacher's, on all tokens that it reads.
    """

    train_tokens: Tensor
    train_labels: Tensor
    train_logits: Tensor
    test_tokens: Tensor
    test_labels: Tensor


def make_material(
    train: Scored, test: Scored, test_documents: int, max_tokens: int, section: str
) -> Material:
    """The first `max_tokens` of each document, and the first `test_documents` (0: all) to test on.

    The teacher's documents stand in random order. Raises InferlabError, naming the key of
    `section`, when the teacher has fewer of either.
    """
    limits = {"max_tokens": test.documents.tokens.shape[1], "test_documents": len(test.documents)}
    for name, wanted in {"max_tokens": max_tokens, "test_documents": test_documents}.items():
        if wanted > limits[name]:
            raise InferlabError(
                f"{section}.{name} must be at most the teacher's {limits[name]}; "
                f"got {wanted} (params.yaml: {section}.{name})"
            )
    tested = slice(test_documents or None)
    return Material(
        train.documents.tokens[:, :max_tokens],
        train.documents.labels,
        train.logits,
        test.documents.tokens[tested, :max_tokens],
        test.documents.labels[tested],
    )


def retrain(
    model: TextClassifier,
    material: Material,
    params: RecoveryParams,
    rounds: int,
    seed: int,
    after_step: Callable[[], None] | None = None,
) -> None:
    """Train layers and head, in fp32, for `rounds` rounds in one go; embeddings stay as they are.

    The unpruned teacher's logits are part of the target: few steps on labels alone would move even
    an unpruned model away from what it has learnt.
    """
    if not rounds:
        return
    model.to(device())
    for module in model.embeddings():
        module.requires_grad_(False)
    target = Arm("recovery", params.teacher_share, params.temperature)

    def loss(rows: Tensor) -> Tensor:
        with torch.autocast(device().type, enabled=False):
            logits = model(material.train_tokens[rows].to(device()))
        labels = material.train_labels[rows].to(device())
        return logit_loss(logits, material.train_logits[rows].to(device()), labels, target)

    training = replace(params.training, epochs=rounds * params.training.epochs)
    minimise(model, loss, len(material.train_labels), training, seed, after_step)


@torch.inference_mode()
def classify(model: TextClassifier, tokens: Tensor) -> Tensor:
    """Logits fp32 [documents, labels] of tokens [documents, tokens].

    All in fp32: on short documents and a CPU, casting to bf16 costs more than it saves.
    """
    model.to(device()).eval()
    return torch.cat([model(part.to(device())).cpu() for part in tokens.split(BATCH)])


def paired_columns(name: str, one: np.ndarray, other: np.ndarray, seed: int) -> Row:
    """`minus_<name>` and its 95 % interval: `one` − `other`, both [runs, documents], 1 where right.

    Where one of them was run once only, that run stands beside each of the other's.
    """
    runs = max(len(one), len(other))
    one, other = (array.repeat(runs // len(array), axis=0) for array in (one, other))
    gap = paired_difference(one, other, seed)
    return {
        f"minus_{name}": gap.mean,
        f"minus_{name}_low": gap.low,
        f"minus_{name}_high": gap.high,
    }
