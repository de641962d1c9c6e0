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
    """What the passes leave. `states`: by (arm, budget), [inputs, tokens, hidden].

    `held`: by arm, at the main budget, before the last block: the positions that each head holds,
    [layers, inputs, kv_heads, kept]. `attention`: what full attention of the last block's queries
    gave each position, [layers, inputs, kv_heads, tokens]. `single`: states of eviction token by
    token. `decode_ms`: of a decoded token, by what is kept.
    """

    states: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)
    single: Tensor = field(default_factory=lambda: torch.empty(0))
    attention: Tensor = field(default_factory=lambda: torch.empty(0))
    decode_ms: dict[str, float] = field(default_factory=dict)


def run_all(model: Llama, tokens: Tensor, params: TokenEvictionParams, seed: int) -> Runs:
    """Every arm at every budget on `tokens` [inputs, tokens].

    Until the first eviction all arms are full attention, so each branches off from one full cache.
    """
    inputs, length = tokens.shape
    full = EvictingCache(model.config, [Arm(None)], inputs, length, params.block, model.dtype)
    runs, pieces, last = Runs(), [], length - params.block
    for budget in sorted(set(params.budgets)):
        pieces.append(run(model, full, tokens[:, full.length : budget - params.block]))
        prefix = torch.cat(pieces, dim=1)
        states, held = run_arms(model, full, params.arms(budget, seed), budget, tokens)
        for name, rest in states.items():
            runs.states[name, budget] = torch.cat((prefix, rest), dim=1)
        if budget == params.budget:
            runs.held = held
            runs.decode_ms = decode_costs(model, full, tokens, params)
        if budget == params.check.budget:
            single = full.branch([Arm(params.policy("h2o", budget))], budget, 1)
            rest = run(model, single, tokens[:, full.length : params.check.tokens])
            runs.single = torch.cat((prefix, rest), dim=1)
    pieces.append(run(model, full, tokens[:, full.length : last]))
    before = full.scores.clone()
    pieces.append(run(model, full, tokens[:, last:]))
    runs.attention = full.scores - before
    runs.states["full", length] = torch.cat(pieces, dim=1)
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


def score_all(model: Llama, runs: Runs, tokens: Tensor) -> dict[tuple[str, int], Scores]:
    """Every arm of every budget beside the full cache."""
    names = {f"{arm}@{budget}": (arm, budget) for arm, budget in runs.states}
    states = {name: runs.states[key] for name, key in names.items()}
    reference = next(name for name, (arm, _) in names.items() if arm == "full")
    found = score(model, states, tokens, reference)
    return {key: found[name] for name, key in names.items()}


def block_difference(
    model: Llama,
    runs: Runs,
    scores: Mapping[tuple[str, int], Scores],
    tokens: Tensor,
    params: TokenEvictionParams,
) -> float:
    """Nats a token by which eviction by blocks is above eviction token by token (H2O).

    Over the tokens that `check` names, from its budget on.
    """
    check = params.check
    single = score(model, {"single": runs.single}, tokens[:, : check.tokens], "single")["single"]
    blocks = scores["h2o", check.budget].nats[:, : check.tokens - 1]
    return float((blocks - single.nats)[:, check.budget - 1 :].double().mean())


def arm_table(
    scores: Mapping[tuple[str, int], Scores],
    attention: Mapping[str, float],
    params: TokenEvictionParams,
) -> list[dict[str, Any]]:
    """One row an arm and budget; perplexity also of the tokens beyond the main budget alone.

    `attention`: of `kept_attention`, which is empty in the table at other budgets.
    """
    full = next(own for (arm, _), own in scores.items() if arm == "full")
    beyond = params.budget
    return [
        {
            "arm": arm,
            "budget": budget,
            "series": f"{arm}, {budget}",
            "positions": "compacted" if arm.endswith("compacted") else "kept",
            "token_perplexity": own.perplexity(),
            f"token_perplexity_beyond_{beyond}": own.perplexity(beyond),
            "next_token_accuracy": own.accuracy(),
            f"next_token_accuracy_beyond_{beyond}": own.accuracy(beyond),
            "kl_nats": own.kl(),
            "nats_over_full": float((own.nats - full.nats).double().mean()),
            "nats_over_full_error": paired_error(own.nats, full.nats),
            "attention_kept": attention[arm] if budget == params.budget else "",
        }
        for (arm, budget), own in scores.items()
    ]


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
    rows: Sequence[dict[str, Any]],
    attention: Mapping[str, float],
    block_nats: float,
    params: TokenEvictionParams,
) -> dict[str, float]:
    """Perplexity and accuracy of each method at `budget`; of random eviction the mean of seeds."""
    at = {row["arm"]: row for row in rows if row["budget"] == params.budget}
    groups = {name: [row for arm, row in at.items() if _method(arm) == name] for name in at}
    shown = {"full": [row for row in rows if row["arm"] == "full"]}
    shown |= {name: groups[name] for name in params.methods}
    values: dict[str, float] = {}
    for key in ("token_perplexity", "next_token_accuracy"):
        for name, own in shown.items():
            values[f"{key}_{name}"] = statistics.fmean(row[key] for row in own)
    if len(draws := [row["token_perplexity"] for row in shown.get("random", [])]) > 1:
        values["token_perplexity_random_std"] = statistics.stdev(draws)
    values |= {f"attention_kept_{name}": attention[name] for name in params.methods}
    values["h2o_block_over_single_nats"] = block_nats
    return values


def _method(arm: str) -> str:
    """The method that an arm is a draw of; compacted arms stand for themselves."""
    return "random" if arm.startswith("random") else arm
