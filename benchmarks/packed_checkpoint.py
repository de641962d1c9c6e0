"""Does the packed checkpoint say the same everywhere? Greedy text of `gptq` in three engines.

`python -m benchmarks.packed_checkpoint`, in a project folder where `dvc repro quantize` has run.
vLLM and gptqmodel (through transformers) read models/gptq as it lies there; the reference is plain
bf16 weights that our reader dequantized. vLLM runs twice: with activations in 16 bits, and in the 8
that it takes by itself beside INT4 weights where a processor has AMX. The kernels round
differently, so that near-ties flip and a text that has flipped goes its own way: counted are the
tokens that agree position by position, and those up to each text's first difference.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import httpx
import torch
from torch import Tensor

from inferlab import params, run
from inferlab.models.loading import load_model
from inferlab.models.scoring import load_for_scoring
from inferlab.serving.engine import serve
from inferlab.serving.experiment import ServeBenchmarkParams
from inferlab.store import load_tensors, write_json

MODEL = Path("models/gptq")
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 5, 64, 40
Texts = list[list[int]]


def in_transformers(load: Callable[[Path, int], torch.nn.Module], prompts: Tensor) -> Texts:
    """What greedy decoding with a cache continues each of `prompts` [prompts, tokens] by."""
    model = load(MODEL, torch.get_num_threads())
    texts = []
    for prompt in prompts:
        found = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        texts.append(found[0, len(prompt) :].tolist())
    return texts


def in_vllm(prompts: Tensor, activation_bits: Literal[8, 16]) -> Texts:
    """The same from a server on loopback."""
    engine = params.load("serve_benchmark", ServeBenchmarkParams).engine
    engine = dataclasses.replace(engine, int4_activation_bits=activation_bits)
    body = {"model": "gptq", "max_tokens": NEW_TOKENS, "temperature": 0, "return_token_ids": True}
    body["ignore_eos"] = True
    with serve({"gptq": MODEL}, engine) as servers:
        url = f"{servers['gptq'].url}/v1/completions"
        replies = [
            httpx.post(url, json=body | {"prompt": prompt.tolist()}, timeout=120).raise_for_status()
            for prompt in prompts
        ]
    return [reply.json()["choices"][0]["token_ids"] for reply in replies]


def agreement(texts: Texts, reference: Texts, name: str) -> dict[str, float]:
    """How many tokens agree position by position, and before the first difference of each text."""
    pairs = [list(zip(*pair, strict=True)) for pair in zip(texts, reference, strict=True)]
    equal = [[a == b for a, b in pair] for pair in pairs]
    return {
        f"{name}_agreeing": sum(map(sum, equal)),
        f"{name}_before_first_difference": sum([*row, False].index(False) for row in equal),
    }


def main() -> None:
    """Compare all and write metrics/benchmarks/packed_checkpoint.json."""
    windows = load_tensors(Path("data/windows/heldout.safetensors"))["input_ids"]
    prompts = windows[:PROMPTS, :PROMPT_TOKENS].long()
    reference = in_transformers(load_for_scoring, prompts)
    result: dict[str, float] = {"tokens": PROMPTS * NEW_TOKENS}
    result |= agreement(in_transformers(load_model, prompts), reference, "gptqmodel")
    result |= agreement(in_vllm(prompts, 16), reference, "vllm")
    result |= agreement(in_vllm(prompts, 8), reference, "vllm_8_bit_activations")
    Path("metrics/benchmarks").mkdir(parents=True, exist_ok=True)
    target = Path("metrics/benchmarks/packed_checkpoint.json")
    write_json(target, run.checked(result, str(target)))


if __name__ == "__main__":
    main()
