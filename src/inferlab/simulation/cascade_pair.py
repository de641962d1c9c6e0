"""A 7B and a 70B model as a cascade: real prices and latencies, answers drawn from assumptions.

Each model m has right what lies below its ability: it answers rightly when u_m > −Φ⁻¹(accuracy),
with u_m normal and, since hard questions are hard for both, correlated between the models. The
small model sees a noisy version of its own u and states the probability of being right that follows
from it, so it is calibrated; how noisy is a parameter.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from scipy.stats import norm

from inferlab.economics.cost import Workload
from inferlab.economics.prices import ApiPrice, api_price
from inferlab.errors import InferlabError
from inferlab.evaluation.calibration import auroc
from inferlab.params import section
from inferlab.simulation.cascade import (
    Answers,
    choose_threshold,
    oracle_accuracy,
    random_accuracy,
    route,
)

THOUSAND = 1000
Share = Annotated[float, Field(ge=0, le=1)]
Inside = Annotated[float, Field(gt=0, lt=1)]
Tokens = Annotated[int, Field(ge=1)]


@section
class PairedModel:
    """One model of the simulated pair. ttft_ms: published milliseconds by input tokens, rising."""

    model: str
    accuracy: Inside
    ttft_ms: Annotated[
        tuple[tuple[Tokens, Annotated[float, Field(gt=0)]], ...], Field(min_length=1)
    ]

    def __post_init__(self) -> None:
        tokens = [point[0] for point in self.ttft_ms]
        if tokens != sorted(set(tokens)):
            raise ValueError(f"ttft_ms must be sorted by input tokens; got {tokens}")


@section
class PairParams:
    """The block `cascade.pair`."""

    small: PairedModel
    large: PairedModel
    input_tokens: Tokens
    output_tokens: Tokens
    questions: Annotated[int, Field(ge=2)]
    seeds: Annotated[int, Field(ge=1)]
    correlations: Annotated[tuple[Share, ...], Field(min_length=1)]
    signals: Annotated[tuple[Inside, ...], Field(min_length=1)]
    usd_per_mtok: dict[str, tuple[float, float]]
    price_date: datetime.date


@dataclass(frozen=True)
class PairCosts:
    """US dollars of a request and milliseconds to its first token, of the small and large model."""

    small: ApiPrice
    large: ApiPrice
    small_usd: float
    large_usd: float
    small_ttft_ms: float
    large_ttft_ms: float

    @property
    def ratio(self) -> float:
        """Cost of the small model over that of the large one."""
        return self.small_usd / self.large_usd


def pair_costs(params: PairParams) -> PairCosts:
    """Prices of the day and interpolated latencies.

    Raises InferlabError for an unknown model, with a suggestion, and for a prompt longer or shorter
    than those that latencies were published for.
    """
    workload = Workload(params.input_tokens, params.output_tokens, peak_to_mean=1.0)
    small, large = (
        api_price(one.model, workload, params.price_date, params.usd_per_mtok)
        for one in (params.small, params.large)
    )
    if large.usd_per_request(workload) <= 0:
        raise InferlabError(f"{large.model} costs nothing; a cascade before it saves nothing")
    return PairCosts(
        small,
        large,
        small.usd_per_request(workload),
        large.usd_per_request(workload),
        _interpolated(params.small, params.input_tokens),
        _interpolated(params.large, params.input_tokens),
    )


def simulate(params: PairParams, correlation: float, signal: float, seed: int) -> Answers:
    """Answers to as many questions as the parameters say.

    correlation: of the two models' u, 0 to 1; signal: share of the variance of what the small model
    sees that is its own u, above 0 and below 1. A seed gives the same questions in every case.
    """
    random = np.random.default_rng(seed)
    common, own, other, noise = random.standard_normal((4, params.questions))
    shared = np.sqrt(correlation) * common
    small, large = (shared + np.sqrt(1 - correlation) * rest for rest in (own, other))
    seen = np.sqrt(signal) * small + np.sqrt(1 - signal) * noise
    limit = norm.ppf(params.small.accuracy)
    confidence = norm.cdf((limit + np.sqrt(signal) * seen) / np.sqrt(1 - signal))
    return Answers(confidence, small > -limit, large > -norm.ppf(params.large.accuracy))


def pair_table(
    params: PairParams,
    costs: PairCosts,
    thresholds: Sequence[float],
    accuracy_loss: float,
    seed: int,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every threshold under every assumption, and the threshold that each assumption leads to.

    The second is chosen on one half of the questions and judged on the other. Means over seeds.
    """
    curve: list[dict[str, Any]] = []
    chosen: list[dict[str, Any]] = []
    for correlation in params.correlations:
        for signal in params.signals:
            case = {"correlation": correlation, "signal": signal}
            drawn = [
                simulate(params, correlation, signal, seed + number)
                for number in range(params.seeds)
            ]
            curve += [case | _mean_row(drawn, [one] * len(drawn), costs) for one in thresholds]
            half = np.arange(params.questions // 2)
            picked = [choose_threshold(one[half], thresholds, accuracy_loss) for one in drawn]
            judged = [one[np.arange(len(half), params.questions)] for one in drawn]
            sureness = [auroc(one.confidence, one.small_right) for one in judged]
            name = f"correlation {correlation:g}, signal {signal:g}"
            row = _mean_row(judged, picked, costs)
            chosen.append({"assumption": name} | case | {"auroc": float(np.mean(sureness))} | row)
    return curve, chosen


def _mean_row(
    drawn: Sequence[Answers], thresholds: Sequence[float], costs: PairCosts
) -> dict[str, float]:
    """One row over seeds, each with its own threshold."""
    points = [route(one, threshold) for one, threshold in zip(drawn, thresholds, strict=True)]
    pairs = list(zip(drawn, points, strict=True))
    accuracies = [point.accuracy for point in points]
    losses = [one.large_accuracy - point.accuracy for one, point in pairs]
    escalated = float(np.mean([point.escalated for point in points]))
    usd = costs.small_usd + escalated * costs.large_usd
    return {
        "threshold": float(np.mean(thresholds)),
        "escalated": escalated,
        "accuracy": float(np.mean(accuracies)),
        "accuracy_std": float(np.std(accuracies, ddof=1)) if len(accuracies) > 1 else 0.0,
        "loss_to_large": float(np.mean(losses)),
        "random_accuracy": float(np.mean([random_accuracy(a, p.escalated) for a, p in pairs])),
        "oracle_accuracy": float(np.mean([oracle_accuracy(a, p.escalated) for a, p in pairs])),
        "usd_per_1000": THOUSAND * usd,
        "cost_vs_large": usd / costs.large_usd,
        "ttft_ms_mean": costs.small_ttft_ms + escalated * costs.large_ttft_ms,
        "ttft_vs_large": costs.small_ttft_ms / costs.large_ttft_ms + escalated,
    }


def _interpolated(model: PairedModel, input_tokens: int) -> float:
    tokens, milliseconds = zip(*model.ttft_ms, strict=True)
    if not tokens[0] <= input_tokens <= tokens[-1]:
        raise InferlabError(
            f"cascade.pair.input_tokens must lie within the published latencies of {model.model}, "
            f"{tokens[0]} to {tokens[-1]}; got {input_tokens}"
        )
    return float(np.interp(input_tokens, tokens, milliseconds))
