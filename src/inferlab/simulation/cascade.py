"""A small model first, a large one where the small one is not sure: accuracy against cost.

The rule on the top probability is that of Chen et al. 2023, "FrugalGPT" (arXiv 2305.05176), section
3, with the model's own confidence as the score.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inferlab.errors import InferlabError

EVERYTHING = 1.0
"""The threshold at which only absolute certainty is not escalated."""


@dataclass(frozen=True)
class Answers:
    """What two models say to the same questions; all [questions].

    confidence: the small model's, 0 to 1; the others: whether each model is right.
    """

    confidence: NDArray[np.float64]
    small_right: NDArray[np.bool_]
    large_right: NDArray[np.bool_]

    def __post_init__(self) -> None:
        lengths = {len(self.confidence), len(self.small_right), len(self.large_right)}
        if len(lengths) > 1 or 0 in lengths:
            raise InferlabError(
                "a cascade needs one answer of each model to every question; got "
                f"{len(self.confidence)} confidences, {len(self.small_right)} answers of the small "
                f"model and {len(self.large_right)} of the large one"
            )

    def __getitem__(self, rows: NDArray[np.int64]) -> "Answers":
        """The answers to some of the questions."""
        return Answers(self.confidence[rows], self.small_right[rows], self.large_right[rows])

    @property
    def small_accuracy(self) -> float:
        """Share of questions that the small model has right."""
        return float(self.small_right.mean())

    @property
    def large_accuracy(self) -> float:
        """Share of questions that the large model has right."""
        return float(self.large_right.mean())


@dataclass(frozen=True)
class Point:
    """A threshold, the share of questions that it escalates, and the cascade's accuracy."""

    threshold: float
    escalated: float
    accuracy: float

    def cost(self, cost_ratio: float) -> float:
        """Cost over that of asking the large model alone; `cost_ratio`: small over large.

        Every question is asked of the small model, and the escalated ones of the large one as well.
        """
        return cost_ratio + self.escalated


def route(answers: Answers, threshold: float) -> Point:
    """Escalate what has less confidence than `threshold`.

    Raises InferlabError for a threshold outside 0 to 1.
    """
    if not 0 <= threshold <= 1:
        raise InferlabError(f"a threshold must be between 0 and 1; got {threshold:g}")
    escalated = answers.confidence < threshold
    right = np.where(escalated, answers.large_right, answers.small_right)
    return Point(threshold, float(escalated.mean()), float(right.mean()))


def choose_threshold(answers: Answers, thresholds: Sequence[float], accuracy_loss: float) -> float:
    """The cheapest threshold that is at most `accuracy_loss` worse than the large model alone.

    EVERYTHING when none is.
    """
    least = answers.large_accuracy - accuracy_loss
    fitting = [one for one in sorted(thresholds) if route(answers, one).accuracy >= least]
    return fitting[0] if fitting else EVERYTHING


def random_accuracy(answers: Answers, escalated: float) -> float:
    """What escalating the same share at random comes to: a straight line between the models."""
    gain = answers.large_accuracy - answers.small_accuracy
    return answers.small_accuracy + escalated * gain


def oracle_accuracy(answers: Answers, escalated: float) -> float:
    """The best that a share buys: only what the large model alone has right is escalated.

    It knows the truth, and it may escalate less than the share.
    """
    mended = float((answers.large_right & ~answers.small_right).mean())
    return answers.small_accuracy + min(escalated, mended)
