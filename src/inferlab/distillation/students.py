"""Students of a teacher: how they begin, what they minimise, and how one is trained.

Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network" (softened outputs, T²);
Sun et al. 2019, "Patient Knowledge Distillation" (matching normalised states of layers).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from inferlab.distillation.scored import Scored
from inferlab.distillation.teacher import token_mean
from inferlab.distillation.training import TrainingParams, device, minimise, predict
from inferlab.errors import InferlabError
from inferlab.models.encoder import Shape, TextClassifier
from inferlab.params import section

LAYERS = 2
SPREAD = 0.02
"""Standard deviation of fresh weights, BERT's."""


@section
class StudentParams:
    """The student: two layers of this size that read the first `max_tokens` of a document."""

    hidden: Annotated[int, Field(gt=0)]
    heads: Annotated[int, Field(gt=0)]
    intermediate: Annotated[int, Field(gt=0)]
    max_tokens: Annotated[int, Field(ge=3)]
    training: TrainingParams

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden; got {self.heads} and {self.hidden}")


@dataclass(frozen=True)
class Arm:
    """What a student minimises: the teacher's share is KL at `temperature`, the rest the labels'.

    `feature_weight` adds the distance of hidden states; `fresh` begins without the teacher's
    embeddings.
    """

    name: str
    teacher_share: float = 0.0
    temperature: float = 1.0
    feature_weight: float = 0.0
    fresh: bool = False


@dataclass(frozen=True)
class Lesson:
    """All that a student needs; `test_tokens`: [documents, max_tokens].

    `embeddings`: the student's words, positions and types to begin with, [rows, hidden] each.
    """

    train: Scored
    test_tokens: Tensor
    embeddings: dict[str, Tensor]
    pad: int


@dataclass(frozen=True)
class Student:
    """A trained student and its logits on the test split, fp32 [documents, labels]."""

    model: TextClassifier | None
    logits: Tensor


def make_lesson(
    teacher: TextClassifier, train: Scored, test: Scored, params: StudentParams
) -> Lesson:
    """What students of `teacher` learn from. Raises InferlabError when a student exceeds it."""
    limits = {"hidden": teacher.shape.hidden, "max_tokens": train.documents.tokens.shape[1]}
    for name, limit in limits.items():
        if getattr(params, name) > limit:
            raise InferlabError(
                f"distill.student.{name} must be at most the teacher's {limit}; "
                f"got {getattr(params, name)} (params.yaml: distill.student.{name})"
            )
    tokens = test.documents.tokens[:, : params.max_tokens]
    return Lesson(train, tokens, project_embeddings(teacher, params.hidden), teacher.pad)


def project_embeddings(teacher: TextClassifier, hidden: int) -> dict[str, Tensor]:
    """The teacher's embedding tables in the `hidden` directions of most variance of its words.

    Scaled to the spread of fresh weights, so that both starts fit the same learning rate.
    """
    words = teacher.words.weight.detach().float().cpu()
    _, directions = torch.linalg.eigh(torch.cov(words.t()))
    basis = directions.flip(1)[:, :hidden]
    scale = SPREAD / (words @ basis).std()
    tables = {"words": teacher.words, "positions": teacher.positions, "types": teacher.types}
    return {name: table.weight.detach().cpu() @ basis * scale for name, table in tables.items()}


def new_student(lesson: Lesson, params: StudentParams, fresh: bool, seed: int) -> TextClassifier:
    """A student with random layers; its embeddings too are random when `fresh`."""
    tables = lesson.embeddings
    shape = Shape(
        vocabulary=len(tables["words"]),
        positions=len(tables["positions"]),
        hidden=params.hidden,
        layers=LAYERS,
        heads=params.heads,
        intermediate=params.intermediate,
        labels=lesson.train.logits.shape[1],
    )
    torch.manual_seed(seed)
    model = TextClassifier(shape, lesson.pad)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5 if "layers" in name else SPREAD)
    if not fresh:
        model.load_state_dict({f"{name}.weight": table for name, table in tables.items()}, False)
    return model


def train_student(arm: Arm, lesson: Lesson, params: StudentParams, seed: int) -> Student:
    """Train one student. Arms with the same seed begin alike and see batches in the same order."""
    model = new_student(lesson, params, arm.fresh, seed).to(device())
    tokens = lesson.train.documents.tokens[:, : params.max_tokens]
    teacher_size = lesson.train.features.shape[2]
    bridge = nn.Linear(params.hidden, teacher_size, bias=False).to(device())
    trained = nn.ModuleDict({"student": model, "bridge": bridge}) if arm.feature_weight else model

    def loss(rows: Tensor) -> Tensor:
        batch = tokens[rows].to(device())
        blocked = model.blocked(batch)
        middle = model.layers[0](model.embed(batch), blocked)
        last = model.run(middle, blocked, first=1)
        labels = lesson.train.documents.labels[rows].to(device())
        value = logit_loss(model.head(last), lesson.train.logits[rows].to(device()), labels, arm)
        if arm.feature_weight:
            real = batch != model.pad
            own = torch.stack([bridge(token_mean(one, real)) for one in (middle, last)], 1)
            target = lesson.train.features[rows].to(device())
            value = value + arm.feature_weight * feature_loss(own, target)
        return value

    minimise(trained, loss, len(tokens), params.training, seed)
    return Student(model.cpu(), predict(model, lesson.test_tokens))


def logit_loss(student: Tensor, teacher: Tensor, labels: Tensor, arm: Arm) -> Tensor:
    """share · T² · KL(teacher at T ‖ student at T) + (1 − share) · cross-entropy of the labels.

    student, teacher: logits [documents, labels]; T² keeps the gradient's size, which falls with
    1/T².
    """
    value = student.new_zeros(())
    if arm.teacher_share > 0:
        soft = F.log_softmax(student / arm.temperature, -1)
        target = F.log_softmax(teacher / arm.temperature, -1)
        distance = F.kl_div(soft, target, reduction="batchmean", log_target=True)
        value = value + arm.teacher_share * arm.temperature**2 * distance
    if arm.teacher_share < 1:
        value = value + (1 - arm.teacher_share) * F.cross_entropy(student, labels)
    return value


def feature_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared distance of unit vectors, 0 to 4. Both: [documents, 2, teacher's hidden]."""
    own, target = F.normalize(student.float(), dim=-1), F.normalize(teacher.float(), dim=-1)
    return (own - target).square().sum(-1).mean()
