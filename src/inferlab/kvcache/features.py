"""What makes a runtime lean, feature by feature, and one interface to it and to transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from inferlab.evaluation.perplexity import check_context
from inferlab.evaluation.perplexity import window_nats as transformers_nats
from inferlab.kvcache.architecture import tensor_bytes
from inferlab.models.loading import load_model
from inferlab.models.runtime.cache import KVCache, Window
from inferlab.models.runtime.llama import Llama
from inferlab.models.runtime.loading import load_llama
from inferlab.models.runtime.scoring import window_nats

TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Features:
    """What is switched on. With nothing: 16-bit weights read into memory, and a full cache."""

    mapped: bool = False
    int8_weights: bool = False
    int8_cache: bool = False
    window: Window | None = None

    @property
    def weights(self) -> str:
        """The dtype of the linear layers' weights."""
        return "int8" if self.int8_weights else "bf16"

    @property
    def cache(self) -> str:
        """The dtype of keys and values."""
        return "int8" if self.int8_cache else "bf16"


def runtime_arms(window: Window) -> dict[str, Features]:
    """The runtime with no feature, with each on its own, and with all together."""
    return {
        "runtime": Features(),
        "mapped": Features(mapped=True),
        "int8_weights": Features(int8_weights=True),
        "int8_cache": Features(int8_cache=True),
        "window": Features(window=window),
        "all": Features(mapped=True, int8_weights=True, int8_cache=True, window=window),
    }


class Engine(Protocol):
    """A model that decodes greedily; `start` has taken in the prompts before anything else."""

    def start(self, prompts: Tensor, new_tokens: int) -> None:
        """Take in `prompts` [batch, tokens]; up to `new_tokens` will follow."""

    def decode(self, count: int) -> None:
        """Take in the likeliest token of each sequence, `count` times."""

    def rewind(self, count: int) -> None:
        """Forget the `count` tokens decoded since the prompts."""

    def nats(self, tokens: Tensor) -> Tensor:
        """Nats of each window of `tokens` [batch, length], whose first token is context."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys, values and scales."""


class RuntimeEngine:
    """The lean runtime with some features."""

    def __init__(self, model: Llama, features: Features) -> None:
        self.model, self.features = model, features
        self._cache: KVCache
        self._first = self._token = torch.empty(0)

    def start(self, prompts: Tensor, new_tokens: int) -> None:
        """As of `Engine`. Raises InferlabError when the model's context is too short."""
        capacity = prompts.shape[1] + new_tokens
        kept = (self.features.cache, self.features.window)
        self._cache = self.model.new_cache(len(prompts), capacity, *kept)
        self._first = self._token = self._likeliest(self.model.hidden(prompts, self._cache))

    def decode(self, count: int) -> None:
        """As of `Engine`."""
        for _ in range(count):
            self._token = self._likeliest(self.model.hidden(self._token, self._cache))

    def rewind(self, count: int) -> None:
        """As of `Engine`. Raises InferlabError when a bounded cache holds no more that far back."""
        self._cache.truncate(self._cache.lengths - count)
        self._token = self._first

    def nats(self, tokens: Tensor) -> Tensor:
        """As of `Engine`."""
        return window_nats(self.model, tokens, self.features.cache, self.features.window)

    @property
    def cache_bytes(self) -> int:
        """As of `Engine`."""
        return self._cache.bytes

    def _likeliest(self, states: Tensor) -> Tensor:
        return self.model.logits(states[:, -1:]).argmax(-1)


class TransformersEngine:
    """The plain implementation: transformers, 16 bits, the cache that it uses by default."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._cache: DynamicCache
        self._first = self._token = torch.empty(0)

    def start(self, prompts: Tensor, new_tokens: int) -> None:
        """As of `Engine`. Raises InferlabError when the model's context is too short."""
        check_context(self.model, prompts.shape[1] + new_tokens, "prompts and new tokens")
        self._cache = DynamicCache(config=self.model.config)
        self._first = self._token = self._likeliest(prompts)

    def decode(self, count: int) -> None:
        """As of `Engine`."""
        for _ in range(count):
            self._token = self._likeliest(self._token)

    def rewind(self, count: int) -> None:
        """As of `Engine`."""
        self._cache.crop(-count)
        self._token = self._first

    def nats(self, tokens: Tensor) -> Tensor:
        """As of `Engine`."""
        return transformers_nats(self.model, tokens)

    @property
    def cache_bytes(self) -> int:
        """As of `Engine`."""
        return tensor_bytes(self._cache)

    @torch.inference_mode()
    def _likeliest(self, tokens: Tensor) -> Tensor:
        # Only the last position's logits, as generation needs them.
        output = self.model(
            input_ids=tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        return output.logits.argmax(-1)


def load_engine(
    features: Features | None, folders: Mapping[str, Path], threads: int
) -> RuntimeEngine | TransformersEngine:
    """The runtime with `features`, or transformers without any.

    `folders`: the checkpoint of each dtype of weights, "bf16" and "int8". Raises InferlabError when
    one is no checkpoint, or of an architecture that the runtime does not know.
    """
    if features is None:
        return TransformersEngine(load_model(folders["bf16"], threads))
    model = load_llama(folders[features.weights], mapped=features.mapped)
    return RuntimeEngine(model, features)
