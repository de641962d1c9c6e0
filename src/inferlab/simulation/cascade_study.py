"""33.23: the student and its teacher as a cascade, its threshold chosen on one half of the test."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from inferlab.evaluation.calibration import (
    auroc,
    expected_calibration_error,
    fit_temperature,
    reliability,
)
from inferlab.params import section
from inferlab.simulation.cascade import (
    Answers,
    choose_threshold,
    oracle_accuracy,
    random_accuracy,
    route,
)
from inferlab.simulation.cascade_pair import PairParams
from inferlab.simulation.cascade_scores import Scores

KINDS = ("raw", "scaled")
Row = dict[str, Any]


@section
class CascadeParams:
    """The section `cascade`."""

    thresholds: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(min_length=1)]
    accuracy_loss: Annotated[float, Field(ge=0, lt=1)]
    halves: Annotated[int, Field(ge=2)]
    bins: Annotated[int, Field(ge=1)]
    latency_batch: Annotated[int, Field(ge=1)]
    cost_ratio: Annotated[float, Field(gt=0)] | None
    pair: PairParams


def judge(scores: Scores, params: CascadeParams, seed: int) -> list[Row]:
    """One row a student, random half, kind of confidence and threshold, on the half not chosen on.

    `chosen` marks the threshold that the other half leads to, in a row of its own.
    """
    return list(_judged(scores, params, seed))


def _judged(scores: Scores, params: CascadeParams, seed: int) -> Iterator[Row]:
    random = np.random.default_rng(seed)
    count = len(scores.labels)
    for half in range(params.halves):
        order = random.permutation(count)
        seen, unseen = order[: count // 2], order[count // 2 :]
        for student, logits in enumerate(scores.student):
            fitted = fit_temperature(logits[seen], scores.labels[seen])
            for kind, temperature in zip(KINDS, (1.0, fitted), strict=True):
                answers = scores.answers(student, temperature)
                judged = answers[unseen]
                case = {
                    "confidence": kind,
                    "student": student,
                    "half": half,
                    "temperature": temperature,
                    "ece": expected_calibration_error(
                        judged.confidence, judged.small_right, params.bins
                    ),
                }
                picked = choose_threshold(answers[seen], params.thresholds, params.accuracy_loss)
                yield case | {"chosen": 1} | _row(judged, picked)
                for threshold in params.thresholds:
                    yield case | {"chosen": 0} | _row(judged, threshold)


def _row(answers: Answers, threshold: float) -> Row:
    point = route(answers, threshold)
    return {
        "threshold": threshold,
        "escalated": point.escalated,
        "accuracy": point.accuracy,
        "small_accuracy": answers.small_accuracy,
        "large_accuracy": answers.large_accuracy,
        "random_accuracy": random_accuracy(answers, point.escalated),
        "oracle_accuracy": oracle_accuracy(answers, point.escalated),
    }


def curve_table(rows: Sequence[Row], thresholds: Sequence[float], cost_ratio: float) -> list[Row]:
    """Means and spread over students and halves, by kind of confidence and threshold."""
    return [
        {"confidence": kind, "threshold": threshold}
        | _summary(
            [
                row
                for row in rows
                if (row["chosen"], row["confidence"], row["threshold"]) == (0, kind, threshold)
            ],
            cost_ratio,
        )
        for kind in KINDS
        for threshold in thresholds
    ]


def choice_table(rows: Sequence[Row], cost_ratio: float, accuracy_loss: float) -> list[Row]:
    """What the chosen thresholds come to on the other half, by kind of confidence.

    `promise_kept`: share of halves in which the loss to the teacher is at most the one allowed.
    """
    table = []
    for kind in KINDS:
        own = [row for row in rows if row["chosen"] and row["confidence"] == kind]
        losses = [row["large_accuracy"] - row["accuracy"] for row in own]
        table.append(
            {"confidence": kind}
            | {name: _mean(own, name) for name in ("threshold", "temperature", "ece")}
            | _summary(own, cost_ratio)
            | {
                "loss_to_teacher": float(np.mean(losses)),
                "loss_std": float(np.std(losses, ddof=1)),
                "promise_kept": float(np.mean([loss <= accuracy_loss for loss in losses])),
            }
        )
    return table


def reliability_table(scores: Scores, rows: Sequence[Row], bins: int) -> list[Row]:
    """Confidence and accuracy by bin, of all students on the whole split, before and after scaling.

    The scaled one has the mean temperature of its halves.
    """
    table = []
    for kind in KINDS:
        temperature = _mean([row for row in rows if row["confidence"] == kind], "temperature")
        found = [scores.answers(seed, temperature) for seed in range(len(scores.student))]
        confidence = np.concatenate([one.confidence for one in found])
        right = np.concatenate([one.small_right for one in found])
        table += [
            {
                "confidence": kind,
                "answers": one.count,
                "mean_confidence": one.confidence,
                "accuracy": one.accuracy,
            }
            for one in reliability(confidence, right, bins)
        ]
    return table


def metrics(scores: Scores, choices: Sequence[Row], pair: Sequence[Row]) -> dict[str, float]:
    """The study's metrics; `pair`: what is chosen for the simulated pair, shown case first."""
    raw, scaled = choices
    found = [scores.answers(seed, 1.0) for seed in range(len(scores.student))]
    values = {
        "student_accuracy": float(np.mean([one.small_accuracy for one in found])),
        "teacher_accuracy": found[0].large_accuracy,
        "student_auroc": float(np.mean([auroc(one.confidence, one.small_right) for one in found])),
        "ece_before": raw["ece"],
        "ece_after": scaled["ece"],
        "temperature": scaled["temperature"],
    }
    for name in ("threshold", "escalated", "cost_vs_teacher", "random_accuracy", "oracle_accuracy"):
        values[name] = scaled[name]
    values["cascade_accuracy"] = scaled["accuracy"]
    values["cascade_accuracy_std"] = scaled["accuracy_std"]
    values["pair_escalated"] = pair[0]["escalated"]
    values["pair_cost_vs_large"] = pair[0]["cost_vs_large"]
    return values


def _summary(rows: Sequence[Row], cost_ratio: float) -> Row:
    spread = np.std([row["accuracy"] for row in rows], ddof=1) if len(rows) > 1 else 0.0
    means = {name: _mean(rows, name) for name in ("escalated", "accuracy")}
    bounds = {name: _mean(rows, name) for name in ("random_accuracy", "oracle_accuracy")}
    cost = {"cost_vs_teacher": cost_ratio + means["escalated"]}
    return means | {"accuracy_std": float(spread)} | cost | bounds


def _mean(rows: Sequence[Row], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))
