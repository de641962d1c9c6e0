"""Students: their loss, where they begin, how arms are compared, and the stage on tiny models."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import given
from hypothesis import strategies as st
from test_teacher import make_encoder

from inferlab.data.documents import Documents
from inferlab.distillation.comparison import paired_difference
from inferlab.distillation.scored import Scored, load_labels, save_scored
from inferlab.distillation.students import (
    Arm,
    StudentParams,
    feature_loss,
    logit_loss,
    make_lesson,
    new_student,
    train_student,
)
from inferlab.distillation.study import make_arms
from inferlab.distillation.training import TrainingParams, predict
from inferlab.errors import InferlabError
from inferlab.models.encoder import TextClassifier, load_classifier, new_classifier, save_classifier
from inferlab.store import load_tensors, read_json
from stages import distill

LABELS = ("sky", "sport")
SETTINGS = TrainingParams(epochs=2.0, batch=8, learning_rate=0.01, warmup=0.1, weight_decay=0.0)
SMALL = StudentParams(hidden=8, heads=2, intermediate=16, max_tokens=6, training=SETTINGS)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> TextClassifier:
    """A tiny classifier with random weights."""
    return new_classifier(make_encoder(tmp_path_factory.mktemp("encoder")), 2, seed=0).eval()


def scored(teacher: TextClassifier, count: int, seed: int) -> Scored:
    """Random documents with a mark that tells their label, and a teacher that knows it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 13, (count, 6), dtype=torch.int32, generator=generator)
    tokens[:, 0] = 2
    labels = (tokens == 7).any(1).long()
    logits = 4 * F.one_hot(labels, 2) + torch.randn(count, 2, generator=generator)
    features = torch.randn(count, 2, teacher.shape.hidden, generator=generator)
    return Scored(Documents(tokens, labels), logits, features)


def test_logit_loss_by_hand() -> None:
    student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2 * np.log(3.0), 0.0]])
    labels = torch.tensor([1])
    # At T = 2 the teacher says 3/4 and 1/4, the student one half each.
    distance = 0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)
    assert float(logit_loss(student, teacher, labels, Arm("kl", 1.0, 2.0))) == pytest.approx(
        4 * distance, rel=1e-5
    )
    combined = logit_loss(student, teacher, labels, Arm("combined", 0.5, 2.0))
    assert float(combined) == pytest.approx(2 * distance + 0.5 * np.log(2), rel=1e-5)
    plain = logit_loss(student, teacher, labels, Arm("ce"))
    assert float(plain) == pytest.approx(np.log(2), rel=1e-5)


def test_squared_temperature_keeps_the_gradient_near_that_of_matching_logits() -> None:
    """Hinton et al., section 2.1: for a high temperature, (student − teacher) / labels each."""
    torch.manual_seed(0)
    student = torch.randn(4, 5, requires_grad=True)
    teacher = torch.randn(4, 5)
    logit_loss(student, teacher, torch.zeros(4).long(), Arm("kl", 1.0, 1000.0)).backward()
    gaps = student.detach() - teacher
    centred = gaps - gaps.mean(1, keepdim=True)
    assert torch.allclose(student.grad, centred / 5 / 4, atol=1e-3)


@given(st.floats(0.5, 20.0), st.integers(0, 5))
def test_a_student_like_its_teacher_has_no_loss(temperature: float, seed: int) -> None:
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    loss = logit_loss(logits, logits, torch.zeros(3).long(), Arm("kl", 1.0, temperature))
    assert abs(float(loss)) < 1e-3


def test_features_are_compared_by_direction_only() -> None:
    one = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    assert float(feature_loss(one, 3 * one)) == 0
    assert float(feature_loss(one, -one)) == 4


def test_projected_embeddings_keep_the_geometry(teacher: TextClassifier) -> None:
    """With as many directions as the teacher has, distances are the same but for one scale."""
    material = scored(teacher, 4, 0)
    whole = StudentParams(hidden=16, heads=2, intermediate=16, max_tokens=6, training=SETTINGS)
    words = make_lesson(teacher, material, material, whole).embeddings["words"]
    ratio = torch.cdist(words, words) / torch.cdist(teacher.words.weight, teacher.words.weight)
    off_diagonal = ratio[~torch.eye(len(ratio), dtype=torch.bool)]
    assert torch.allclose(off_diagonal, off_diagonal.mean(), rtol=1e-3)


def test_students_of_one_seed_differ_in_their_embeddings_only(teacher: TextClassifier) -> None:
    lesson = make_lesson(teacher, scored(teacher, 4, 0), scored(teacher, 4, 1), SMALL)
    ours, fresh = (new_student(lesson, SMALL, fresh, seed=3) for fresh in (False, True))
    different = {
        name
        for (name, one), (_, other) in zip(
            ours.named_parameters(), fresh.named_parameters(), strict=True
        )
        if not torch.equal(one, other)
    }
    assert different == {"words.weight", "positions.weight", "types.weight"}
    assert torch.equal(ours.words.weight, lesson.embeddings["words"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 32}, r"student.hidden must be at most the teacher's 16; got 32"),
        ({"max_tokens": 7}, r"student.max_tokens must be at most the teacher's 6; got 7"),
    ],
)
def test_a_student_does_not_exceed_its_teacher(
    teacher: TextClassifier, change: dict[str, int], message: str
) -> None:
    sizes = {"hidden": 8, "heads": 2, "intermediate": 16, "max_tokens": 6, "training": SETTINGS}
    material = scored(teacher, 4, 0)
    with pytest.raises(InferlabError, match=message):
        make_lesson(teacher, material, material, StudentParams(**(sizes | change)))


@pytest.mark.parametrize("arm", [Arm("ce"), Arm("kl", 1.0, 2.0), Arm("all", 0.5, 2.0, 1.0)])
def test_a_student_learns_in_every_arm(teacher: TextClassifier, arm: Arm) -> None:
    lesson = make_lesson(teacher, scored(teacher, 128, 0), scored(teacher, 64, 1), SMALL)
    longer = TrainingParams(epochs=10, batch=16, learning_rate=0.02, warmup=0.1, weight_decay=0)
    params = StudentParams(hidden=8, heads=2, intermediate=16, max_tokens=6, training=longer)
    student = train_student(arm, lesson, params, seed=0)
    labels = scored(teacher, 64, 1).documents.labels
    assert (student.logits.argmax(1) == labels).double().mean() > 0.9
    assert torch.equal(student.logits, train_student(arm, lesson, params, seed=0).logits)


def test_paired_difference_of_equal_arms_is_nothing() -> None:
    same = np.random.default_rng(0).integers(2, size=(3, 50)).astype(float)
    gap = paired_difference(same, same, seed=0)
    assert (gap.mean, gap.low, gap.high) == (0, 0, 0)


def test_interval_over_documents_is_the_normal_one() -> None:
    """Seeds that agree leave the documents' spread: ± 1.96 standard errors of the mean gap."""
    one = np.tile(np.random.default_rng(0).integers(2, size=400).astype(float), (3, 1))
    gap = paired_difference(one, np.zeros_like(one), seed=0)
    half = 1.96 * one[0].std() / np.sqrt(400)
    assert gap.mean == one.mean()
    assert gap.high - gap.mean == pytest.approx(half, rel=0.1)
    assert gap.mean - gap.low == pytest.approx(half, rel=0.1)


def test_interval_widens_when_seeds_disagree() -> None:
    agree = np.tile(np.repeat([0.0, 1.0], 200), (4, 1))
    differ = np.stack([np.zeros(400), np.zeros(400), np.ones(400), np.ones(400)])
    narrow, wide = (paired_difference(one, np.zeros_like(one), 0) for one in (agree, differ))
    assert narrow.mean == wide.mean == 0.5
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)


def parameters() -> dict:
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["run"]["threads"] = 1
    content["distill"] |= {"temperatures": [1.0, 2.0], "seeds": 2}
    content["distill"]["student"] |= {
        "hidden": 8,
        "heads": 2,
        "intermediate": 16,
        "max_tokens": 6,
        "training": {"epochs": 2.0, "batch": 16, "learning_rate": 0.02, "warmup": 0.1}
        | {"weight_decay": 0.0},
    }
    return content


@pytest.fixture
def project(workspace: Path, teacher: TextClassifier, tmp_path: Path) -> dict:
    """The current folder holds a teacher and its logits; returns the parameters written there."""
    content = parameters()
    Path("params.yaml").write_text(yaml.safe_dump(content))
    encoder = make_encoder(tmp_path / "encoder")
    Path("models/teacher").mkdir(parents=True)
    save_classifier(Path("models/teacher"), teacher, LABELS, encoder)
    Path("data/teacher_logits").mkdir(parents=True)
    splits = {"train": scored(teacher, 64, 0), "test": scored(teacher, 40, 1)}
    save_scored(Path("data/teacher_logits"), splits, LABELS)
    return content


@pytest.mark.smoke
def test_stage_distill(project: dict) -> None:
    distill.main()
    found = read_json(Path("metrics/distill.json"))
    arms = ("ce", "kl_t1", "kl_t2", "combined_t1", "combined_t2", "features_t2", "ce_fresh")
    assert {f"{arm}_accuracy_{what}" for arm in arms for what in ("mean", "std")} <= set(found)
    assert found["student_parameters"] < found["teacher_parameters"]
    assert Path("plots/distill/arms.csv").read_text().count("\n") == 8
    assert Path("plots/distill/temperatures.png").stat().st_size > 0
    answers = load_tensors(Path("data/student_logits/test.safetensors"))
    student, labels = load_classifier(Path("models/student"))
    assert labels == load_labels(Path("data/student_logits")) == LABELS
    tokens = load_tensors(Path("data/teacher_logits/test.safetensors"))["tokens"]
    assert answers["logits"].shape == (2, 40, 2)
    assert torch.allclose(predict(student, tokens), answers["logits"][0], atol=0.02)
    timing = read_json(Path("metrics/timing/distill.json"))
    assert timing["teacher_latency_ms_batch_32"] > 0


@pytest.mark.smoke
def test_stage_distill_refuses_other_labels_and_unknown_arms(project: dict) -> None:
    project["distill"]["kept"] = "kl_t3"
    Path("params.yaml").write_text(yaml.safe_dump(project))
    with pytest.raises(SystemExit, match=r"distill.kept must be one of ce, .*; got 'kl_t3'"):
        distill.main()
    project["distill"]["kept"] = "ce"
    Path("params.yaml").write_text(yaml.safe_dump(project))
    Path("data/teacher_logits/manifest.json").write_text('{"labels": ["sky", "sea"]}')
    with pytest.raises(SystemExit, match="teacher has 2, the student 2, and 'sea' is known to"):
        distill.main()
    assert not Path("models/student").exists()


def test_arms_are_those_of_the_study(workspace: Path) -> None:
    from inferlab import params as sections
    from inferlab.distillation.study import DistillParams

    arms = make_arms(sections.load("distill", DistillParams))
    assert [arm.name for arm in arms if arm.teacher_share == 1 and not arm.fresh] == [
        *(f"kl_t{temperature}" for temperature in (1, 2, 5, 10)),
        "features_t2",
    ]
    assert {arm.temperature for arm in arms if arm.teacher_share == 0.5} == {1, 2, 5, 10}
