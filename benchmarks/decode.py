"""The lean runtime beside transformers: decoding of one sequence, and prefill.

`python -m benchmarks.decode`, in a project folder where `dvc repro quantize` has run. All engines
take turns in each round, the first round warms up, medians count. The share of the bandwidth limit
is the bytes of weights that one token reads, times tokens per second, over what this machine reads
at most, measured in the same run; it is printed for the runtime.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from inferlab import run
from inferlab.evaluation.speed import speeds
from inferlab.models.loading import load_model
from inferlab.models.runtime.decoding import generate
from inferlab.models.runtime.llama import Llama
from inferlab.models.runtime.loading import load_llama
from inferlab.models.runtime.text import weight_bytes
from inferlab.profiling.bandwidth import read_bandwidth
from inferlab.store import load_tensors, write_json

ROUNDS, PROMPT, NEW_TOKENS, PREFILL = 5, 32, 64, 512
VARIANTS = {"bf16": "base", "int8": "int8", "int4": "gptq"}


def decode(model: Llama, prompt: Tensor) -> Callable[[], float]:
    """A measurement of tokens per second after the prompt [1, tokens], which is not counted."""

    def measure() -> float:
        steps = generate(model, prompt.tolist(), NEW_TOKENS + 1, stop_at_end=False)
        next(steps)
        start = time.perf_counter()
        count = sum(1 for _ in steps)
        return count / (time.perf_counter() - start)

    return measure


def prefill(model: Llama, prompt: Tensor) -> Callable[[], float]:
    """A measurement of prompt tokens per second, up to the logits of the last one."""

    def measure() -> float:
        cache = model.new_cache(1, prompt.shape[1])
        seconds = _seconds(lambda: model.logits(model.hidden(prompt, cache)[:, -1:]))
        return prompt.shape[1] / seconds

    return measure


def main() -> None:
    """Measure all and write metrics/benchmarks/decode.json."""
    tokens = load_tensors(Path("data/windows/heldout.safetensors"))["input_ids"].long()
    short, long = tokens[:1, :PROMPT], tokens[1:2, :PREFILL]
    models = {name: load_llama(Path("models", folder)) for name, folder in VARIANTS.items()}
    peer = load_model(Path("models/base"), torch.get_num_threads())
    measurements = {
        f"{name}_{what}": make(model, prompt)
        for name, model in models.items()
        for what, make, prompt in (("decode", decode, short), ("prefill", prefill, long))
    }
    measurements["transformers_decode"] = lambda: speeds({"m": peer}, short, NEW_TOKENS, 1)["m"][1]
    measurements["transformers_prefill"] = lambda: speeds({"m": peer}, long, 1, 1)["m"][0]
    seen: dict[str, list[float]] = {name: [] for name in measurements}
    for number in range(ROUNDS + 1):
        for name, measure in measurements.items():
            rate = measure()
            if number:
                seen[name].append(rate)
    rates = {f"{name}_tokens_per_s": statistics.median(found) for name, found in seen.items()}
    bandwidth = read_bandwidth(2**30)
    result = rates | {"read_gb_per_s": bandwidth / 1e9}
    for name, model in models.items():
        own = rates[f"{name}_decode_tokens_per_s"]
        result[f"{name}_decode_over_transformers"] = own / rates["transformers_decode_tokens_per_s"]
        result[f"{name}_bandwidth_share"] = weight_bytes(model) * own / bandwidth
    Path("metrics/benchmarks").mkdir(parents=True, exist_ok=True)
    write_json(Path("metrics/benchmarks/decode.json"), run.checked(result, "decode.json"))


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
