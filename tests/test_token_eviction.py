"""Eviction against brute force and against windows; what heads hold; what is refused."""

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from heldout_text import set_params, write_heldout
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_models import make_model, random_tokens
from torch import Tensor

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.kvcache.eviction import METHODS, make_policy
from inferlab.kvcache.eviction.cache import Arm, EvictingCache, run
from inferlab.kvcache.eviction.policy import Limits
from inferlab.kvcache.eviction_params import TokenEvictionParams
from inferlab.kvcache.eviction_study import Runs, held_table, kept_attention
from inferlab.kvcache.windows import Arm as WindowArm
from inferlab.kvcache.windows import windowed_states
from inferlab.models.runtime.cache import Window
from inferlab.models.runtime.llama import Llama
from inferlab.models.runtime.loading import load_llama
from stages import token_eviction


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    return load_llama(make_model(tmp_path_factory.mktemp("llama")), "fp32")


def make_cache(model: Llama, *arms: Arm, budget: int, block: int, inputs: int = 1) -> EvictingCache:
    return EvictingCache(model.config, arms, inputs, budget, block, model.dtype)


def arm(method: str, budget: int, compacted: bool = False, seed: int = 0) -> Arm:
    return Arm(make_policy(method, Limits(budget // 2, 2, seed)), compacted)


def test_heavy_hitters_by_hand() -> None:
    """The two latest are safe; of the others position 1 has received least."""
    scores = torch.tensor([[[5.0, 1.0, 3.0, 0.0, 0.5]]])
    positions = torch.tensor([[[0, 1, 2, 8, 9]]])
    found = make_policy("h2o", Limits(2, 1)).priorities(scores, positions, 9)
    assert found.tolist() == [[[5.0, 1.0, 3.0, math.inf, math.inf]]]


def test_sinks_and_recent_by_hand() -> None:
    positions = torch.tensor([[[7, 0, 3, 1, 9]]])
    policy = make_policy("recent", Limits(2, 2))
    found = policy.priorities(torch.zeros(1, 1, 5), positions, 9)
    assert found.tolist() == [[[7.0, math.inf, 3.0, math.inf, 9.0]]]
    assert not policy.needs_scores


def test_random_draws_depend_on_the_seed_alone() -> None:
    positions = torch.zeros(1, 2, 40, dtype=torch.long)
    draws = [
        make_policy("random", Limits(2, 2, seed)).priorities(positions, positions, 9)
        for seed in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


class NaiveH2O:
    """One sequence, token by token: a list of positions and a dict of sums for each head."""

    def __init__(self, model: Llama, budget: int, recent: int) -> None:
        config = model.config
        heads = [(layer, head) for layer in range(config.layers) for head in range(config.kv_heads)]
        self.model, self.budget, self.recent = model, budget, recent
        self.held: dict[tuple[int, int], list[int]] = {head: [] for head in heads}
        self.sums: dict[tuple[int, int], dict[int, float]] = {head: {} for head in heads}

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, _: Tensor
    ) -> Tensor:
        group, place = self.model.config.group, keys.shape[2] - 1
        mixed = torch.zeros_like(queries)
        for head in range(keys.shape[1]):
            held, sums = self.held[layer, head], self.sums[layer, head]
            held.append(place)
            sums[place] = 0.0
            for number in range(head * group, (head + 1) * group):
                scores = keys[0, head, held] @ queries[0, number, 0] / math.sqrt(keys.shape[-1])
                weights = scores.softmax(0)
                mixed[0, number, 0] = weights @ values[0, head, held]
                for key, weight in zip(held, weights.tolist(), strict=True):
                    sums[key] += weight
            if len(held) == self.budget:
                old = [key for key in held if key <= place - self.recent]
                held.remove(min(old, key=lambda key: sums[key]))
        return mixed

    def states(self, tokens: Tensor) -> Tensor:
        cache = self.model.new_cache(1, tokens.shape[1])
        return torch.cat(
            [self.model.hidden(one, cache, attend=self.attend) for one in tokens.split(1, 1)], 1
        )


def test_h2o_against_brute_force(model: Llama) -> None:
    tokens = random_tokens(1, 60)
    naive = NaiveH2O(model, budget=12, recent=6)
    cache = make_cache(model, arm("h2o", 12), budget=12, block=1)
    torch.testing.assert_close(run(model, cache, tokens), naive.states(tokens), rtol=0, atol=1e-4)
    for (layer, head), held in naive.held.items():
        own = cache.positions[layer, 0, head, : cache.held]
        assert sorted(own.tolist()) == held
        sums = [naive.sums[layer, head][place] for place in own.tolist()]
        assert cache.scores[layer, 0, head, : cache.held].tolist() == pytest.approx(sums, abs=1e-4)


@pytest.mark.parametrize("compacted", [False, True])
def test_sinks_and_recent_token_by_token_is_a_window_with_anchors(
    model: Llama, compacted: bool
) -> None:
    tokens = random_tokens(2, 60)
    kind = "compacted" if compacted else "kept"
    expected = windowed_states(model, tokens, {"w": WindowArm(Window(12, 2), kind)})["w"]
    cache = make_cache(model, arm("recent", 12, compacted), budget=12, block=1, inputs=2)
    torch.testing.assert_close(run(model, cache, tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_arms_side_by_side_are_as_if_alone(model: Llama, method: str) -> None:
    """And branching off a full cache is as if the arm had held it from the start."""
    tokens, budget = random_tokens(2, 70), 24
    others = [arm("h2o", budget, seed=3), arm("recent", budget, compacted=True)]
    full = make_cache(model, Arm(None), budget=70, block=4, inputs=2)
    first = run(model, full, tokens[:, :20])
    branched = full.branch([*others, arm(method, budget)], budget, 4)
    rest = run(model, branched, tokens[:, 20:])[4:]
    alone = make_cache(model, arm(method, budget), budget=budget, block=4, inputs=2)
    expected = run(model, alone, tokens)
    torch.testing.assert_close(torch.cat((first, rest), 1), expected, rtol=0, atol=1e-4)


def test_a_cache_that_evicts_nothing_is_full_attention(model: Llama) -> None:
    tokens = random_tokens(2, 50)
    found = run(model, make_cache(model, Arm(None), budget=50, block=7, inputs=2), tokens)
    expected = model.hidden(tokens, model.new_cache(2, 50))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(sorted(METHODS)), st.booleans(), st.integers(1, 6), st.integers(2, 60))
def test_heads_hold_what_they_may(
    model: Llama, method: str, compacted: bool, block: int, length: int
) -> None:
    """Distinct positions, the last block among them, within the budget; sums are all attention."""
    cache = make_cache(model, arm(method, 16, compacted), budget=16, block=block)
    run(model, cache, random_tokens(1, length))
    assert cache.held == min(length, 16 - block)
    latest = set(range((length - 1) // block * block, length))
    for layer in range(2):
        for head in range(2):
            held = cache.positions[layer, 0, head, : cache.held].tolist()
            assert len(set(held)) == cache.held and latest <= set(held) <= set(range(length))
            if method == "recent" and length >= 16:
                oldest = length - (16 - block - 2)
                assert sorted(held) == [0, 1, *range(oldest, length)]
    if method == "h2o" and length <= 16 - block:
        total = cache.scores[..., : cache.held].sum(-1)
        torch.testing.assert_close(total, torch.full_like(total, 2.0 * length))


def test_heads_of_a_group_decide_together_and_groups_apart(model: Llama) -> None:
    cache = make_cache(model, arm("h2o", 16), budget=16, block=4)
    run(model, cache, random_tokens(1, 60))
    assert cache.positions.shape[2] == model.config.kv_heads == model.config.heads // 2
    held = cache.positions[..., : cache.held].sort(-1).values
    assert not torch.equal(held[:, :, 0], held[:, :, 1])


def test_kept_attention_and_held_share_by_hand() -> None:
    """Of 8 units of attention 2 are the last block's own; slots 0 and 3 hold 4 more."""
    runs = Runs(
        held={"one": torch.tensor([[[[3, 0]]]])},
        attention=torch.tensor([[[[3.0, 1.0, 1.0, 1.0, 1.0, 1.0]]]]),
    )
    assert kept_attention(runs, block=2) == {"one": pytest.approx(6 / 8)}
    shares = [row["share_held"] for row in held_table(runs)]
    assert shares == [1, 0, 0, 1, 0, 0]


def test_h2o_holds_more_of_the_attention_than_chance(model: Llama) -> None:
    tokens = random_tokens(1, 120)
    arms = {name: arm(name, 32) for name in ("h2o", "random")}
    cache = make_cache(model, *arms.values(), budget=32, block=8)
    full = make_cache(model, Arm(None), budget=120, block=8)
    run(model, cache, tokens[:, :112])
    run(model, full, tokens[:, :112])
    before = full.scores.clone()
    held = dict(zip(arms, cache.positions[..., : cache.held].split(1, dim=1), strict=True))
    run(model, full, tokens[:, 112:])
    found = kept_attention(Runs(held=held, attention=full.scores - before), 8)
    assert found["random"] < found["h2o"] < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["h20"]}, "unknown eviction method 'h20'; known: .*; did you mean h2o?"),
        ({"methods": ["recent"]}, "methods must contain h2o; got recent"),
        ({"curve_methods": ["recent"]}, "curve_methods must be some of methods, h2o among them"),
        ({"budgets": [1024, 4096]}, "below curve_tokens 2304, or nothing is evicted; got 4096"),
        ({"curve_tokens": 4097}, "curve_tokens must be above block 48 and at most tokens 4096"),
        ({"budgets": [64, 1024]}, "budgets must be at least 100, so that sinks or recent"),
        ({"budget": 1000}, "budget must be one of budgets; got 1000"),
        ({"check": {"budget": 256, "tokens": 200}}, "check.tokens must be above check.budget 256"),
        ({"decode": {"tokens": 2000, "rounds": 3}}, "decode.tokens times one more than"),
        ({"dtype": "fp16"}, "dtype must be one of 'bf16', 'fp32'; got 'fp16'"),
        ({"recent_share": 1.0}, "recent_share must be less than 1"),
        ({"other_shares": [0.5, 0.99]}, "other_shares must leave a block of 48 .*; got 0.99"),
    ],
)
def test_parameters_that_are_refused(workspace: Path, changes: Any, message: str) -> None:
    set_params("token_eviction", **changes)
    with pytest.raises(InferlabError, match=message) as error:
        parameters.load("token_eviction", TokenEvictionParams)
    assert "\n" not in str(error.value)


def test_what_does_not_fit_is_refused(model: Llama) -> None:
    with pytest.raises(InferlabError, match="a budget of 7 tokens must be at least twice the 4"):
        make_cache(model, arm("h2o", 7), budget=7, block=4)
    with pytest.raises(InferlabError, match=r"eviction method 'recnt'.*did you mean recent"):
        make_policy("recnt", Limits(2, 1))
    full = make_cache(model, Arm(None), budget=20, block=4)
    run(model, full, random_tokens(1, 20))
    with pytest.raises(InferlabError, match="the cache of 20 tokens is full"):
        run(model, full, random_tokens(1, 1))
    with pytest.raises(InferlabError, match="20 tokens are held, 12 may be kept"):
        full.branch([arm("h2o", 16)], 16, 4)


SMALL = {
    "tokens": 200,
    "curve_tokens": 120,
    "budget": 64,
    "budgets": [48, 64],
    "other_shares": [0.75],
    "sinks": 2,
    "block": 8,
    "seeds": 2,
    "check": {"budget": 48, "tokens": 80},
    "decode": {"tokens": 2, "rounds": 1},
}


@pytest.mark.smoke
def test_stage(workspace: Path, tiny_llama: Path) -> None:
    shutil.copytree(tiny_llama, "models/base")
    write_heldout(tiny_llama)
    set_params("token_eviction", **SMALL)
    token_eviction.main()
    found = json.loads(Path("metrics/token_eviction.json").read_text())
    for name in ("full", *METHODS):
        assert found[f"token_perplexity_{name}"] > 1
        assert 0 <= found[f"next_token_accuracy_{name}"] <= 1
    assert all(0 < found[f"attention_kept_{name}"] < 1 for name in METHODS)
    assert found["token_perplexity_random_std_first"] > 0
    with Path("plots/token_eviction/curve.csv").open() as file:
        rows = {(row["arm"], int(row["budget"])): row for row in csv.DictReader(file)}
    assert set(rows) == {
        *((method, 64) for method in METHODS),
        *((method, 48) for method in ("h2o", "recent")),
        *((name, 64) for name in ("random_1", "h2o_recent_0.75")),
        *((name, 64) for name in ("h2o_compacted", "recent_compacted")),
        ("full", 120),
    }
    assert all(float(rows[method, 48]["kl_nats"]) > 0 for method in ("h2o", "recent"))
    assert Path("plots/token_eviction/methods.csv").read_text().count("\n") == 1 + 4
    timing = json.loads(Path("metrics/timing/token_eviction.json").read_text())
    assert all(timing[f"decode_ms_{name}"] > 0 for name in ("recent", "scores", "h2o"))
    assert Path("plots/token_eviction/eviction.png").stat().st_size > 10_000


@pytest.mark.smoke
def test_stage_refuses_more_than_the_context(workspace: Path, tiny_llama: Path) -> None:
    shutil.copytree(tiny_llama, "models/base")
    write_heldout(tiny_llama)
    with pytest.raises(SystemExit, match=r"token_eviction.tokens is 4096, but .* context is 512"):
        token_eviction.main()
    assert not Path("metrics").exists()
