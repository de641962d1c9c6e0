"""The same prompts in vLLM, plainly and with its n-gram speculation, each in its own process."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferlab.serving.offline import alone


@dataclass(frozen=True)
class Load:
    """Prompts for one engine, one at a time, greedily. `lookup`: longest and shortest match."""

    model: Path
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    length: int
    lookup: tuple[int, int]
    threads: int


def ngram_speedup(load: Load) -> float:
    """Tokens per second after the first with n-gram speculation, over those without.

    Median over prompts of ratios of the same prompt. Raises InferlabError when an engine dies.
    """
    told = "the process that runs vLLM died; if memory ran out, set draft_models.vllm to false"
    plain, speculative = (alone(_rates, load, speculate, told=told) for speculate in (False, True))
    return statistics.median(b / a for a, b in zip(plain, speculative, strict=True))


def _rates(load: Load, speculate: bool) -> list[float]:
    """Tokens per second after the first, of each prompt."""
    os.environ["OMP_NUM_THREADS"] = str(load.threads)
    from vllm import LLM, SamplingParams

    longest, shortest = load.lookup
    method: dict[str, Any] = {
        "method": "ngram",
        "num_speculative_tokens": load.length,
        "prompt_lookup_max": longest,
        "prompt_lookup_min": shortest,
    }
    room = max(map(len, load.prompts)) + load.new_tokens
    engine = LLM(
        str(load.model),
        enforce_eager=True,
        max_model_len=room + load.length,
        max_num_seqs=1,
        kv_cache_memory_bytes=2**28,
        disable_log_stats=False,
        speculative_config=method if speculate else None,
    )
    sampling = SamplingParams(temperature=0, max_tokens=load.new_tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in load.prompts]
    engine.generate(prompts[:1], sampling, use_tqdm=False)  # warms up
    rates = []
    for prompt in prompts:
        [output] = engine.generate([prompt], sampling, use_tqdm=False)
        seconds = output.metrics.last_token_ts - output.metrics.first_token_ts
        rates.append((load.new_tokens - 1) / seconds)
    return rates
