"""Prefill and decoding speed of loaded models, in interleaved rounds.

Models take turns within each round, so that a slow minute of the machine hits all of them alike;
the first round warms up and is not counted.
"""

import time
from collections.abc import Mapping
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inferlab.run import progress


def speeds(
    models: Mapping[str, PreTrainedModel], prompt: Tensor, new_tokens: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """(prefill, decode) tokens per second of each model, medians of `rounds`.

    `prompt`: [1, tokens]. Decoding is greedy with a cache, one sequence.
    """
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    turns = [(turn, name) for turn in range(rounds + 1) for name in models]
    for turn, name in progress(turns, "speed"):
        found = _speed(models[name], prompt, new_tokens)
        if turn > 0:
            seen[name].append(found)
    return {
        name: (median(one for one, _ in found), median(one for _, one in found))
        for name, found in seen.items()
    }


@torch.inference_mode()
def _speed(model: PreTrainedModel, prompt: Tensor, new_tokens: int) -> tuple[float, float]:
    start = time.perf_counter()
    # Only the last position's logits, as generation needs them.
    output = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    first = time.perf_counter()
    for _ in range(new_tokens):
        token = output.logits[:, -1:].argmax(-1)
        output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
    last = time.perf_counter()
    return prompt.shape[1] / (first - start), new_tokens / (last - first)
