"""33.12: the cache in 16 and 8 bits - bytes, errors of every head, and what the model loses."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from inferlab import params as parameters
from inferlab.errors import InferlabError, suggestion
from inferlab.kvcache.rounded_cache import Arm, rounded_states, turned
from inferlab.kvcache.rounding import FORMATS, head_errors, store
from inferlab.kvcache.scoring import Scores, paired_error, score
from inferlab.models.runtime.llama import Llama

Positive = Annotated[int, Field(gt=0)]
Names = Annotated[tuple[str, ...], Field(min_length=1)]
EXACT = "fp32"


@parameters.section
class KvQuantizationParams:
    """The section `kv_quantization`."""

    tokens: Annotated[int, Field(ge=2)]
    inputs: Positive
    formats: Names
    before_rope: tuple[str, ...]
    apart: str

    def __post_init__(self) -> None:
        for key in ("formats", "before_rope", "apart"):
            given = getattr(self, key)
            for name in (given,) if isinstance(given, str) else given:
                if name not in FORMATS:
                    raise ValueError(
                        f"{key}: unknown dtype of the cache {name!r}; {suggestion(name, FORMATS)}"
                    )

    @property
    def arms(self) -> dict[str, Arm]:
        """The formats; some before the rotation; one on keys and on values alone."""
        arms = {name: Arm(name, name) for name in (EXACT, *self.formats)}
        arms |= {f"{name}_before_rope": Arm(name, name, True) for name in self.before_rope}
        arms[f"{self.apart}_keys_only"] = Arm(self.apart, EXACT)
        arms[f"{self.apart}_values_only"] = Arm(EXACT, self.apart)
        return arms


@dataclass(frozen=True)
class Captured:
    """A real cache in fp32, [layers, inputs, kv_heads, tokens, head_dim] each.

    `plain_keys` are those before the rotation.
    """

    keys: Tensor
    plain_keys: Tensor
    values: Tensor

    @property
    def kinds(self) -> dict[str, Tensor]:
        """By name."""
        return {
            "keys": self.keys,
            "keys before rope": self.plain_keys,
            "values": self.values,
        }


def take_tokens(windows: Tensor, params: KvQuantizationParams) -> Tensor:
    """The first `tokens` of the first `inputs` of `windows` [windows, length].

    Raises InferlabError when there are not so many.
    """
    for key, found in zip(("inputs", "tokens"), windows.shape, strict=True):
        if (asked := getattr(params, key)) > found:
            raise InferlabError(
                f"kv_quantization.{key} is {asked}, but stage prepare has cut {windows.shape[0]} "
                f"windows of {windows.shape[1]} tokens; take {found} or less"
            )
    return windows[: params.inputs, : params.tokens].long()


def run_arms(
    model: Llama, tokens: Tensor, params: KvQuantizationParams
) -> tuple[dict[str, Scores], Captured]:
    """Every arm on `tokens` [inputs, tokens], and the cache that stayed exact."""
    states = {}
    for name, arm in params.arms.items():
        states[name], cache = rounded_states(model, tokens, arm)
        if name == EXACT:
            used = slice(tokens.shape[1])
            keys, values = cache.keys[..., used, :], cache.values[..., used, :]
            captured = Captured(keys, turned(keys, model.config.rope, back=True), values)
    return score(model, states, tokens, EXACT), captured


def synthetic(captured: Captured, seed: int) -> Tensor:
    """Standard normal numbers in the shape of the real keys."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(captured.keys.shape, generator=generator)


def head_table(captured: Captured, params: KvQuantizationParams) -> list[dict[str, Any]]:
    """Relative error of every head of the first input in each INT8 format."""
    rows = []
    for kind, vectors in captured.kinds.items():
        peaks = vectors[:, 0].abs().amax((-1, -2)) / vectors[:, 0].square().mean((-1, -2)).sqrt()
        for name in (name for name in params.formats if name.startswith("int8")):
            errors = torch.stack([head_errors(x, y) for x, y in _layers(vectors, name)])[:, 0]
            rows += [
                {
                    "layer": layer,
                    "head": head,
                    "kind": kind,
                    "format": name,
                    "relative_error": float(errors[layer, head]),
                    "peak_over_rms": float(peaks[layer, head]),
                }
                for layer in range(errors.shape[0])
                for head in range(errors.shape[1])
            ]
    return rows


def token_bytes(vectors: Tensor, dtype: str) -> float:
    """Bytes of a token in all layers of `vectors` [layers, inputs, kv_heads, tokens, head_dim]."""
    held = sum(store(layer, dtype).bytes for layer in vectors)
    return held / (vectors.shape[1] * vectors.shape[3])


def error_table(
    captured: Captured, params: KvQuantizationParams, seed: int
) -> list[dict[str, Any]]:
    """Of real and synthetic tensors in each format: relative and largest errors, bytes a token."""
    rows = []
    for kind, vectors in {**captured.kinds, "synthetic": synthetic(captured, seed)}.items():
        for name in params.formats:
            pairs = list(_layers(vectors, name))
            errors = torch.stack([head_errors(x, y) for x, y in pairs])
            rows.append(
                {
                    "tensor": kind,
                    "format": name,
                    "series": f"{kind}, {name}",
                    "relative_error": float(errors.mean()),
                    "relative_error_worst_head": float(errors.max()),
                    "largest_error": max(float((x - y).abs().max()) for x, y in pairs),
                    "bytes_per_token": token_bytes(vectors, name),
                }
            )
    return rows


def arm_table(
    scores: Mapping[str, Scores], captured: Captured, params: KvQuantizationParams
) -> list[dict[str, Any]]:
    """One row an arm: bytes of a token's keys and values, perplexity, divergence from fp32."""
    rows = []
    for name, own in scores.items():
        arm = params.arms[name]
        size = token_bytes(captured.keys, arm.keys) + token_bytes(captured.values, arm.values)
        rows.append(
            {
                "arm": name,
                "bytes_per_token": size,
                "token_perplexity": own.perplexity(),
                "next_token_accuracy": own.accuracy(),
                "kl_nats": own.kl(),
                "kl_nats_largest": float(own.divergence.max()),
                "nats_over_fp32": float((own.nats - scores[EXACT].nats).double().mean()),
                "nats_over_fp32_error": paired_error(own.nats, scores[EXACT].nats),
            }
        )
    return rows


def metrics(rows: Sequence[dict[str, Any]], params: KvQuantizationParams) -> dict[str, float]:
    """Perplexity of every format, and the divergence of those in 8 bits."""
    of_arm = {row["arm"]: row for row in rows}
    values = {
        f"token_perplexity_{name}": of_arm[name]["token_perplexity"]
        for name in dict.fromkeys((EXACT, *params.formats))
    }
    eight = [name for name in params.formats if name.startswith("int8")]
    return values | {f"kl_nats_{name}": of_arm[name]["kl_nats"] for name in eight}


def _layers(vectors: Tensor, dtype: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Each layer of `vectors` [layers, inputs, kv_heads, tokens, head_dim] and what is restored."""
    return ((layer, store(layer, dtype).restored) for layer in vectors)
