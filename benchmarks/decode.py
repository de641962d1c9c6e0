"""The lean runtime beside transformers, vLLM and llama.cpp: decoding of one sequence, and prefill.

`python -m benchmarks.decode`, in a project folder where `dvc repro quantize` has run. All engines
have the same threads and take turns in each round, the first round warms up, medians count. vLLM is
asked over HTTP, by one client. llama.cpp runs where its wheel is installed (llama_cpp_peer.py), on
the file that the model came from, converted; its formats are its own. The share of the bandwidth
limit is the bytes of weights that one token reads, times tokens per second, over what this machine
reads at most, measured in the same run; it is printed for the runtime.
"""

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import llama_cpp_peer
from inferlab import params, run
from inferlab.evaluation.speed import speeds
from inferlab.models.loading import load_model
from inferlab.models.runtime.decoding import generate
from inferlab.models.runtime.llama import Llama
from inferlab.models.runtime.loading import load_llama
from inferlab.models.runtime.text import weight_bytes
from inferlab.profiling.bandwidth import read_bandwidth
from inferlab.serving.engine import Server, serve
from inferlab.serving.experiment import ServeBenchmarkParams
from inferlab.serving.load import Request, Target, closed_loop
from inferlab.sources.assets import AssetParams
from inferlab.store import load_tensors, write_json

ROUNDS, PROMPT, NEW_TOKENS, PREFILL = 5, 32, 64, 512
VARIANTS = {"bf16": "base", "int8": "int8", "int4": "gptq"}
Rates = dict[str, Callable[[], float]]


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


def over_http(server: Server, prompt: Tensor) -> Rates:
    """Measurements of a server: both rates as its one client sees them."""
    target = Target(server.url, server.name)

    def ask(tokens: int) -> tuple[float, float]:
        request = Request(prompt[0].tolist(), tokens)
        (done,) = asyncio.run(closed_loop(target, [request], 1))
        first, last = done.chunks[0], done.chunks[-1]
        return prompt.shape[1] / (first - done.start), (tokens - 1) / max(last - first, 1e-9)

    return {"prefill": lambda: ask(2)[0], "decode": lambda: ask(NEW_TOKENS + 1)[1]}


def of_llama_cpp(short: Tensor, long: Tensor, threads: int) -> Rates:
    """Measurements of llama.cpp; none, with a line that says so, where it is not installed."""
    if not llama_cpp_peer.installed():
        print(llama_cpp_peer.__doc__)
        return {}
    source = params.load("download.language_model", AssetParams).wheel
    if source is None:
        print("llama.cpp is left out: it wants the GGUF of download.language_model.wheel")
        return {}
    rates: Rates = {}
    models = llama_cpp_peer.load_formats(source, threads, PREFILL + PROMPT + NEW_TOKENS)
    for name, model in models.items():
        rates[f"llama_cpp_{name}_decode"] = llama_cpp_peer.decode(model, short, NEW_TOKENS)
        rates[f"llama_cpp_{name}_prefill"] = llama_cpp_peer.prefill(model, long)
    return rates


def rounds(measurements: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """The median of each measurement over rounds in which all take turns."""
    seen: dict[str, list[float]] = {name: [] for name in measurements}
    for number in range(ROUNDS + 1):
        for name, measure in measurements.items():
            rate = measure()
            if number:
                seen[name].append(rate)
    return {f"{name}_tokens_per_s": statistics.median(found) for name, found in seen.items()}


def main() -> None:
    """Measure all and write metrics/benchmarks/decode.json."""
    tokens = load_tensors(Path("data/windows/heldout.safetensors"))["input_ids"].long()
    short, long = tokens[:1, :PROMPT], tokens[1:2, :PREFILL]
    folders = {name: Path("models", variant) for name, variant in VARIANTS.items()}
    models = {name: load_llama(folder) for name, folder in folders.items()}
    threads = torch.get_num_threads()
    peer = load_model(folders["bf16"], threads)
    measurements: Rates = {
        f"{name}_{what}": make(model, prompt)
        for name, model in models.items()
        for what, make, prompt in (("decode", decode, short), ("prefill", prefill, long))
    }
    measurements["transformers_decode"] = lambda: speeds({"m": peer}, short, NEW_TOKENS, 1)["m"][1]
    measurements["transformers_prefill"] = lambda: speeds({"m": peer}, long, 1, 1)["m"][0]
    measurements |= of_llama_cpp(short, long, threads)
    engine = params.load("serve_benchmark", ServeBenchmarkParams).engine
    with serve(folders, dataclasses.replace(engine, threads=threads)) as servers:
        for name, server in servers.items():
            measurements[f"vllm_{name}_decode"] = over_http(server, short)["decode"]
            measurements[f"vllm_{name}_prefill"] = over_http(server, long)["prefill"]
        rates = rounds(measurements)
    bandwidth = read_bandwidth(2**30)
    result = rates | {"read_gb_per_s": bandwidth / 1e9}
    for name, model in models.items():
        own = rates[f"{name}_decode_tokens_per_s"]
        for rival in (key for key in rates if key.endswith("_decode_tokens_per_s")):
            engine_name = rival.removesuffix("_decode_tokens_per_s")
            if engine_name not in models:
                result[f"{name}_decode_over_{engine_name}"] = own / rates[rival]
        result[f"{name}_bandwidth_share"] = weight_bytes(model) * own / bandwidth
    Path("metrics/benchmarks").mkdir(parents=True, exist_ok=True)
    write_json(Path("metrics/benchmarks/decode.json"), run.checked(result, "decode.json"))


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
