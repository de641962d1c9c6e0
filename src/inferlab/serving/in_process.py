"""An engine without a server, alone in a process, told over its pipes what to generate.

`python -m inferlab.serving.in_process <settings>`: reads batches of prompts from standard input and
answers with the times at which tokens came, a line of JSON each. Ends with its input, so it does
not outlive whoever started it. Imports what its engine needs and no more, since that is measured.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Engine = Callable[[Prompts, int], list[list[float]]]
"""Continues prompts of one length by so many tokens, greedily, end tokens like others; the times
(of time.perf_counter) of each prompt's tokens, the first and the last among them."""


def transformers_engine(settings: dict[str, Any]) -> Engine:
    """`generate` of transformers in bf16, all prompts in one batch."""
    import torch

    from inferlab.models.loading import load_model

    model = load_model(Path(settings["model"]), settings["threads"]).to(settings["device"])

    def run(prompts: Prompts, new_tokens: int) -> list[list[float]]:
        tokens = torch.tensor(prompts, device=settings["device"])
        clock = _Clock()
        model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            pad_token_id=0,
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            streamer=clock,
        )
        return [clock.times[1:]] * len(prompts)  # the first is the prompt, handed back

    return run


class _Clock:
    """What transformers calls a streamer: told of the prompt and of each step's tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


def runtime_engine(settings: dict[str, Any]) -> Engine:
    """The lean runtime, all prompts in one batch."""
    from inferlab.models.runtime.decoding import generate
    from inferlab.models.runtime.loading import load_llama

    model = load_llama(Path(settings["model"]))

    def run(prompts: Prompts, new_tokens: int) -> list[list[float]]:
        steps = generate(model, prompts, new_tokens, stop_at_end=False)
        return [[time.perf_counter() for _ in steps]] * len(prompts)

    return run


def speculative_engine(settings: dict[str, Any]) -> Engine:
    """The lean runtime with prompt lookup, which takes one prompt after the other."""
    from inferlab.models.runtime.loading import load_llama
    from inferlab.speculative.decoding import speculate
    from inferlab.speculative.drafters import LookupDrafter

    model = load_llama(Path(settings["model"]))
    drafter = LookupDrafter(settings["longest"], settings["shortest"])

    def run(prompts: Prompts, new_tokens: int) -> list[list[float]]:
        times = []
        for prompt in prompts:
            trace = speculate(model, prompt, drafter, settings["length"], new_tokens)
            now = time.perf_counter()
            times.append([now - trace.seconds, now])
        return times

    return run


ENGINES: dict[str, Callable[[dict[str, Any]], Engine]] = {
    "transformers": transformers_engine,
    "runtime": runtime_engine,
    "speculative": speculative_engine,
}


def main(settings: dict[str, Any]) -> None:
    """Load, say so with an empty line of JSON, and answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    run = ENGINES[settings["engine"]](settings)
    print("{}", file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        begin = time.perf_counter()
        times = run(asked["prompts"], asked["new_tokens"])
        answer = {"times": [[now - begin for now in own] for own in times]}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
