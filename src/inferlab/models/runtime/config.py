"""What the runtime reads in a model's config.json, checked before any weight is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferlab.errors import InferlabError, lookup
from inferlab.models.runtime.rope import Rope, read_rope
from inferlab.store import Checkpoint, read_json

FAMILIES = {
    "llama": "Llama 1 to 3, SmolLM and others of that architecture",
    "mistral": "the same with a sliding window",
    "qwen2": "the same with biases of q, k and v",
    "qwen3": "the same with norms of q and k",
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a model. `context`: most positions; `window`: 0, or how far a token looks back."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    window: int
    norm_epsilon: float
    rope: Rope
    tied: bool
    end_tokens: tuple[int, ...]

    @property
    def group(self) -> int:
        """Query heads that share one key and value head."""
        return self.heads // self.kv_heads


def read_config(checkpoint: Checkpoint) -> LlamaConfig:
    """The sizes of a checkpoint's model.

    Without num_key_value_heads every head has its own keys; without head_dim it is
    hidden_size / num_attention_heads. Raises InferlabError for another architecture, a missing or
    impossible size, and for what this runtime does not compute.
    """
    raw, folder = checkpoint.config, checkpoint.folder
    try:
        lookup(FAMILIES, raw.get("model_type", "none"), "architecture of the runtime (model_type)")
        sizes = {name: _size(raw, name) for name in (*SIZES, "num_attention_heads")}
        kv_heads = _size(raw, "num_key_value_heads", sizes["num_attention_heads"])
        head_dim = _head_dim(raw, sizes["hidden_size"], sizes["num_attention_heads"])
        context = _size(raw, "max_position_embeddings")
        _check_computable(raw, sizes["num_attention_heads"], kv_heads)
        rope = read_rope(raw, head_dim, context)
    except InferlabError as error:
        raise InferlabError(f"{folder / 'config.json'}: {error}") from None
    return LlamaConfig(
        *(sizes[name] for name in SIZES),
        heads=sizes["num_attention_heads"],
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=context,
        window=_window(raw),
        norm_epsilon=raw.get("rms_norm_eps", 1e-6),
        rope=rope,
        tied=raw.get("tie_word_embeddings", False),
        end_tokens=_end_tokens(raw, folder),
    )


def _size(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name, default)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise InferlabError(f"{name} must be a whole number above 0; found {value!r}")
    return value


def _head_dim(raw: Mapping[str, Any], hidden: int, heads: int) -> int:
    if raw.get("head_dim") is None and hidden % heads:
        raise InferlabError(
            f"head_dim is missing and hidden_size {hidden} does not divide by "
            f"num_attention_heads {heads}; add the head_dim that the weights have"
        )
    return _size(raw, "head_dim", hidden // heads)


def _check_computable(raw: Mapping[str, Any], heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise InferlabError(
            f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
        )
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise InferlabError(f"hidden_act must be silu; found {activation!r}")
    kinds = set(raw.get("layer_types") or [])
    if len(kinds) > 1:
        raise InferlabError(
            f"layer_types mixes {' and '.join(sorted(kinds))}; the runtime treats all layers alike"
        )


def _window(raw: Mapping[str, Any]) -> int:
    """Mistral's sliding window. Qwen names one in its config that use_sliding_window turns off."""
    kinds = raw.get("layer_types")
    full = kinds[0] == "full_attention" if kinds else not raw.get("use_sliding_window", True)
    return 0 if full else raw.get("sliding_window") or 0


def _end_tokens(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """Tokens that end a text; generation_config.json may name more of them than config.json."""
    file = folder / "generation_config.json"
    settings = read_json(file) if file.is_file() else {}
    found = settings.get("eos_token_id", raw.get("eos_token_id"))
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)
