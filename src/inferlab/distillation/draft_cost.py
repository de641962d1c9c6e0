"""What a token of the draft costs beside one of its target, in the runtime that would draft."""

import statistics
import time
from pathlib import Path

from torch import Tensor

from inferlab.distillation.draft import DecodeParams
from inferlab.models.runtime.decoding import generate
from inferlab.models.runtime.llama import Llama
from inferlab.models.runtime.loading import load_llama


def decode_costs(base: Path, draft: Path, text: Tensor, params: DecodeParams) -> dict[str, float]:
    """Milliseconds of a decoded token of both, one sequence, and the draft's over the base's.

    `text` [tokens] begins with the prompt. The models take turns; a first round warms up.
    """
    models = {"base": load_llama(base), "draft": load_llama(draft)}
    prompt = text[: params.prompt_tokens].tolist()
    seen: dict[str, list[float]] = {name: [] for name in models}
    for number in range(params.rounds + 1):
        for name, model in models.items():
            seconds = _seconds(model, prompt, params.new_tokens)
            if number:
                seen[name].append(seconds)
    median = {name: statistics.median(found) for name, found in seen.items()}
    costs = {f"{name}_decode_ms_per_token": 1000 * one for name, one in median.items()}
    return costs | {"decode_cost_ratio": median["draft"] / median["base"]}


def _seconds(model: Llama, prompt: list[int], new_tokens: int) -> float:
    """Seconds of a decoded token after the prompt, whose own time is not counted."""
    steps = generate(model, [prompt], new_tokens + 1, stop_at_end=False)
    next(steps)
    start = time.perf_counter()
    count = sum(1 for _ in steps)
    return (time.perf_counter() - start) / count
