"""`inferlab generate`: a model's folder and a prompt in, streamed text and its speed out."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inferlab.errors import InferlabError

if TYPE_CHECKING:
    from inferlab.models.runtime.text import Timing


def generate(
    model: Annotated[Path, typer.Argument(help="Folder of a model or variant (models/int8).")],
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; standard input when not given.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest with this share.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many of them; 0 = all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    weights: Annotated[
        str, typer.Option(help="stored, or a 16-bit model rounded to int8 or int4 as it loads.")
    ] = "stored",
    cache: Annotated[str, typer.Option(help="Keys and values in bf16, fp32 or int8.")] = "bf16",
    window: Annotated[
        int, typer.Option(help="Positions that a token sees; 0 = all, or the model's own window.")
    ] = 0,
    anchors: Annotated[
        int, typer.Option(help="How many of the window are the first ones of the text.")
    ] = 0,
    threads: Annotated[int, typer.Option(help="0 = every core.")] = 0,
) -> None:
    """Continue a prompt in the lean runtime; speed goes to standard error."""
    if max_tokens < 1:
        raise InferlabError(f"--max-tokens must be at least 1; got {max_tokens}")
    if min(window, anchors, threads) < 0:
        raise InferlabError("--window, --anchors and --threads must be at least 0")
    if anchors and not window:
        raise InferlabError("--anchors are part of a window; give --window as well")
    # torch and transformers take seconds to import; the other commands shall not wait for them.
    import torch

    from inferlab.models.runtime.cache import Window
    from inferlab.models.runtime.decoding import Sampling
    from inferlab.models.runtime.loading import load_llama
    from inferlab.models.runtime.rounding import rounded
    from inferlab.models.runtime.text import (
        Timing,
        open_tokenizer,
        prompt_tokens,
        stream,
        token_bytes,
    )

    sampling = Sampling(temperature, top_k, top_p, seed)
    bounds = Window(window, anchors) if window else None
    if threads:
        torch.set_num_threads(threads)
    loaded = rounded(load_llama(model), weights)
    tokenizer = open_tokenizer(model)
    tokens = prompt_tokens(tokenizer, sys.stdin.read() if prompt is None else prompt, chat)
    kept = loaded.new_cache(1, len(tokens) + max_tokens, cache, bounds)
    _ = loaded.kernel  # built before the clock starts
    timing = Timing(len(tokens))
    for piece in stream(loaded, tokenizer, tokens, max_tokens, sampling, kept, timing):
        print(piece, end="", flush=True)
    print()
    print(_speed(timing, token_bytes(loaded, kept)), file=sys.stderr)


def _speed(timing: "Timing", bytes_read: int) -> str:
    from inferlab.profiling.bandwidth import read_bandwidth

    prefill = f"prompt: {timing.prompt_tokens} tokens, {timing.prefill_rate:,.0f} tokens/s"
    rate = timing.decode_rate
    if rate is None:
        return f"{prefill}; new: {timing.new_tokens} token"
    limit = read_bandwidth()
    used = bytes_read * rate
    return (
        f"{prefill}; new: {timing.new_tokens} tokens, {rate:,.1f} tokens/s, each reading "
        f"{bytes_read / 1e6:,.0f} MB: {used / 1e9:,.1f} of {limit / 1e9:,.1f} GB/s, "
        f"{100 * used / limit:.0f} % of the memory bandwidth"
    )
