"""The data study: what a model learns from generated pairs, and from as many human ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from inferlab.data.tables import Row
from inferlab.data.trivia import CHOICES, four_way
from inferlab.distillation.answers import Learner, Texts, exact_match, token_f1
from inferlab.distillation.generation import Generated, GeneratorParams
from inferlab.distillation.pairs import quality
from inferlab.distillation.training import TrainingParams
from inferlab.errors import InferlabError
from inferlab.params import section
from inferlab.run import progress

SPREAD = ("answer_perplexity", "four_way_accuracy")
"""Scores taken after every seed."""


@section
class DataDistillationParams:
    """The section `data_distillation`."""

    pairs: Annotated[int, Field(ge=2)]
    test_questions: Annotated[int, Field(ge=0)]
    generated: Annotated[int, Field(ge=1)]
    asked: Annotated[int, Field(ge=1)]
    curve: tuple[Annotated[float, Field(gt=0)], ...]
    seeds: Annotated[int, Field(ge=1)]
    trained_blocks: Annotated[int, Field(ge=1)]
    answer_tokens: Annotated[int, Field(ge=1)]
    generator: GeneratorParams
    training: TrainingParams


@dataclass(frozen=True)
class Exam:
    """Held-out human questions: their answers, and four choices a question in a row."""

    rows: list[Row]
    texts: Texts
    choices: Texts
    labels: torch.Tensor


def split_questions(
    rows: Sequence[Row], params: DataDistillationParams, seed: int
) -> tuple[list[Row], list[Row]]:
    """Human pairs to train on, and held-out ones. Raises InferlabError when none would be left."""
    if len(rows) <= params.pairs + CHOICES:
        raise InferlabError(
            f"data_distillation.pairs is {params.pairs}, but there are {len(rows)} questions and "
            f"at least {CHOICES} must be held out (params.yaml: data_distillation.pairs)"
        )
    order = np.random.default_rng(seed).permutation(len(rows))
    shuffled = [rows[place] for place in order]
    rest = shuffled[params.pairs :]
    return shuffled[: params.pairs], rest[: params.test_questions or None]


def make_exam(learner: Learner, rows: list[Row], seed: int) -> Exam:
    """Encode the held-out questions, each with its answer and with four choices."""
    asked = four_way(rows, seed)
    choices = [
        {"question": row["question"], "answer": choice}
        for row in asked
        for choice in row["choices"]
    ]
    labels = torch.tensor([row["label"] for row in asked])
    return Exam(rows, learner.encode(rows), learner.encode(choices), labels)


def training_sets(
    human: list[Row], synthetic: list[Row], params: DataDistillationParams
) -> dict[str, list[Row]]:
    """What each arm is trained on: equal counts, and the curve over synthetic pairs.

    With fewer usable synthetic pairs than human ones all arms take as many as there are.
    """
    count = min(len(human), len(synthetic))
    half = count // 2
    sets = {
        "human": human[:count],
        "synthetic": synthetic[:count],
        "mixture": human[: count - half] + synthetic[:half],
    }
    for share in params.curve:
        size = min(round(share * count), len(synthetic))
        if size and size not in {len(rows) for name, rows in sets.items() if name != "human"}:
            sets[f"synthetic_{size}"] = synthetic[:size]
    return sets


def run_arms(
    learner: Learner,
    sets: dict[str, list[Row]],
    exam: Exam,
    params: DataDistillationParams,
    seed: int,
) -> list[dict[str, Any]]:
    """One row an arm and seed, the untrained model first.

    Greedy answers take longest: only whole sets are asked, and only after the first seed.
    """
    everything = {row["question"]: row for rows in sets.values() for row in rows}
    place_of = {question: place for place, question in enumerate(everything)}
    encoded = learner.encode(list(everything.values()))
    table = [{"arm": "untrained", "pairs": 0, **scores(learner, exam, params, True)}]
    for name, pairs in progress(sets.items(), "arms"):
        texts = encoded.take([place_of[row["question"]] for row in pairs])
        for number in range(params.seeds):
            learner.train(texts, params.training, seed + number)
            answers = number == 0 and not name.startswith("synthetic_")
            found = scores(learner, exam, params, answers)
            table.append({"arm": name, "pairs": len(pairs), **found})
    return table


def scores(
    learner: Learner, exam: Exam, params: DataDistillationParams, answers: bool
) -> dict[str, float]:
    """Answer perplexity and four-way accuracy; exact match and F1 too with `answers`."""
    nats = learner.nats(exam.texts).sum()
    tokens = (exam.texts.ends - exam.texts.starts).sum()
    ranked = learner.nats(exam.choices).view(-1, CHOICES).argmin(1)
    found = {
        "answer_perplexity": float((nats / tokens).exp()),
        "four_way_accuracy": float((ranked == exam.labels).double().mean()),
    }
    if answers:
        said = learner.answer([row["question"] for row in exam.rows], params.answer_tokens)
        both = [(own, row["answer"]) for own, row in zip(said, exam.rows, strict=True)]
        found["exact_match"] = float(np.mean([exact_match(*one) for one in both]))
        found["f1"] = float(np.mean([token_f1(*one) for one in both]))
    return found


def arm_means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds of each arm."""
    table = []
    for name in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == name]
        line: dict[str, Any] = {"arm": name, "pairs": own[0]["pairs"], "seeds": len(own)}
        for key in ("answer_perplexity", "four_way_accuracy", "exact_match", "f1"):
            values = [row[key] for row in own if key in row]
            line[key] = float(np.mean(values)) if values else ""
            if key in SPREAD:
                line[f"{key}_std"] = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        table.append(line)
    return table


def quality_table(human: Sequence[Row], generated: Generated, exam: Exam) -> list[dict[str, Any]]:
    """One row a measure: of the human pairs and of as many synthetic ones."""
    kept = generated.filtered.kept
    count = min(len(human), len(kept))
    sides = {
        "human": (list(human), generated.human_answers),
        "synthetic": (kept, generated.own_answers),
    }
    found = {}
    for side, (rows, said) in sides.items():
        again = [exact_match(own, row["answer"]) for own, row in zip(said, rows, strict=False)]
        found[side] = quality(rows[:count], exam.rows) | {"answered_alike_share": np.mean(again)}
    return [
        {"measure": name, **{side: float(values[name]) for side, values in found.items()}}
        for name in found["human"]
    ]


def summary(table: Sequence[dict[str, Any]], generated: Generated, exam: Exam) -> dict[str, float]:
    """The stage's metrics: main arms, what was kept of what was generated, and the error to expect.

    `four_way_accuracy_se` is of one accuracy over the held-out questions.
    """
    found: dict[str, float] = {}
    for line in table:
        if line["arm"] in ("untrained", "human", "synthetic", "mixture"):
            for key in ("answer_perplexity", "four_way_accuracy", "f1"):
                found[f"{line['arm']}_{key}"] = line[key]
    share = table[0]["four_way_accuracy"]
    found["four_way_accuracy_se"] = float(np.sqrt(share * (1 - share) / len(exam.rows)))
    found["test_questions"] = len(exam.rows)
    found["synthetic_kept"] = len(generated.filtered.kept)
    for reason, count in generated.filtered.rejected.items():
        found[f"rejected_{reason}"] = count
    return found
