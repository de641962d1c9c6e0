"""What a model's config.json says about its KV cache and its weights.

transformers knows each architecture's defaults and builds the model without memory (on torch's
meta device), which counts its parameters and shows the cache that it would fill. A config is
refused unless that cache takes exactly the bytes that `CacheShape` computes, so architectures that
keep something else (recurrent states, index keys, heads of several sizes) get no wrong number.
"""

import contextlib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.configuration_utils import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from inferlab.errors import InferlabError, suggestion
from inferlab.kvcache.shape import Architecture, CacheShape
from inferlab.models.loading import quieten
from inferlab.store import read_json

NAMED = ("llama_3_70b", "llama_3_8b", "mixtral_8x7b")
"""Models whose config.json stands, with its source, in configs/ beside this module."""

NEEDED = ("hidden_size", "num_hidden_layers")
DEFAULTED = ("num_attention_heads", "num_key_value_heads", "head_dim")
CHECKED_LENGTH = 64


def load_architecture(name: str) -> Architecture:
    """Read a named model, a config.json, or the one in a folder.

    Raises InferlabError when there is none, and as `architecture` does.
    """
    if name in NAMED:
        named = resources.files("inferlab.kvcache").joinpath("configs", f"{name}.json")
        with resources.as_file(named) as file:
            return architecture(read_json(file), name)
    file = Path(name, "config.json") if Path(name).is_dir() else Path(name)
    if not file.is_file():
        raise InferlabError(
            f"{name} is no config.json, no folder with one and no named model; "
            f"{suggestion(name, NAMED)}"
        )
    return architecture(read_json(file), str(file))


def architecture(config: Mapping[str, Any], name: str) -> Architecture:
    """Read the content of a config.json; `name` stands in messages.

    Raises InferlabError when a key is missing or wrong, when the architecture is unknown or no
    causal decoder, and when its cache is not what `CacheShape` describes.
    """
    quieten()
    assumed = _check_keys(config, name)
    with _refusing(name, "transformers cannot read it"):
        parsed = _parsed(config, name)
        shape = cache_shape(parsed, name)
        model = model_without_memory(parsed)
    length = max([CHECKED_LENGTH, *(window + 1 for window in shape.windows if window)])
    with _refusing(name, "transformers fills no cache that its size could be checked by"):
        found = static_cache_bytes(model, length)
    if found != (computed := shape.cache_bytes(length, "bf16")):
        raise InferlabError(
            f"{name}: the cache of {parsed.model_type} takes {found:,} bytes at {length:,} tokens, "
            f"not {computed:,} as keys and values of equal heads would; not sized here"
        )
    matrices = _matrix_parameters(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    return Architecture(name, shape, matrices, total - matrices, assumed)


def cache_shape(config: PretrainedConfig, name: str) -> CacheShape:
    """What the layers of a parsed config keep.

    Raises InferlabError when one keeps anything but keys and values of all or the last tokens.
    """
    decoder = config.get_text_config(decoder=True)
    layers = DynamicCache(config=decoder).layers
    for number, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise InferlabError(
                f"{name}: layer {number} of {config.model_type} keeps more than keys and values "
                f"or something else ({type(layer).__name__} in transformers); not sized here"
            )
    heads = decoder.num_attention_heads
    latent = getattr(decoder, "kv_lora_rank", None)
    size = getattr(decoder, "head_dim", None) or decoder.hidden_size // heads
    return CacheShape(
        query_heads=heads,
        kv_heads=1 if latent else getattr(decoder, "num_key_value_heads", None) or heads,
        key_dim=latent + decoder.qk_rope_head_dim if latent else size,
        value_dim=0 if latent else size,
        windows=tuple(layer.sliding_window if layer.is_sliding else None for layer in layers),
        context=getattr(decoder, "max_position_embeddings", None),
    )


def model_without_memory(config: PretrainedConfig) -> nn.Module:
    """The causal model of a config in bf16 on the meta device: shapes only."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@torch.inference_mode()
def static_cache_bytes(model: nn.Module, length: int) -> int:
    """Bytes that transformers' static cache sets aside for a sequence of `length` tokens."""
    cache = StaticCache(config=model.config, max_cache_len=length)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=token, past_key_values=cache, use_cache=True)
    return tensor_bytes(cache)


def tensor_bytes(cache: Cache) -> int:
    """Bytes of the keys and values that a cache of transformers holds."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _check_keys(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Raise InferlabError for a missing or impossible size; return the keys left to a default."""
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InferlabError(
            f"{name}: model_type {kind!r} is no causal language model that transformers knows; "
            "only those have a KV cache that is sized here"
        )
    text = config.get("text_config") or config
    key_of = {key: CONFIG_MAPPING[kind].attribute_map.get(key, key) for key in NEEDED + DEFAULTED}
    for key in key_of.values():
        value = text.get(key)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise InferlabError(f"{name}: {key} must be a whole number above 0; got {value!r}")
    for key in NEEDED:
        if text.get(key_of[key]) is None:
            raise InferlabError(f"{name}: {key_of[key]} is missing; give the model's whole config")
    hidden, heads, kv_heads, size = (text.get(key_of[key]) for key in ("hidden_size", *DEFAULTED))
    if heads and size is None and hidden % heads and "kv_lora_rank" not in text:
        raise InferlabError(
            f"{name}: head_dim is missing and {key_of['hidden_size']} {hidden} does not divide by "
            f"{key_of['num_attention_heads']} {heads}; give head_dim"
        )
    if heads and kv_heads and heads % kv_heads:
        raise InferlabError(
            f"{name}: {key_of['num_attention_heads']} {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}; each KV head serves equally many heads"
        )
    return tuple(key for key in DEFAULTED if text.get(key_of[key]) is None)


def _parsed(config: Mapping[str, Any], name: str) -> PretrainedConfig:
    # A quantized checkpoint's cache and parameters are those of the model that it was made from.
    parsed = AutoConfig.for_model(**{k: v for k, v in config.items() if k != "quantization_config"})
    if parsed.is_encoder_decoder or not getattr(parsed, "is_decoder", True):
        raise InferlabError(f"{name}: {parsed.model_type} is no decoder alone; not sized here")
    return parsed


def _matrix_parameters(model: nn.Module) -> int:
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    kept = {id(p) for table in [*tables, model.get_output_embeddings()] for p in table.parameters()}
    matrices = (p for p in model.parameters() if p.ndim > 1 and id(p) not in kept)
    return sum(matrix.numel() for matrix in matrices)


@contextlib.contextmanager
def _refusing(name: str, what: str) -> Iterator[None]:
    """Turn any fault of the library into one line: each architecture has faults of its own."""
    try:
        yield
    except InferlabError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InferlabError(f"{name}: {what} ({reason})") from error
