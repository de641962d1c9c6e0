"""Perplexity scoring beside transformers: tokens per second of the same model on the same windows.

`python -m benchmarks.scoring`, in a project folder where `dvc repro prepare` has run. transformers
is called as its documentation has it: the labelled loss of one window a call, in bf16.
"""

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from inferlab import run
from inferlab.evaluation.perplexity import perplexity
from inferlab.models.loading import load_model
from inferlab.store import load_tensors, write_json

ROUNDS, WINDOWS = 3, 4
Windows = dict[str, torch.Tensor]


def own(model: PreTrainedModel, windows: Windows) -> float:
    """Token perplexity as the stage `evaluate` scores it."""
    return perplexity(model, windows, batch=2).token


@torch.inference_mode()
def peer(model: PreTrainedModel, windows: Windows) -> float:
    """Token perplexity from the loss that transformers computes."""
    tokens = windows["input_ids"].long()
    losses = [float(model(input_ids=w[None], labels=w[None]).loss) for w in tokens]
    return math.exp(statistics.mean(losses))


def main() -> None:
    """Interleave rounds of both and write metrics/benchmarks/scoring.json."""
    model = load_model(Path("models/base"), torch.get_num_threads())
    heldout = load_tensors(Path("data/windows/heldout.safetensors"))
    windows = {name: tensor[:WINDOWS] for name, tensor in heldout.items()}
    scored = WINDOWS * (windows["input_ids"].shape[1] - 1)
    scorers: dict[str, Callable[[PreTrainedModel, Windows], float]] = {"own": own, "peer": peer}
    rates: dict[str, list[float]] = {name: [] for name in scorers}
    found: dict[str, float] = {}
    for number in range(ROUNDS + 1):
        for name, scorer in scorers.items():
            start = time.perf_counter()
            found[f"{name}_perplexity"] = scorer(model, windows)
            if number:  # the first round warms up
                rates[name].append(scored / (time.perf_counter() - start))
    medians = {f"{name}_tokens_per_s": statistics.median(r) for name, r in rates.items()}
    ratio = medians["own_tokens_per_s"] / medians["peer_tokens_per_s"]
    Path("metrics/benchmarks").mkdir(parents=True, exist_ok=True)
    result = run.checked({**found, **medians, "own_over_peer": ratio}, "scoring.json")
    write_json(Path("metrics/benchmarks/scoring.json"), result)


if __name__ == "__main__":
    main()
