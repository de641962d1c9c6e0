"""33.13: windows with and without anchors beside full attention, and a real bounded cache."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from inferlab import params as parameters
from inferlab.kvcache.scoring import Scores, by_position, paired_error, score
from inferlab.kvcache.windows import Arm, anchor_share, bounded_states, windowed_states
from inferlab.models.runtime.cache import KVCache, Window
from inferlab.models.runtime.llama import Llama

Positive = Annotated[int, Field(gt=0)]
STRETCH = 64
"""Tokens over which the curve of divergence is averaged."""


@parameters.section
class PositionParams:
    """Where the ways to treat positions are compared."""

    window: Positive
    far_tokens: Positive


@parameters.section
class SlidingWindowParams:
    """The section `sliding_window`."""

    tokens: Positive
    inputs: Positive
    dtype: Literal["bf16", "fp32"]
    windows: Annotated[tuple[Positive, ...], Field(min_length=1)]
    anchors: Positive
    positions: PositionParams
    decoded: Annotated[int, Field(ge=2)]

    def __post_init__(self) -> None:
        if min(self.windows) <= self.anchors:
            raise ValueError(
                f"windows must be larger than anchors {self.anchors}: a window holds them and at "
                f"least the token itself; got {min(self.windows)}"
            )
        if max(self.windows) + STRETCH >= self.tokens:
            raise ValueError(
                f"windows must be more than {STRETCH} below tokens {self.tokens}, or nothing "
                f"leaves them; got {max(self.windows)}"
            )
        if self.positions.window not in self.windows:
            raise ValueError(
                f"positions.window must be one of windows; got {self.positions.window}"
            )
        if not min(self.windows) < self.decoded <= self.tokens:
            raise ValueError(
                f"decoded must be above the smallest window, {min(self.windows)}, and at most "
                f"tokens {self.tokens}; got {self.decoded}"
            )

    @property
    def arms(self) -> dict[str, Arm]:
        """Every window with and without anchors; at one of them, other treatments of positions."""
        pairs = [Window(size, anchors) for size in self.windows for anchors in (0, self.anchors)]
        shown = Window(self.positions.window, self.anchors)
        others = [Arm(shown, treatment) for treatment in ("compacted", "distant")]
        return {arm.name: arm for arm in [*(Arm(window) for window in pairs), *others]}


@dataclass(frozen=True)
class Decoded:
    """What a real bounded cache did, token by token, beside masks."""

    divergence: float
    tokens_per_s: float


def scored_arms(model: Llama, tokens: Tensor, params: SlidingWindowParams) -> dict[str, Scores]:
    """Full attention and every arm on `tokens` [inputs, tokens]."""
    states = windowed_states(model, tokens, params.arms, params.positions.far_tokens)
    return score(model, states, tokens, "full")


def decoded_arms(
    model: Llama, tokens: Tensor, params: SlidingWindowParams
) -> tuple[dict[str, Decoded], float]:
    """Real bounded caches of the smallest window, and the rate of decoding with a full cache.

    They decode the first `decoded` tokens of one input from an empty cache. Their divergence from
    the masked passes is what rounding alone does.
    """
    start, smallest = tokens[:1, : params.decoded], min(params.windows)
    arms = {
        arm.name: arm
        for arm in params.arms.values()
        if arm.window.size == smallest and arm.positions == "kept"
    }
    masked = windowed_states(model, start, arms)
    found = {}
    for name, arm in arms.items():
        states, rate = _decode(model, start, arm.window)
        divergence = score(model, {name: masked[name], "real": states}, start, name)["real"]
        found[name] = Decoded(divergence.kl(), rate)
    return found, _decode(model, start, None)[1]


def arm_table(
    scores: Mapping[str, Scores], model: Llama, params: SlidingWindowParams
) -> list[dict[str, Any]]:
    """One row an arm: perplexity and divergence of all tokens and of those beyond every window."""
    beyond = max(params.windows)
    rows = []
    for name, own in scores.items():
        arm = params.arms.get(name)
        window = arm.window if arm else None
        cache = KVCache(model.config, 1, params.tokens, params.dtype, window)
        rows.append(
            {
                "arm": name,
                "window": window.size if window else params.tokens,
                "anchors": window.anchors if window else 0,
                "positions": arm.positions if arm else "kept",
                "token_perplexity": own.perplexity(),
                f"token_perplexity_beyond_{beyond}": own.perplexity(beyond),
                "kl_nats": own.kl(),
                f"kl_nats_beyond_{beyond}": own.kl(beyond),
                "nats_over_full": float((own.nats - scores["full"].nats).mean()),
                "nats_over_full_error": paired_error(own.nats, scores["full"].nats),
                "cache_bytes": cache.bytes,
            }
        )
    return rows


def position_table(scores: Mapping[str, Scores]) -> list[dict[str, Any]]:
    """Mean divergence along the input, one row an arm and stretch of tokens."""
    return [
        {"arm": name, "from_token": start + 1, "kl_nats": mean}
        for name, own in scores.items()
        if name != "full"
        for start, mean in by_position(own.divergence, STRETCH)
    ]


def metrics(
    rows: Sequence[dict[str, Any]], share: float, decoded: Mapping[str, Decoded]
) -> dict[str, float]:
    """Perplexities of full attention and of each window, and what explains and checks them."""
    values = {
        f"token_perplexity_{row['arm']}": row["token_perplexity"]
        for row in rows
        if row["positions"] == "kept"
    }
    values["anchor_attention_share"] = share
    values["bounded_cache_kl_nats"] = max(one.divergence for one in decoded.values())
    return values


def sink_share(model: Llama, tokens: Tensor, params: SlidingWindowParams) -> float:
    """What anchors get of full attention, by the last tokens of twice the shown window."""
    length = min(2 * params.positions.window, params.tokens)
    return anchor_share(model, tokens[:, :length], params.anchors, min(STRETCH, length - 1))


def _decode(model: Llama, tokens: Tensor, window: Window | None) -> tuple[Tensor, float]:
    model.hidden(tokens[:, :1], model.new_cache(1, 1))  # the kernel is built and loaded here
    start = time.perf_counter()
    with torch.inference_mode():
        if window is None:
            cache = model.new_cache(*tokens.shape)
            states = torch.cat([model.hidden(one, cache) for one in tokens.split(1, 1)], dim=1)
        else:
            states, _ = bounded_states(model, tokens, window)
    return states, tokens.shape[1] / (time.perf_counter() - start)
