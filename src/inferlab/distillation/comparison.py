"""Arms of the study compared: means and spread over seeds, paired differences with intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from inferlab.distillation.students import Arm
from inferlab.distillation.training import accuracy, macro_f1

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """A difference of two accuracies with its 95 % interval."""

    mean: float
    low: float
    high: float


def right(logits: Tensor, labels: Tensor) -> np.ndarray:
    """1 where a document's largest logit is its label's: [seeds, documents].

    logits: [seeds, documents, labels].
    """
    return (logits.argmax(-1) == labels).double().numpy()


def paired_difference(one: np.ndarray, other: np.ndarray, seed: int) -> Difference:
    """Mean of `one` − `other`, both [seeds, documents], interval by bootstrap over both at once.

    Seeds and documents are drawn with replacement, as crossed factors, so that the interval covers
    another training run and another test set. Three seeds make its share of the first a rough one.
    """
    random = np.random.default_rng(seed)
    gaps = one - other
    seeds, documents = gaps.shape
    weights = random.multinomial(documents, np.full(documents, 1 / documents), RESAMPLES)
    by_seed = weights @ gaps.T / documents
    drawn = random.integers(seeds, size=(RESAMPLES, seeds))
    means = np.take_along_axis(by_seed, drawn, axis=1).mean(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(float(gaps.mean()), float(low), float(high))


def arm_table(
    arms: Sequence[Arm], logits: dict[str, Tensor], labels: Tensor, seed: int
) -> list[dict[str, Any]]:
    """One row an arm; logits: [seeds, documents, labels] each. Differences are to the arm `ce`."""
    baseline = right(logits["ce"], labels)
    rows = []
    for arm in arms:
        accuracies = np.array([accuracy(one, labels) for one in logits[arm.name]])
        scores = np.array([macro_f1(one, labels) for one in logits[arm.name]])
        gap = paired_difference(right(logits[arm.name], labels), baseline, seed)
        rows.append(
            {
                "arm": arm.name,
                "teacher_share": arm.teacher_share,
                "temperature": arm.temperature,
                "accuracy_mean": accuracies.mean(),
                "accuracy_std": accuracies.std(ddof=1) if len(accuracies) > 1 else 0.0,
                "macro_f1_mean": scores.mean(),
                "minus_ce": gap.mean,
                "minus_ce_low": gap.low,
                "minus_ce_high": gap.high,
            }
        )
    return rows
