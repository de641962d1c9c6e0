"""One honest table over variants: size, quality with intervals, speed on two engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from scipy import stats

from inferlab.errors import InferlabError
from inferlab.params import section

BASE = "base"


@section
class FormatComparisonParams:
    """The section `format_comparison`."""

    variants: Annotated[tuple[str, ...], Field(min_length=2)]
    served_as: dict[str, str]
    prompt_tokens: Annotated[int, Field(gt=0)]
    new_tokens: Annotated[int, Field(gt=0)]
    rounds: Annotated[int, Field(gt=0)]
    confidence: Annotated[float, Field(gt=0, lt=1)]

    def __post_init__(self) -> None:
        """Raise ValueError when the base is missing or `served_as` names no variant."""
        if BASE not in self.variants:
            raise ValueError(f"variants must hold {BASE!r}, which the others are compared with")
        if unknown := sorted(set(self.served_as) - set(self.variants)):
            raise ValueError(f"served_as names {unknown[0]!r}, which is not among variants")


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds of its interval."""

    value: float
    low: float
    high: float


def perplexity_interval(perplexities: Sequence[float], confidence: float) -> Interval:
    """Token perplexity over windows of one length, with Student's interval of their mean nats.

    `perplexities`: of each window. With equal lengths the whole one is their geometric mean. For
    windows' ratios to another variant's the result is the ratio of the two, paired by window.
    Raises InferlabError for fewer than 2 windows.
    """
    count = len(perplexities)
    if count < 2:
        raise InferlabError(
            f"an interval over {count} held-out windows says nothing; "
            "raise prepare.heldout_windows to 2 or more (params.yaml)"
        )
    nats = np.log(perplexities)
    half = stats.t.ppf((1 + confidence) / 2, count - 1) * stats.sem(nats)
    mean = nats.mean()
    return Interval(*(float(np.exp(value)) for value in (mean, mean - half, mean + half)))


def table(
    params: FormatComparisonParams,
    quality: Mapping[str, dict[str, float]],
    windows: Mapping[str, Sequence[float]],
    speeds: Mapping[str, tuple[float, float]],
    served: Mapping[str, dict[str, float]],
) -> list[dict[str, Any]]:
    """One row a variant, smallest first; a cell is empty where nothing was measured.

    `windows`: the perplexity of each held-out window; `speeds`: (prefill, decode) tokens a second
    in transformers; `served`: the metrics of serve_benchmark by served variant.
    """
    rows = []
    for name in params.variants:
        found, (prefill, decode) = quality[name], speeds[name]
        ratios = np.divide(windows[name], windows[BASE])
        own = perplexity_interval(windows[name], params.confidence)
        ratio = perplexity_interval(ratios.tolist(), params.confidence)
        rows.append(
            {
                "variant": name,
                "model_bytes": int(found["model_bytes"]),
                "bits_per_weight": found["bits_per_weight"],
                "token_perplexity": own.value,
                "token_perplexity_low": own.low,
                "token_perplexity_high": own.high,
                "ratio_to_base": ratio.value,
                "ratio_low": ratio.low,
                "ratio_high": ratio.high,
                **{key: found[key] for key in found if "_accuracy" in key},
                "transformers_prefill_tokens_per_s": prefill,
                "transformers_decode_tokens_per_s": decode,
                **_served_cells(name, params.served_as.get(name), served),
            }
        )
    front = pareto_front([(row["model_bytes"], row["token_perplexity"]) for row in rows])
    for row, on_front in zip(rows, front, strict=True):
        row["pareto"] = int(on_front)
    return sorted(rows, key=lambda row: row["model_bytes"])


def pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Is each point on the front, where less is better? No other is as good in both."""
    return [
        not any(
            other != point and other[0] <= point[0] and other[1] <= point[1] for other in points
        )
        for point in points
    ]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The metrics: each variant's perplexity as a ratio to the base's, and the front's size."""
    ratios = {f"ratio_{row['variant']}": row["ratio_to_base"] for row in rows}
    del ratios[f"ratio_{BASE}"]
    return ratios | {"pareto_variants": sum(row["pareto"] for row in rows)}


def _served_cells(
    name: str, stands_for: str | None, served: Mapping[str, dict[str, float]]
) -> dict[str, Any]:
    """vLLM's speed for one client, from the variant that was served in the same format.

    `vllm_perplexity_ratio`: perplexity as served over the evaluated one, only of a variant that
    was served itself: in the same format speed is alike, quality is not.
    """
    if stands_for is None:
        return {
            "vllm_prefill_tokens_per_s": "",
            "vllm_decode_tokens_per_s": "",
            "vllm_perplexity_ratio": "",
            "vllm_measured_on": "",
        }
    found = served[stands_for]
    ratio = found.get("served_perplexity_ratio", "") if stands_for == name else ""
    return {
        "vllm_prefill_tokens_per_s": found["prefill_tokens_per_s"],
        "vllm_decode_tokens_per_s": 1000 / found["tpot_ms_p50_c1"],
        "vllm_perplexity_ratio": ratio,
        "vllm_measured_on": stands_for,
    }
