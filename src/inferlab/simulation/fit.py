"""Coefficients of a step's cost from measured steps."""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from inferlab.errors import InferlabError

TERMS = ("base", "token", "sequence", "context", "pair")
ROUNDS = 10


@dataclass(frozen=True)
class Fit:
    """`seconds` of each term, and `ratios` [steps] of measured over predicted time."""

    seconds: dict[str, float]
    ratios: np.ndarray

    @property
    def median_error(self) -> float:
        """Median of |measured / predicted − 1|."""
        return float(np.median(np.abs(self.ratios - 1)))

    @property
    def p95_error(self) -> float:
        """95th percentile of |measured / predicted − 1|."""
        return float(np.percentile(np.abs(self.ratios - 1), 95))


def fit(features: np.ndarray, measured: np.ndarray) -> Fit:
    """Non-negative coefficients of `features` [steps, terms] for seconds `measured` [steps].

    Least squares on the error relative to the prediction, repeated as the prediction settles.
    Errors relative to what was measured would pull the fit down: slow steps would weigh less.
    Raises InferlabError with fewer steps than terms, or times that are not positive.
    """
    if len(measured) < features.shape[1]:
        raise InferlabError(
            f"{len(measured)} steps cannot give {features.shape[1]} coefficients; measure longer"
        )
    if not (measured > 0).all():
        raise InferlabError("a measured step took no time; the clock or the log is wrong")
    scale = features.mean(axis=0)
    scale[scale == 0] = 1.0
    predicted = measured
    for _ in range(ROUNDS):
        weights = 1 / predicted
        found, _ = nnls(features / scale * weights[:, None], measured * weights)
        predicted = features @ (found / scale)
    names = TERMS[: features.shape[1]]
    seconds = dict(zip(names, (found / scale).tolist(), strict=True))
    return Fit(seconds, measured / predicted)
