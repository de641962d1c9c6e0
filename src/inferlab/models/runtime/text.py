"""From text to text: a prompt in, pieces of text out as they are decoded, and how fast it went."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from inferlab.errors import InferlabError
from inferlab.models.loading import load_tokenizer, quieten
from inferlab.models.runtime.cache import KVCache
from inferlab.models.runtime.decoding import Sampling, generate
from inferlab.models.runtime.llama import Llama


@dataclass
class Timing:
    """Seconds and tokens of one text: up to the first new token, and from there on."""

    prompt_tokens: int
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_rate(self) -> float | None:
        """New tokens a second after the first, which prefill gave; None where there is no more."""
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 else None


def open_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint's folder. Raises InferlabError when there is none to stream."""
    quieten()
    try:
        tokenizer = load_tokenizer(folder)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InferlabError(
            f"{folder} has no tokenizer that can be loaded ({reason}); add its tokenizer.json"
        ) from None
    if not tokenizer.is_fast:
        raise InferlabError(f"{folder}: the tokenizer decodes no stream; add its tokenizer.json")
    return tokenizer


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool) -> list[int]:
    """The tokens of `text`; with `chat`, as what a user says in the model's chat template.

    Raises InferlabError for a text without tokens and a tokenizer without a template.
    """
    if not text.strip():
        raise InferlabError("the prompt is empty; give some text, or pipe it in")
    if not chat:
        return tokenizer(text).input_ids
    if tokenizer.chat_template is None:
        raise InferlabError("the tokenizer has no chat template; leave --chat out")
    message = [{"role": "user", "content": text.strip()}]
    whole = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return tokenizer(whole, add_special_tokens=False).input_ids


def stream(
    model: Llama,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    new_tokens: int,
    sampling: Sampling,
    cache: KVCache,
    timing: Timing,
) -> Iterator[str]:
    """Text that follows `prompt`, piece by piece; `timing` is kept up to date.

    A piece comes when its bytes are whole characters; special tokens are left out. Raises
    InferlabError as `generate` does.
    """
    decoder = DecodeStream(skip_special_tokens=True)
    start = first = time.perf_counter()
    for (token,) in generate(model, [prompt], new_tokens, sampling, cache):
        now = time.perf_counter()
        timing.new_tokens += 1
        if timing.new_tokens == 1:
            first = now
            timing.prefill_seconds = now - start
        timing.decode_seconds = now - first
        if piece := decoder.step(tokenizer.backend_tokenizer, token):
            yield piece


def token_bytes(model: Llama, cache: KVCache) -> int:
    """Bytes that decoding the next token reads: the weights and the cache in use."""
    return weight_bytes(model) + cache.bytes * cache.used // (cache.slots + 1)


def weight_bytes(model: Llama) -> int:
    """Bytes of weights that one decoded token reads: all linear layers and the head."""
    linears = [one for layer in model.layers for part in layer.projections for one in part.parts]
    return sum(tensor.nbytes for one in [*linears, model.head] for tensor in one.tensors)
