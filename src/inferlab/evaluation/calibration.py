"""Whether a classifier's confidence can be believed, and the one number that mends it.

Guo et al. 2017, "On Calibration of Modern Neural Networks" (arXiv 1706.04599): expected calibration
error (section 2) and temperature scaling (section 4.2).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from scipy.stats import rankdata

from inferlab.errors import InferlabError

Floats = NDArray[np.float64]
LOWEST, HIGHEST = 0.05, 20.0
"""Temperatures are searched between these."""


@dataclass(frozen=True)
class Bin:
    """Answers of like confidence: how many, their mean confidence and their accuracy."""

    count: int
    confidence: float
    accuracy: float


def top_probability(logits: Floats, temperature: float = 1.0) -> Floats:
    """The largest probability [documents] of logits [documents, labels] over a temperature."""
    return np.exp(log_softmax(logits / temperature, axis=1).max(axis=1))


def reliability(confidence: Floats, right: NDArray[np.bool_], bins: int) -> list[Bin]:
    """The bins of equal width between 0 and 1 that hold any answer. Both inputs: [documents].

    Raises InferlabError when the two differ in length or there is nothing to bin.
    """
    if len(confidence) != len(right) or not len(right):
        raise InferlabError(
            f"confidence and right must be of one length above 0; got {len(confidence)} and "
            f"{len(right)}"
        )
    return list(_filled_bins(confidence, right, bins))


def expected_calibration_error(confidence: Floats, right: NDArray[np.bool_], bins: int) -> float:
    """Mean distance of confidence and accuracy over the bins, each weighed by its answers.

    Above 0 even for a perfect classifier, by chance, and the more so the fewer answers a bin has.
    """
    found = reliability(confidence, right, bins)
    gaps = sum(one.count * abs(one.accuracy - one.confidence) for one in found)
    return float(gaps / len(right))


def fit_temperature(logits: Floats, labels: NDArray[np.int64]) -> float:
    """The temperature at which logits [documents, labels] make `labels` [documents] likeliest.

    Above 1 for a classifier that is too sure of itself. The order of the labels stays.
    """
    rows = np.arange(len(labels))

    def loss(log_temperature: float) -> float:
        scaled = log_softmax(logits / np.exp(log_temperature), axis=1)
        return float(-scaled[rows, labels].mean())

    bounds = (np.log(LOWEST), np.log(HIGHEST))
    return float(np.exp(minimize_scalar(loss, bounds=bounds, method="bounded").x))


def auroc(confidence: Floats, right: NDArray[np.bool_]) -> float:
    """The probability that a right answer has more confidence than a wrong one; ties count half.

    0.5 when all answers are right or all are wrong.
    """
    wins, losses = int(right.sum()), int((~right).sum())
    if not wins or not losses:
        return 0.5
    above = rankdata(confidence)[right].sum() - wins * (wins + 1) / 2
    return float(above / (wins * losses))


def _filled_bins(confidence: Floats, right: NDArray[np.bool_], bins: int) -> Iterator[Bin]:
    places = np.minimum((confidence * bins).astype(int), bins - 1)
    counts = np.bincount(places, minlength=bins)
    sums = np.bincount(places, weights=confidence, minlength=bins)
    hits = np.bincount(places, weights=right, minlength=bins)
    for place in np.flatnonzero(counts):
        count = int(counts[place])
        yield Bin(count, float(sums[place] / count), float(hits[place] / count))
