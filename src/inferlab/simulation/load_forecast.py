"""Forecasts of the offered load by scikit-learn: a regression on lags and the time of day.

What is offered is forecast, dropped requests included: what is served depends on the fleet, and a
fleet that is too small would forecast its own smallness.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from inferlab.errors import InferlabError, lookup
from inferlab.simulation.load_day import MINUTES

Floats = NDArray[np.float64]
HARMONICS = 12
"""Waves of the time of day: the shortest lasts two hours."""
FEWEST_DAYS = 2
"""Of history: one season, and one day to learn from."""
LAGS = 5
RECENT = 15
AROUND = 5
"""Minutes before now, in the mean of the recent past, and around the target a day before."""

MODELS: dict[str, Callable[[int], Any]] = {
    "ridge": lambda seed: make_pipeline(StandardScaler(), Ridge(alpha=1.0)),
    "boosting": lambda seed: HistGradientBoostingRegressor(max_iter=80, random_state=seed),
}


def forecast(history: Floats, day: Floats, ahead: int, model: str, seed: int) -> Floats:
    """For each minute m of `day`, the requests of minute m + `ahead`, known up to m − 1 [MINUTES].

    Learns from `history` [minutes] alone, which lies right before `day` [MINUTES]. Raises
    InferlabError for an unknown model and for less history than one season and a day to learn from.
    """
    build = lookup(MODELS, model, "forecasting model")
    if len(history) < FEWEST_DAYS * MINUTES:
        raise InferlabError(
            f"a forecast with a season of 1 day needs at least {FEWEST_DAYS} days of history; got "
            f"{len(history) / MINUTES:g} (autoscaling.load.history_days)"
        )
    whole = np.concatenate([history, day])
    features = _features(whole, ahead)
    first = MINUTES + RECENT
    learned = np.arange(first, len(history) - ahead)
    with threadpool_limits(
        1
    ):  # as quick; boosting's threads wait 30 times as long on a busy machine
        fitted = build(seed).fit(features[learned], whole[learned + ahead])
        found = fitted.predict(features[len(history) :])
    return np.maximum(found, 0.0)


def last_value(history: Floats, day: Floats) -> Floats:
    """The forecast to beat: what came in the last minute [MINUTES]."""
    return np.concatenate([history[-1:], day[:-1]])


def mean_error(forecasts: Floats, day: Floats, ahead: int) -> float:
    """Mean absolute error over the mean load, of the minutes whose outcome is within the day."""
    outcome = day[ahead:]
    return float(np.abs(forecasts[: len(outcome)] - outcome).mean() / outcome.mean())


def _features(counts: Floats, ahead: int) -> Floats:
    """What is known at the start of each minute [minutes, features]; wraps where there is none."""
    minutes = np.arange(len(counts))
    angles = (
        2 * np.pi * np.outer((minutes + ahead) % MINUTES, np.arange(1, HARMONICS + 1)) / MINUTES
    )
    recent = np.stack([np.roll(counts, lag) for lag in range(1, RECENT + 1)], 1)
    before = [np.roll(counts, MINUTES - ahead + shift) for shift in range(-AROUND, AROUND + 1)]
    yesterday = np.stack(before, 1).mean(1)
    yesterday_then = np.stack(
        [np.roll(counts, MINUTES + lag) for lag in range(1, RECENT + 1)], 1
    ).mean(1)
    return np.column_stack(
        [
            np.sin(angles),
            np.cos(angles),
            recent[:, :LAGS],
            recent.mean(1),
            yesterday,
            yesterday_then,
        ]
    )
