"""Quality as served: the perplexity that comes out of a server's own arithmetic.

A checkpoint says what its weights are, not how an engine multiplies with them. vLLM, for one,
rounds activations to 8 bits beside packed 4-bit weights where a processor has AMX, which costs
more than rounding to bf16 and is seen in no evaluation of the checkpoint.
"""

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import httpx
from torch import Tensor

from inferlab.errors import InferlabError
from inferlab.run import log
from inferlab.serving.engine import EngineParams, Server, last_lines
from inferlab.store import read_json

TIMEOUT_SECONDS = 300.0
RATIO = "served_perplexity_ratio"
"""Of a variant's metrics in serve_benchmark: served over evaluated token perplexity."""


def evaluated_perplexities(file: Path) -> list[float]:
    """Token perplexity of each held-out window, from the table that the stage evaluate left.

    Raises InferlabError when the variant, whose name the file has, was not evaluated.
    """
    variant = file.stem
    if not file.exists():
        raise InferlabError(
            f"{file} is missing, which the served quality of {variant!r} is compared with; "
            f"run dvc repro evaluate@{variant}, or set serve_benchmark.scored_windows to 0"
        )
    with file.open() as rows:
        return [float(row["token_perplexity"]) for row in csv.DictReader(rows)]


def measured_ratio(file: Path) -> float:
    """What the stage serve_benchmark has found, from the metrics of one variant.

    1, with a warning, where the variant was not served or not asked for its perplexity.
    """
    found = read_json(file) if file.exists() else {}
    if RATIO not in found:
        log.warning("%s has no %s: vLLM's arithmetic is taken to cost no quality", file, RATIO)
    return found.get(RATIO, 1.0)


def require_room(windows: Tensor, engine: EngineParams) -> None:
    """Raise InferlabError unless `windows` [windows, tokens] fit the engine, with the one token
    that a completion generates at least."""
    length = windows.shape[1]
    if length >= engine.max_model_len:
        raise InferlabError(
            f"held-out windows of {length} tokens and the token after them do not fit "
            f"engine.max_model_len, {engine.max_model_len}; raise it, "
            f"or set serve_benchmark.scored_windows to 0"
        )


def served_perplexities(server: Server, windows: Tensor) -> list[float]:
    """Token perplexity of each of `windows` [windows, tokens], from the server's log probabilities.

    A window's first token is context only, as in the stage evaluate. Raises InferlabError when the
    server refuses, or ends.
    """
    return [_perplexity(server, window) for window in windows.tolist()]


def perplexity_ratio(served: Sequence[float], evaluated: Sequence[float]) -> float:
    """Served over evaluated token perplexity on the windows that were served, of one length."""
    logs = [math.log(one / other) for one, other in zip(served, evaluated, strict=False)]
    return math.exp(math.fsum(logs) / len(logs))


def _perplexity(server: Server, tokens: list[int]) -> float:
    body = {
        "model": server.name,
        "prompt": tokens,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 0,  # of the prompt's own tokens and no others
    }
    try:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_SECONDS)
        scores = answer.raise_for_status().json()["choices"][0]["prompt_logprobs"]
    except httpx.HTTPError as error:
        raise InferlabError(
            f"the server of {server.name!r} did not score a window of {len(tokens)} tokens: "
            f"{error}{last_lines(server.log)}"
        ) from None
    pairs = zip(scores[1:], tokens[1:], strict=True)
    nats = [-score[str(token)]["logprob"] for score, token in pairs]
    return math.exp(math.fsum(nats) / len(nats))
