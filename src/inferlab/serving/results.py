"""From the outcomes of all rounds to the metrics of a variant and the tables along the axes.

Every figure is computed in each round on its own; what is reported is the median over the rounds,
and beside it the lowest and the highest.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from inferlab.serving import metrics
from inferlab.serving.experiment import (
    Axis,
    Outcomes,
    Put,
    ServeBenchmarkParams,
    along,
    bursts,
)
from inferlab.serving.load import ErrorKind, Outcome

BANDED = ("output_tokens_per_s", "ttft_ms_p50", "tpot_ms_p50", "ttft_ms_p95", "tpot_ms_p95")
PER_CONCURRENCY = ("output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p95", "tpot_ms_p50")


def variant_metrics(
    outcomes: Outcomes, variant: str, params: ServeBenchmarkParams
) -> dict[str, float]:
    """The metrics file of one variant.

    `…_cN` are figures at concurrency N, `output_tokens_per_s_cN_spread` is (highest − lowest) /
    median over the rounds. `prefill_tokens_per_s` comes from the burst `prefill`;
    `decode_tokens_per_s` from the burst `decode`, over the time in which the most requests,
    `decode_concurrency`, are past their first token. `operating_concurrency` is the highest one
    that keeps the objective, 0 if none does, and `goodput_requests_per_s` is the goodput there.
    """
    values: dict[str, float] = {}
    operating, goodput = 0, 0.0
    for put in along("concurrency", params):
        rounds = _figures(outcomes[variant, put], put, params)
        n = put.load.concurrency
        values |= {f"{name}_c{n}": _median(rounds, name) for name in PER_CONCURRENCY}
        values[f"output_tokens_per_s_c{n}_spread"] = _spread(rounds, "output_tokens_per_s")
        if _median(rounds, "share_within") >= params.objective.share:
            operating, goodput = n, _median(rounds, "goodput_requests_per_s")
    prompts, wave = bursts(params)
    prefill = [metrics.prefill_tokens_per_s(one) for one in outcomes[variant, prompts]]
    decode = [metrics.saturated_decode(one) for one in outcomes[variant, wave]]
    return {
        **values,
        "prefill_tokens_per_s": float(np.median(prefill)),
        "decode_tokens_per_s": float(np.median([rate for rate, _ in decode])),
        "decode_concurrency": min(requests for _, requests in decode),
        "operating_concurrency": operating,
        "goodput_requests_per_s": goodput,
        "failed_requests": _failures(outcomes, variant).total(),
    }


def axis_table(
    axis: Axis, outcomes: Outcomes, params: ServeBenchmarkParams
) -> list[dict[str, Any]]:
    """One row for each variant and point of an axis: medians over rounds, and bands."""
    return [
        {
            "variant": variant,
            axis: getattr(put.load, axis),
            **_row(outcomes[variant, put], put, params),
        }
        for variant in params.variants
        for put in along(axis, params)
    ]


def failure_table(outcomes: Outcomes, variants: Sequence[str]) -> list[dict[str, Any]]:
    """Requests by variant and kind of error, all kinds named."""
    return [
        {"variant": variant, "error": kind, "requests": _failures(outcomes, variant)[kind]}
        for variant in variants
        for kind in get_args(ErrorKind)
    ]


def _row(
    rounds: Sequence[Sequence[Outcome]], put: Put, params: ServeBenchmarkParams
) -> dict[str, float]:
    figures = _figures(rounds, put, params)
    bands = {
        f"{name}_{edge}": limit(one[name] for one in figures)
        for name in BANDED
        for edge, limit in (("min", min), ("max", max))
    }
    return {
        "rounds": len(rounds),
        "requests": sum(len(one) for one in rounds),
        "failed_requests": sum(metrics.failures(one).total() for one in rounds),
        **{name: _median(figures, name) for name in figures[0]},
        **bands,
    }


def _figures(
    rounds: Sequence[Sequence[Outcome]], put: Put, params: ServeBenchmarkParams
) -> list[dict[str, float]]:
    """All figures of each round."""
    return [
        {
            **metrics.summary(outcomes, put.clients),
            "share_within": metrics.share_within(outcomes, params.objective),
            "goodput_requests_per_s": metrics.goodput(outcomes, params.objective, put.clients),
        }
        for outcomes in rounds
    ]


def _median(figures: Sequence[Mapping[str, float]], name: str) -> float:
    return float(np.median([one[name] for one in figures]))


def _spread(figures: Sequence[Mapping[str, float]], name: str) -> float:
    values = [one[name] for one in figures]
    return float(np.ptp(values) / np.median(values))


def _failures(outcomes: Outcomes, variant: str) -> Counter[str]:
    """By kind, over all loads and rounds."""
    return sum(
        (
            metrics.failures(one)
            for (name, _), rounds in outcomes.items()
            if name == variant
            for one in rounds
        ),
        Counter[str](),
    )
