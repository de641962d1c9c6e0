"""What is left of a layer's output when its K/V heads are replaced by the means of groups of them.

For random heads there is a closed form. Let inputs be normal, of `hidden` numbers a token, weights
too, correlated by ρ between any two heads, and a group pool g of them. Then a mean keeps the share
r = (1 + (g − 1) ρ) / g of a head's variance, and that is also their covariance. So a value and its
mean have the cosine √r. Scores of variance τ over the n keys become scores of variance r τ, with
covariance r τ. Softmax tilts the mean of what it weighs: for scores of variance a its energy is
a + m eᵃ, with m = hidden / n, where the second term is what is left of the noise of n keys; of two
patterns with covariance c the product is c + m eᶜ. With keys pooled the cosine is therefore
√((r τ + m e^(r τ)) / (τ + m e^τ)), and of the whole output the product of both.
"""

import math
from statistics import fmean, pstdev
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from inferlab import params as parameters
from inferlab.attention.grouped import grouped_attention, pool_heads

Part = Literal["keys", "values", "both"]
PARTS: tuple[Part, ...] = ("keys", "values", "both")
Share = Annotated[float, Field(ge=0, le=1)]


@parameters.section
class RandomHeadsParams:
    """The block `random` of the section `attention_variants`."""

    tokens: Annotated[int, Field(gt=0)]
    queries: Annotated[int, Field(gt=0)]
    correlations: Annotated[tuple[Share, ...], Field(min_length=1)]
    score_std: Annotated[float, Field(gt=0)]
    seeds: Annotated[int, Field(ge=1)]

    def __post_init__(self) -> None:
        if self.queries > self.tokens:
            raise ValueError(
                f"queries must be at most tokens, {self.tokens}, the last of which they are; "
                f"got {self.queries}"
            )
        if 0 not in self.correlations:
            raise ValueError(
                "correlations must contain 0, independent heads, for the metrics; "
                f"got {list(self.correlations)}"
            )


def kept_share(pooled: int, correlation: float) -> float:
    """r: the share of a head's variance that the mean of `pooled` correlated heads keeps."""
    return (1 + (pooled - 1) * correlation) / pooled


def expected_cosine(
    pooled: int, correlation: float, score_variance: float, ratio: float, part: Part = "both"
) -> float:
    """The closed form above, with keys, values or both replaced by means of `pooled` heads.

    `ratio`: m, the numbers of an input over the number of keys.
    """
    kept = kept_share(pooled, correlation)
    lower, whole = kept * score_variance, score_variance
    of_keys = math.sqrt((lower + ratio * math.exp(lower)) / (whole + ratio * math.exp(whole)))
    of_values = math.sqrt(kept)
    return {"keys": of_keys, "values": of_values, "both": of_keys * of_values}[part]


def cosine(first: Tensor, second: Tensor) -> float:
    """Mean cosine similarity of two outputs [..., hidden], over everything but `hidden`."""
    return float(F.cosine_similarity(first, second, dim=-1).mean())


def random_cosines(
    heads: int, head_dim: int, groups: tuple[int, ...], params: RandomHeadsParams, device: str
) -> list[dict[str, Any]]:
    """Measured and expected cosine of a random layer's outputs, by KV heads, correlation and part.

    One row a combination; ± is the standard deviation over seeds.
    """
    ratio = heads * head_dim / (params.tokens - (params.queries - 1) / 2)
    runs = [_one_seed(heads, head_dim, groups, params, device, n) for n in range(params.seeds)]
    return [
        {
            "series": f"{part}, {kv_heads} KV heads" if kv_heads > 1 else f"{part}, 1 KV head",
            "kv_heads": kv_heads,
            "part": part,
            "correlation": correlation,
            "cosine": fmean(run[kv_heads, correlation, part] for run in runs),
            "cosine_std": pstdev(run[kv_heads, correlation, part] for run in runs),
            "expected": expected_cosine(
                heads // kv_heads, correlation, params.score_std**2, ratio, part
            ),
        }
        for kv_heads in groups
        for part in PARTS
        for correlation in params.correlations
    ]


@torch.inference_mode()
def _one_seed(
    heads: int,
    head_dim: int,
    groups: tuple[int, ...],
    params: RandomHeadsParams,
    device: str,
    seed: int,
) -> dict[tuple[int, float, Part], float]:
    """Cosines by KV heads, correlation and part; random inputs, the last tokens as queries.

    Correlated heads share a component. Projections are linear, so it is projected once and mixed
    with the heads' own for every correlation.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = heads * head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    states = normal(params.tokens, hidden)

    def projected(count: int, inputs: Tensor) -> Tensor:
        """[1, count, tokens, head_dim], of variance `score_std`: scores then have its square."""
        weight = normal(count * head_dim, hidden) * math.sqrt(params.score_std / hidden)
        return F.linear(inputs, weight).unflatten(-1, (count, head_dim)).transpose(0, 1)[None]

    queries = projected(heads, states[-params.queries :])
    own = [projected(heads, states) for _ in ("keys", "values")]
    shared = [projected(1, states) for _ in ("keys", "values")]
    output = normal(hidden, hidden)

    def layer_output(keys: Tensor, values: Tensor) -> Tensor:
        mixed = grouped_attention(queries, keys, values)
        return F.linear(mixed.transpose(1, 2).flatten(2), output)

    found: dict[tuple[int, float, Part], float] = {}
    for correlation in params.correlations:
        keys, values = (
            math.sqrt(correlation) * common + math.sqrt(1 - correlation) * each
            for common, each in zip(shared, own, strict=True)
        )
        exact = layer_output(keys, values)
        for kv_heads in groups:
            for part in PARTS:
                pooled = replaced(keys, values, part, kv_heads)
                found[kv_heads, correlation, part] = cosine(exact, layer_output(*pooled))
    return found


def replaced(keys: Tensor, values: Tensor, part: Part, groups: int) -> tuple[Tensor, Tensor]:
    """`keys` and `values` [batch, heads, tokens, head_dim], of `part` the means of groups.

    Means are repeated, so that both keep their number of heads.
    """
    each = keys.shape[1] // groups

    def means(heads: Tensor) -> Tensor:
        return pool_heads(heads, 1, groups).repeat_interleave(each, 1)

    return (
        keys if part == "values" else means(keys),
        values if part == "keys" else means(values),
    )
