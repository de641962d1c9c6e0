"""The bytes that a KV cache takes, from the shape of a model's attention.

Each layer keeps a key and a value for each token and KV head; a layer with a window keeps no more
than those of its last `window` tokens. Latent attention (DeepSeek-V2, arXiv:2405.04434, section
2.1) keeps one vector for all heads: one KV head with a key and no value.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from inferlab.errors import InferlabError, lookup

SCALE_BYTES = 4  # fp32, as the cache of models/runtime keeps them


@dataclass(frozen=True)
class CacheType:
    """How the numbers of a key or value are stored."""

    number_bytes: int
    vector_bytes: int = 0
    """Beside each key and each value: its own scale, where the type has one."""


CACHE_TYPES: Mapping[str, CacheType] = {
    "fp32": CacheType(4),
    "fp16": CacheType(2),
    "bf16": CacheType(2),
    "fp8": CacheType(1),
    "int8": CacheType(1, SCALE_BYTES),
}


@dataclass(frozen=True)
class CacheShape:
    """The attention of a decoder. `windows` has one entry a layer, None where it sees all tokens.

    `key_dim` and `value_dim` are the numbers of one head's key and value. `context` is the longest
    sequence that the model takes, None where its config names none.
    """

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    windows: tuple[int | None, ...]
    context: int | None

    def cache_bytes(self, length: int, dtype: str, batch: int = 1, gpus: int = 1) -> int:
        """Bytes on each of `gpus` GPUs (tensor parallel) of `batch` sequences of `length` tokens.

        A GPU holds one KV head at least, so with more GPUs than KV heads the heads are replicated.
        Raises InferlabError for an unknown dtype or when the heads cannot be shared out.
        """
        kind = lookup(CACHE_TYPES, dtype, "cache dtype")
        self.check_degree(gpus)
        heads = max(1, self.kv_heads // gpus)
        sizes = [size for size in (self.key_dim, self.value_dim) if size]
        vectors = sum(size * kind.number_bytes + kind.vector_bytes for size in sizes)
        tokens = sum(min(length, window or length) for window in self.windows)
        return batch * tokens * heads * vectors

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes of one token of one sequence in all layers, before any window is full."""
        return self.cache_bytes(1, dtype)

    def check_degree(self, gpus: int) -> None:
        """Raise InferlabError unless the attention heads can be shared out among `gpus` GPUs."""
        if gpus not in self.degrees():
            known = ", ".join(str(degree) for degree in self.degrees())
            raise InferlabError(
                f"{gpus} GPUs cannot share {self.query_heads} heads with {self.kv_heads} KV heads "
                f"evenly; the degree of tensor parallelism can be {known}"
            )

    def degrees(self) -> list[int]:
        """Every number of GPUs among which the heads can be shared out evenly."""
        return [
            gpus
            for gpus in range(1, self.query_heads + 1)
            if self.query_heads % gpus == 0
            and (self.kv_heads % gpus == 0 or gpus % self.kv_heads == 0)
        ]


@dataclass(frozen=True)
class Architecture:
    """A model by its config alone: what its cache keeps, and how many parameters it has."""

    name: str
    shape: CacheShape
    matrices: int
    """Parameters of all matrices but embeddings and output head; of a mixture, all experts'."""
    others: int
    """Parameters of embeddings, output head, norms and biases."""
    assumed: tuple[str, ...]
    """Keys that the config leaves out, so that the architecture's default stands."""
