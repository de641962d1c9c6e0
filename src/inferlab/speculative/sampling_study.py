"""33.16: speculation measured against its closed form, and whether outputs follow the target."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from scipy.stats import chi2, kstest
from torch import Tensor

from inferlab.params import section
from inferlab.speculative.closed_form import best_length, speedup, tokens_per_call
from inferlab.speculative.pairs import Outcome, Pair, make_draft, make_target, speculate

FEWEST_EXPECTED = 5.0
"""Cells of a chi-square test that expect less are taken together (Cochran's rule)."""
Row = dict[str, float | int | str]


@section
class DistributionTestParams:
    """The block `speculative_sampling.test`."""

    draft_length: Annotated[int, Field(ge=1)]
    calls: Annotated[int, Field(ge=1)]
    seeds: Annotated[int, Field(ge=1)]
    level: Annotated[float, Field(gt=0, lt=1)]


@section
class SpeculativeSamplingParams:
    """The section `speculative_sampling`."""

    vocabulary: Annotated[int, Field(ge=2)]
    contexts: Annotated[int, Field(ge=1)]
    agreements: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1)]
    draft_lengths: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    cost_ratios: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1)]
    shown_cost_ratio: float
    sequences: Annotated[int, Field(ge=1)]
    calls: Annotated[int, Field(ge=1)]
    test: DistributionTestParams

    def __post_init__(self) -> None:
        if self.shown_cost_ratio not in self.cost_ratios:
            known = ", ".join(f"{one:g}" for one in self.cost_ratios)
            raise ValueError(
                f"shown_cost_ratio must be one of cost_ratios, {known}; "
                f"got {self.shown_cost_ratio:g}"
            )


@dataclass(frozen=True)
class Measured:
    """One agreement and draft length: what was simulated."""

    agreement: float
    length: int
    outcome: Outcome


def make_pairs(params: SpeculativeSamplingParams, seed: int) -> dict[float, Pair]:
    """One target and a draft for each agreement. Raises InferlabError as `make_draft` does."""
    generator = torch.Generator().manual_seed(seed)
    target = make_target(params.contexts, params.vocabulary, generator)
    return {
        agreement: Pair(target, make_draft(target, agreement)) for agreement in params.agreements
    }


def measure(
    pairs: dict[float, Pair], params: SpeculativeSamplingParams, seed: int
) -> list[Measured]:
    """Every agreement with every draft length."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Measured(
            agreement,
            length,
            speculate(pair, length, params.sequences, params.calls, generator),
        )
        for agreement, pair in pairs.items()
        for length in params.draft_lengths
    ]


def speedup_table(found: Sequence[Measured], cost_ratios: Sequence[float]) -> list[Row]:
    """One row an agreement, draft length and cost ratio: measured beside the closed form."""
    return [
        {
            "agreement": one.agreement,
            "draft_length": one.length,
            "cost_ratio": cost_ratio,
            "acceptance": one.outcome.acceptance,
            "tokens_per_call": one.outcome.tokens_per_call,
            "tokens_per_call_expected": tokens_per_call(one.agreement, one.length),
            "speedup": speedup(one.outcome.tokens_per_call, one.length, cost_ratio),
            "speedup_expected": speedup(
                tokens_per_call(one.agreement, one.length), one.length, cost_ratio
            ),
        }
        for one in found
        for cost_ratio in cost_ratios
    ]


def best_table(rows: Sequence[Row], params: SpeculativeSamplingParams) -> list[Row]:
    """One row an agreement and cost ratio: the best draft length, measured and by the formula."""
    best = []
    for agreement in params.agreements:
        for cost_ratio in params.cost_ratios:
            own = [
                row
                for row in rows
                if row["agreement"] == agreement and row["cost_ratio"] == cost_ratio
            ]
            top = max(own, key=lambda row: row["speedup"])
            best.append(
                {
                    "pair": f"agreement {agreement:g}, cost ratio {cost_ratio:g}",
                    "agreement": agreement,
                    "cost_ratio": cost_ratio,
                    "draft_length": top["draft_length"],
                    "draft_length_expected": best_length(
                        agreement, cost_ratio, params.draft_lengths
                    ),
                    "speedup": top["speedup"],
                    "pays": int(top["speedup"] > 1),
                }
            )
    return best


def follows_target(counts: Tensor, target: Tensor) -> float:
    """The p-value of a chi-square test that counts [contexts, vocabulary] come from `target`.

    Tokens after one context are independent draws from its distribution, so that the contexts'
    statistics and their degrees of freedom add up (Anderson and Goodman 1957, "Statistical
    inference about Markov chains"). 1.0 when there is nothing to test.
    """
    statistic, freedom = 0.0, 0
    for observed, shares in zip(counts.double().numpy(), target.numpy(), strict=True):
        expected = observed.sum() * shares
        rare = expected < FEWEST_EXPECTED
        cells = [(observed[~rare], expected[~rare])]
        if expected[rare].sum() >= FEWEST_EXPECTED:
            cells.append((observed[rare].sum(keepdims=True), expected[rare].sum(keepdims=True)))
        seen, wanted = (np.concatenate(parts) for parts in zip(*cells, strict=True))
        # Tokens of cells too rare even together are left out; the rest is compared among itself.
        wanted = wanted * (seen.sum() / wanted.sum()) if len(wanted) else wanted
        statistic += float(((seen - wanted) ** 2 / wanted).sum())
        freedom += max(0, len(wanted) - 1)
    return float(chi2.sf(statistic, freedom)) if freedom else 1.0


def distribution_tests(
    pairs: dict[float, Pair], params: SpeculativeSamplingParams, seed: int
) -> list[Row]:
    """p-values of both rules for each agreement and seed; `rule` is residual or broken."""
    return list(_tested(pairs, params, seed))


def _tested(
    pairs: dict[float, Pair], params: SpeculativeSamplingParams, seed: int
) -> Iterator[Row]:
    for agreement, pair in pairs.items():
        for number in range(params.test.seeds):
            for rule in ("residual", "broken"):
                generator = torch.Generator().manual_seed(seed + number + 1)
                outcome = speculate(
                    pair,
                    params.test.draft_length,
                    params.sequences,
                    params.test.calls,
                    generator,
                    broken=rule == "broken",
                )
                yield {
                    "rule": rule,
                    "agreement": agreement,
                    "seed": number,
                    "tokens": int(outcome.counts.sum()),
                    "p_value": follows_target(outcome.counts, pair.target),
                }


def metrics(
    found: Sequence[Measured],
    best: Sequence[Row],
    tests: Sequence[Row],
    params: SpeculativeSamplingParams,
) -> dict[str, float]:
    """Acceptance and best speed-up of each agreement, and what the tests say.

    `p_value_uniformity`: p-values of a right rule are uniform over seeds; the p-value of a
    Kolmogorov-Smirnov test that they are.
    """
    values: dict[str, float] = {}
    for agreement in params.agreements:
        name = f"{100 * agreement:g}"
        own = [one.outcome for one in found if one.agreement == agreement]
        judged = sum(one.judged for one in own)
        values[f"acceptance_{name}"] = sum(one.accepted for one in own) / judged
        values[f"speedup_{name}"] = next(
            row["speedup"]
            for row in best
            if row["agreement"] == agreement and row["cost_ratio"] == params.shown_cost_ratio
        )
    values["closed_form_error_max"] = max(
        abs(one.outcome.tokens_per_call / tokens_per_call(one.agreement, one.length) - 1)
        for one in found
    )
    right = [row["p_value"] for row in tests if row["rule"] == "residual"]
    broken = [row["p_value"] for row in tests if row["rule"] == "broken"]
    level = params.test.level
    values["p_value_min"] = min(right)
    values["p_value_uniformity"] = float(kstest(right, "uniform").pvalue)
    values["rejected_share"] = float(np.mean([one < level for one in right]))
    values["broken_rejected_share"] = float(np.mean([one < level for one in broken]))
    values["broken_p_value_max"] = max(broken)
    return values
