"""33.15: what a head may forget - heavy hitters, random tokens, all but sinks and recent ones."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from inferlab.kvcache.eviction.cache import Arm, EvictingCache, run
from inferlab.kvcache.eviction_params import TokenEvictionParams
from inferlab.kvcache.scoring import Scores, paired_error, score
from inferlab.models.runtime.llama import Llama

STRETCHES = 32
"""Parts of the input over which it is counted what heads hold at the end."""


@dataclass
class Runs:
    """What the passes leave: final states, [inputs, tokens, hidden] each.

    `whole`: of all tokens, by method at the main budget, and `full`. `curve`: of the first
    `curve_tokens`, by (arm, budget). `single`: of eviction token by token. `held`: by method, at
    the main budget, the positions that each head holds before the last block, [layers, inputs,
    kv_heads, kept]. `attention`: what full attention of the last block's queries gave each
    position, [layers, inputs, kv_heads, tokens]. `decode_ms`: of a token, by what is kept.
    """

    whole: dict[str, Tensor] = field(default_factory=dict)
    curve: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    single: Tensor = field(default_factory=lambda: torch.empty(0))
    held: dict[str, Tensor] = field(default_factory=dict)
    attention: Tensor = field(default_factory=lambda: torch.empty(0))
    decode_ms: dict[str, float] = field(default_factory=dict)


def run_all(model: Llama, tokens: Tensor, params: TokenEvictionParams, seed: int) -> Runs:
    """Every arm at every budget on `tokens` [inputs, tokens].

    Until the first eviction all arms are full attention, so each branches off from one full cache.
    """
    inputs, length = tokens.shape
    full = EvictingCache(model.config, [Arm(None)], inputs, length, params.block, model.dtype)
    runs, pieces, last = Runs(), [], length - params.block
    first = tokens[:, : params.curve_tokens]
    for budget in sorted(set(params.budgets)):
        pieces.append(run(model, full, tokens[:, full.length : budget - params.block]))
        prefix = torch.cat(pieces, dim=1)
        arms = params.arms(budget, seed)
        if budget == params.budget:
            rests, runs.held = run_arms(model, full, arms, budget, tokens)
            runs.whole = {name: torch.cat((prefix, rest), 1) for name, rest in rests.items()}
            runs.decode_ms = decode_costs(model, full, tokens, params)
            arms = params.more_arms(seed)
        for name, rest in run_arms(model, full, arms, budget, first)[0].items() if arms else ():
            runs.curve[name, budget] = torch.cat((prefix, rest), dim=1)
        if budget == params.check.budget:
            single = full.branch([Arm(params.policy("h2o", budget))], budget, 1)
            rest = run(model, single, tokens[:, full.length : params.check.tokens])
            runs.single = torch.cat((prefix, rest), dim=1)
    pieces.append(run(model, full, tokens[:, full.length : last]))
    before = full.scores.clone()
    pieces.append(run(model, full, tokens[:, last:]))
    runs.attention = full.scores - before
    runs.whole["full"] = torch.cat(pieces, dim=1)
    return runs


def run_arms(
    model: Llama, full: EvictingCache, arms: Mapping[str, Arm], budget: int, tokens: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Arms side by side on the rest of `tokens` [inputs, tokens], from where `full` stands.

    Returns the final states of the rest, [inputs, rest, hidden] each, and the positions that heads
    hold before the last block, [layers, inputs, kv_heads, kept] each.
    """
    inputs, last = len(tokens), tokens.shape[1] - full.chunk
    cache = full.branch(list(arms.values()), budget, full.chunk)
    most = run(model, cache, tokens[:, full.length : last])
    held = cache.positions[..., : cache.held].clone()
    states = torch.cat((most, run(model, cache, tokens[:, last:])), dim=1)
    of_arms = dict(zip(arms, states.split(inputs), strict=True))
    return of_arms, dict(zip(arms, held.split(inputs, dim=1), strict=True))


def decode_costs(
    model: Llama, full: EvictingCache, tokens: Tensor, params: TokenEvictionParams
) -> dict[str, float]:
    """Milliseconds of a decoded token, evicting one each time; the median of interleaved rounds.

    `recent` keeps no scores; `scores` keeps them and still evicts by age; `h2o` decides by them.
    All are plain torch and hold as many tokens.
    """
    budget = full.held + 1
    recent = params.policy("recent", budget)
    policies = {
        "recent": recent,
        "scores": replace(recent, needs_scores=True),
        "h2o": params.policy("h2o", budget),
    }
    caches = {name: full.branch([Arm(own)], budget, 1) for name, own in policies.items()}
    taken: dict[str, list[float]] = {name: [] for name in policies}
    size = params.decode.tokens
    for number in range(params.decode.rounds + 1):
        first = full.length + number * size
        for name, cache in caches.items():
            start = time.perf_counter()
            run(model, cache, tokens[:, first : first + size])
            if number:  # the first round warms up
                taken[name].append((time.perf_counter() - start) * 1000 / size)
    return {name: statistics.median(own) for name, own in taken.items()}


def score_all(
    model: Llama, runs: Runs, tokens: Tensor, params: TokenEvictionParams
) -> tuple[dict[str, Scores], dict[tuple[str, int], Scores]]:
    """The methods on all tokens, and every arm of every budget on the first `curve_tokens`."""
    size = params.curve_tokens
    whole = score(model, runs.whole, tokens, "full")
    states = {f"{arm}@{budget}": own for (arm, budget), own in runs.curve.items()}
    states["full"] = runs.whole["full"][:, :size]
    found = score(model, states, tokens[:, :size], "full")
    curve = {key: found[f"{key[0]}@{key[1]}"] for key in runs.curve}
    curve |= {(name, params.budget): _first(own, size) for name, own in whole.items()}
    curve["full", size] = curve.pop(("full", params.budget))
    return whole, curve


def _first(scores: Scores, tokens: int) -> Scores:
    """Those of the first `tokens` tokens of each input."""
    parts = (scores.nats, scores.divergence, scores.correct)
    return Scores(*(part[:, : tokens - 1] for part in parts))


def block_difference(
    model: Llama,
    runs: Runs,
    curve: Mapping[tuple[str, int], Scores],
    tokens: Tensor,
    params: TokenEvictionParams,
) -> float:
    """Nats a token by which eviction by blocks is above eviction token by token (H2O).

    Over the tokens that `check` names, from its budget on.
    """
    check = params.check
    single = score(model, {"single": runs.single}, tokens[:, : check.tokens], "single")["single"]
    blocks = curve["h2o", check.budget].nats[:, : check.tokens - 1]
    return float((blocks - single.nats)[:, check.budget - 1 :].double().mean())


def method_table(
    whole: Mapping[str, Scores], attention: Mapping[str, float], params: TokenEvictionParams
) -> list[dict[str, Any]]:
    """One row a method at the main budget, on all tokens, and on those beyond it alone."""
    beyond = params.budget
    return [
        {
            "method": name,
            **_measures(own, whole["full"]),
            f"token_perplexity_beyond_{beyond}": own.perplexity(beyond),
            f"next_token_accuracy_beyond_{beyond}": own.accuracy(beyond),
            "attention_kept": attention.get(name, 1.0),
        }
        for name, own in whole.items()
    ]


def curve_table(curve: Mapping[tuple[str, int], Scores]) -> list[dict[str, Any]]:
    """One row an arm and budget, on the first `curve_tokens`."""
    full = next(own for (arm, _), own in curve.items() if arm == "full")
    return [
        {
            "arm": arm,
            "budget": budget,
            "positions": "compacted" if arm.endswith("compacted") else "kept",
            **_measures(own, full),
        }
        for (arm, budget), own in curve.items()
    ]


def _measures(own: Scores, full: Scores) -> dict[str, float]:
    return {
        "token_perplexity": own.perplexity(),
        "next_token_accuracy": own.accuracy(),
        "kl_nats": own.kl(),
        "nats_over_full": float((own.nats - full.nats).double().mean()),
        "nats_over_full_error": paired_error(own.nats, full.nats),
    }


def kept_attention(runs: Runs, block: int) -> dict[str, float]:
    """The share of full attention's weight in the last block that lies on what an arm holds.

    The block itself counts as held. A mean over layers, inputs and KV heads.
    """
    total = runs.attention.sum(-1)
    own = runs.attention[..., -block:].sum(-1)
    return {
        arm: float(((runs.attention.gather(-1, held).sum(-1) + own) / total).mean())
        for arm, held in runs.held.items()
    }


def held_table(runs: Runs) -> list[dict[str, Any]]:
    """Along the input, the share of heads that hold a token before the last block, at `budget`."""
    length = runs.attention.shape[-1]
    size = max(1, length // STRETCHES)
    rows = []
    for arm, held in runs.held.items():
        heads = held[..., 0].numel()
        counts = torch.bincount(held.flatten() // size, minlength=-(-length // size))
        for number, count in enumerate(counts.tolist()):
            share = count / (heads * min(size, length - number * size))
            rows.append({"arm": arm, "from_token": number * size, "share_held": share})
    return rows


def metrics(
    methods: Sequence[dict[str, Any]],
    curve: Sequence[dict[str, Any]],
    block_nats: float,
    params: TokenEvictionParams,
) -> dict[str, float]:
    """Perplexity, accuracy and attention kept of each method; the spread of random draws.

    `token_perplexity_random` is of one draw on all tokens, `token_perplexity_random_std_first` the
    standard deviation over draws of the first `curve_tokens`.
    """
    values: dict[str, float] = {}
    for key in ("token_perplexity", "next_token_accuracy", "attention_kept"):
        values |= {f"{key}_{row['method']}": row[key] for row in methods}
    del values["attention_kept_full"]
    draws = [
        row["token_perplexity"]
        for row in curve
        if row["budget"] == params.budget and row["arm"].split("_")[0] == "random"
    ]
    if len(draws) > 1:
        values["token_perplexity_random_std_first"] = statistics.stdev(draws)
    values["h2o_block_over_single_nats"] = block_nats
    return values
