"""Rotary position embeddings (Su et al., 2021) and the ways in which models stretch them.

Channel i of a head turns with channel i + head_dim/2 by the angle position · frequency[i].
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inferlab.errors import InferlabError, lookup


@dataclass(frozen=True)
class Rope:
    """`frequencies`: [head_dim/2], fp32, radians a position; `magnitude` scales cos and sin."""

    frequencies: Tensor
    magnitude: float = 1.0

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at `positions` [...]: [..., head_dim/2], fp32."""
        angles = positions[..., None].float() * self.frequencies
        return angles.cos() * self.magnitude, angles.sin() * self.magnitude


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `heads` [..., head_dim] by angles that broadcast with [..., head_dim/2]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def read_rope(raw: Mapping[str, Any], head_dim: int, context: int) -> Rope:
    """The rotation that a config.json asks for, old style (rope_scaling) or new (rope_parameters).

    Raises InferlabError for an unknown rope_type, and for one that lacks a parameter.
    """
    scaling = {
        "rope_theta": raw.get("rope_theta", 10000.0),
        "original_max_position_embeddings": context,
        **(raw.get("rope_scaling") or raw.get("rope_parameters") or {}),
    }
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise InferlabError("partial_rotary_factor must be 1: whole heads are rotated")
    stretch = lookup(KINDS, kind, "rope_type")
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    try:
        return stretch(1.0 / scaling["rope_theta"] ** exponents, scaling)
    except KeyError as error:
        raise InferlabError(f"rope_type {kind!r} needs {error.args[0]!r}") from None


def _default(frequencies: Tensor, scaling: Mapping[str, Any]) -> Rope:
    return Rope(frequencies)


def _linear(frequencies: Tensor, scaling: Mapping[str, Any]) -> Rope:
    """Position interpolation (Chen et al., 2023)."""
    return Rope(frequencies / scaling["factor"])


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Rope:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, a ramp between them."""
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return Rope(frequencies * (kept + (1 - kept) / scaling["factor"]))


def _yarn(frequencies: Tensor, scaling: Mapping[str, Any]) -> Rope:
    """YaRN (Peng et al., 2023), section 3: a ramp over channels, and sharper attention."""
    factor, channels = scaling["factor"], len(frequencies)
    original, base = scaling["original_max_position_embeddings"], scaling["rope_theta"]

    def channel(turns: float) -> float:
        """The channel that turns so often within the original context."""
        return channels * math.log(original / (turns * 2 * math.pi)) / math.log(base)

    low, high = channel(scaling.get("beta_fast") or 32), channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * channels - 1)
    ramp = ((torch.arange(channels) - low) / max(high - low, 0.001)).clamp(0, 1)
    magnitude = scaling.get("attention_factor") or _sharpness(factor, scaling)
    return Rope(frequencies * (1 - ramp + ramp / factor), magnitude)


def _sharpness(factor: float, scaling: Mapping[str, Any]) -> float:
    whole, part = scaling.get("mscale"), scaling.get("mscale_all_dim")

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    return scale(whole) / scale(part) if whole and part else scale(1)


KINDS: dict[str, Callable[[Tensor, Mapping[str, Any]], Rope]] = {
    "default": _default,
    # NTK-aware scaling sets in beyond the model's maximum, where the runtime refuses to go.
    "dynamic": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
