"""The rule of speculative sampling against brute force, its closed form, and the stage."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from inferlab import params as sections
from inferlab.errors import InferlabError
from inferlab.speculative.closed_form import best_length, speedup, tokens_per_call
from inferlab.speculative.pairs import (
    Pair,
    Table,
    make_draft,
    make_target,
    speculate,
    total_variation,
)
from inferlab.speculative.sampling_study import (
    SpeculativeSamplingParams,
    distribution_tests,
    follows_target,
    make_pairs,
)
from inferlab.speculative.verification import sample, verify
from stages import speculative_sampling

SEQUENCES = 100_000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_pair(agreement: float, contexts: int = 3, vocabulary: int = 12) -> Pair:
    source = generator()
    target = make_target(contexts, vocabulary, source)
    return Pair(target, make_draft(target, agreement))


def test_verdicts_that_leave_no_choice() -> None:
    """Tokens that the target never says are refused; what it wants more is kept."""
    target = torch.stack(
        [
            rows([0, 1, 0], [0, 0, 1], [1, 0, 0]),  # keeps both, then says 0
            rows([0, 1, 0], [0, 0, 1], [1, 0, 0]),  # refuses the second, says 2 there
            rows([0, 1, 0], [0, 0, 1], [1, 0, 0]),  # refuses the first, although the second fits
        ]
    )
    draft = torch.full((3, 2, 3), 1 / 3, dtype=torch.float64)
    drafted = torch.tensor([[1, 2], [1, 0], [0, 2]])
    verdict = verify(target, draft, drafted, generator())
    assert verdict.accepted.tolist() == [2, 1, 0]
    assert verdict.token.tolist() == [0, 2, 1]


P, Q = rows([0.5, 0.3, 0.2, 0.0]), rows([0.1, 0.6, 0.1, 0.2])
"""A target and a draft far apart: min(p, q) is .1, .3, .1 and 0, half of all that is drafted."""


def test_first_tokens_follow_the_target() -> None:
    drafted = sample(Q.expand(SEQUENCES, -1), generator(1)).unsqueeze(1)
    target = P.expand(SEQUENCES, 2, -1)
    verdict = verify(target, Q.expand(SEQUENCES, 1, -1), drafted, generator(2))
    tokens = torch.where(verdict.accepted > 0, drafted.squeeze(1), verdict.token)
    counts = torch.bincount(tokens, minlength=4).numpy()
    assert chisquare(counts[:3], SEQUENCES * np.array([0.5, 0.3, 0.2])).pvalue > 0.01
    assert counts[3] == 0


@pytest.mark.parametrize(
    ("broken", "shares"),
    [
        (False, [0.5, 0.3, 0.2]),
        # Of each call: kept ones, and one from p, in place of the refused or on top: min(p, q) + p.
        (True, [0.6 / 1.5, 0.6 / 1.5, 0.3 / 1.5]),
    ],
)
def test_outputs_follow_the_target_or_what_theory_says_of_the_broken_rule(
    broken: bool, shares: list[float]
) -> None:
    outcome = speculate(Pair(P, Q), 1, 1000, 100, generator(), broken)
    counts = outcome.counts[0].numpy()
    assert chisquare(counts[:3], counts.sum() * np.array(shares)).pvalue > 0.01
    assert counts[3] == 0
    assert outcome.acceptance == pytest.approx(0.5, abs=0.01)


def test_tables_draw_as_plain_sampling_does() -> None:
    weights = rows([1.0, 0.0, 3.0], [0.0, 0.0, 5.0], [2.0, 2.0, 0.0])
    numbers = torch.arange(3).repeat(20_000)
    drawn = Table(weights).draw(numbers, generator())
    for number, row in enumerate(weights):
        counts = torch.bincount(drawn[numbers == number], minlength=3).numpy()
        possible = row.numpy() > 0
        expected = (20_000 * row / row.sum()).numpy()
        assert counts[~possible].sum() == 0
        assert possible.sum() == 1 or chisquare(counts[possible], expected[possible]).pvalue > 0.01


def test_pairs_of_tokens_follow_the_target() -> None:
    """All sequences of two tokens, whether the second was drafted, resampled or came on top."""
    pair = make_pair(0.6, contexts=2, vocabulary=4)
    start = torch.zeros(SEQUENCES, dtype=torch.long)
    source = generator(3)
    first = sample(pair.draft[start], source)
    second = sample(pair.draft[first % 2], source)
    seen = torch.stack([start, first % 2, second % 2], 1)
    drafted = torch.stack([first, second], 1)
    verdict = verify(pair.target[seen], pair.draft[seen[:, :2]], drafted, source)
    said = torch.where(verdict.accepted > 0, first, verdict.token)
    later = sample(pair.target[said % 2], source)  # where the call ended after one token
    next_one = torch.where(verdict.accepted > 1, second, verdict.token)
    next_one = torch.where(verdict.accepted > 0, next_one, later)
    counts = torch.bincount(said * 4 + next_one, minlength=16).numpy()
    expected = np.array(
        [
            float(pair.target[0, one] * pair.target[one % 2, other])
            for one, other in itertools.product(range(4), repeat=2)
        ]
    )
    assert chisquare(counts, SEQUENCES * expected).pvalue > 0.01


@given(st.floats(0.7, 1.0), st.integers(0, 50), st.integers(1, 5))
def test_drafts_agree_exactly_and_agreement_is_the_expected_acceptance(
    agreement: float, seed: int, contexts: int
) -> None:
    source = generator(seed)
    target = make_target(contexts, 100, source)
    draft = make_draft(target, agreement)
    assert torch.allclose(draft.sum(1), torch.ones(contexts, dtype=torch.float64))
    assert float(draft.min()) >= 0
    assert torch.allclose(1 - total_variation(target, draft), torch.tensor(agreement).double())
    # A token x is drafted with q(x) and kept with min(1, p(x)/q(x)).
    kept = (draft * (target / draft).clamp(max=1)).sum(1)
    assert torch.allclose(kept, torch.tensor(agreement).double())


def test_a_draft_that_is_the_target_is_always_kept() -> None:
    outcome = speculate(make_pair(1.0), 5, 100, 10, generator())
    assert outcome.acceptance == 1
    assert outcome.tokens_per_call == tokens_per_call(1.0, 5) == 6


def test_tokens_per_call_by_hand() -> None:
    assert tokens_per_call(0.8, 1) == pytest.approx(1.8)
    assert tokens_per_call(0.8, 5) == pytest.approx((1 - 0.8**6) / 0.2)
    assert speedup(1.8, 1, 0.1) == pytest.approx(1.8 / 1.1)


@given(st.floats(0.05, 0.99), st.integers(1, 8))
def test_tokens_per_call_by_enumeration(acceptance: float, length: int) -> None:
    """Every pattern of kept and refused tokens, each with its probability."""
    total = 0.0
    for pattern in itertools.product([True, False], repeat=length):
        kept = next((n for n, one in enumerate(pattern) if not one), length)
        chance = acceptance ** sum(pattern) * (1 - acceptance) ** (length - sum(pattern))
        total += chance * (kept + 1)
    assert tokens_per_call(acceptance, length) == pytest.approx(total)


@given(st.floats(0.05, 0.99), st.floats(0.0, 1.0))
def test_some_draft_length_pays_exactly_when_acceptance_exceeds_the_cost(
    acceptance: float, ratio: float
) -> None:
    """Leviathan et al., corollary 3.9."""
    length = best_length(acceptance, ratio, range(1, 20))
    gain = speedup(tokens_per_call(acceptance, length), length, ratio)
    assert (gain > 1 + 1e-9) == (acceptance > ratio + 1e-9 * (1 + ratio))


@given(st.floats(0.1, 0.95), st.floats(0.01, 0.9))
def test_dearer_drafts_are_never_longer(acceptance: float, ratio: float) -> None:
    lengths = range(1, 11)
    assert best_length(acceptance, ratio, lengths) >= best_length(acceptance, ratio * 1.1, lengths)


@pytest.mark.parametrize("agreement", [0.8, 0.95])
def test_simulation_agrees_with_the_closed_form(agreement: float) -> None:
    outcome = speculate(make_pair(agreement, vocabulary=100), 4, 2000, 10, generator())
    error = np.sqrt(agreement * (1 - agreement) / outcome.judged)
    assert abs(outcome.acceptance - agreement) < 4 * error
    assert outcome.tokens_per_call == pytest.approx(tokens_per_call(agreement, 4), rel=0.02)
    assert int(outcome.counts.sum()) == outcome.calls + outcome.accepted


def test_seeds_reproduce() -> None:
    pair = make_pair(0.8)
    one, same, other = (speculate(pair, 3, 50, 5, generator(seed)).counts for seed in (7, 7, 8))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_chi_square_is_the_librarys_when_there_is_one_context() -> None:
    target = make_target(1, 20, generator())
    counts = torch.bincount(sample(target.expand(5000, -1), generator(1)), minlength=20)
    library = chisquare(counts.numpy(), 5000 * target[0].numpy()).pvalue
    assert follows_target(counts.view(1, -1), target) == pytest.approx(library)


def test_chi_square_takes_rare_tokens_together() -> None:
    """Of 100 draws 90 and 4 + 3 + 3 are expected: two cells, one degree of freedom."""
    target = rows([0.90, 0.04, 0.03, 0.03])
    counts = torch.tensor([[84, 16, 0, 0]])
    assert follows_target(counts, target) == pytest.approx(chisquare([84, 16], [90, 10]).pvalue)
    assert follows_target(torch.zeros(1, 4, dtype=torch.int64), target) == 1.0


def study_params(**changes: Any) -> SpeculativeSamplingParams:
    params = sections.load("speculative_sampling", SpeculativeSamplingParams)
    return replace(params, agreements=(0.8,), **changes)


def test_the_test_catches_the_broken_rule_and_passes_the_right_one() -> None:
    params = study_params(sequences=500, calls=2)
    params = replace(params, test=replace(params.test, calls=30, seeds=3))
    tests = distribution_tests(make_pairs(params, 0), params, 0)
    right, broken = (
        [row["p_value"] for row in tests if row["rule"] == rule] for rule in ("residual", "broken")
    )
    assert max(broken) < 1e-4
    assert min(right) > 1e-3 and max(right) > 0.2


@pytest.mark.parametrize(
    ("agreement", "message"),
    [
        (0.0, "the agreement must be above 0 and at most 1; got 0"),
        (1.2, "the agreement must be above 0 and at most 1; got 1.2"),
        (0.05, r"an agreement of 0.05 is out of reach: .* have 0.\d\d in common"),
    ],
)
def test_agreements_that_are_refused(agreement: float, message: str) -> None:
    with pytest.raises(InferlabError, match=message):
        make_draft(make_target(2, 100, generator()), agreement)


def test_draft_lengths_and_shapes_that_are_refused() -> None:
    target, nothing = torch.ones(2, 1, 3), torch.ones(2, 0, dtype=torch.long)
    with pytest.raises(InferlabError, match="the draft length must be at least 1; got 0"):
        verify(target, torch.ones(2, 0, 3), nothing, generator())
    with pytest.raises(InferlabError, match=r"must be \(2, 2, 3\) and \(2, 1, 3\) for 1 drafted"):
        verify(target, torch.ones(2, 1, 3), torch.zeros(2, 1, dtype=torch.long), generator())
    with pytest.raises(InferlabError, match="the draft length must be at least 1; got 0"):
        tokens_per_call(0.8, 0)
    with pytest.raises(InferlabError, match="the draft length must be at least 1; got 0"):
        speculate(make_pair(0.8), 0, 2, 2, generator())
    with pytest.raises(InferlabError, match=r"acceptance must be above 0 and at most 1; got 1.5"):
        tokens_per_call(1.5, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"agreements": [0.8, 0.0]}, "agreements.1 must be greater than 0; got 0.0"),
        ({"agreements": [1.1]}, "agreements.0 must be less than or equal to 1; got 1.1"),
        ({"draft_lengths": [0]}, "draft_lengths.0 must be greater than or equal to 1; got 0"),
        ({"shown_cost_ratio": 0.3}, "shown_cost_ratio must be one of cost_ratios, 0.02, .*got 0.3"),
    ],
)
def test_parameters_that_are_refused(workspace: Path, change: dict[str, Any], message: str) -> None:
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["speculative_sampling"] |= change
    Path("params.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(InferlabError, match=message):
        sections.load("speculative_sampling", SpeculativeSamplingParams)


@pytest.mark.smoke
def test_stage(workspace: Path) -> None:
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["run"]["threads"] = 1
    content["speculative_sampling"] |= {"calls": 4}
    content["speculative_sampling"]["test"] |= {"calls": 8, "seeds": 2}
    Path("params.yaml").write_text(yaml.safe_dump(content))
    speculative_sampling.main()
    found = json.loads(Path("metrics/speculative_sampling.json").read_text())
    for agreement in (80, 85, 90, 95):
        assert found[f"acceptance_{agreement}"] == pytest.approx(agreement / 100, abs=0.02)
        assert found[f"speedup_{agreement}"] > 1
    assert found["speedup_95"] > found["speedup_80"]
    assert Path("plots/speculative_sampling/speedups.csv").read_text().count("\n") == 4 * 10 * 6 + 1
    assert Path("plots/speculative_sampling/p_values.csv").read_text().count("\n") == 4 * 2 * 2 + 1
    assert Path("plots/speculative_sampling/sampling.png").stat().st_size > 10_000
