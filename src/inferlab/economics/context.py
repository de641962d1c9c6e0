"""A measured decode rate at the context of the user's requests.

A decoded token reads the cache of every token before it, and a burst of short prompts measures a
rate with little to read. What a read costs is fitted over the engine's steps (the stage step_cost).
"""

import json
from dataclasses import replace
from pathlib import Path

from inferlab.economics.cost import Rates
from inferlab.errors import InferlabError


def mean_context(input_tokens: int, output_tokens: int) -> float:
    """Tokens that an output token has before it, on average."""
    return input_tokens + (output_tokens - 1) / 2


def cache_read_seconds(path: Path) -> float:
    """What each token of context costs a decoded token, from the metrics file of step_cost.

    Raises InferlabError naming the file when it is missing, no JSON, or lacks the key.
    """
    try:
        return json.loads(path.read_text())["context_ns"] / 1e9
    except FileNotFoundError:
        raise InferlabError(f"{path} is missing; run the stage step_cost first") from None
    except json.JSONDecodeError as error:
        raise InferlabError(f"{path} is not JSON: {error}") from None
    except KeyError:
        raise InferlabError(f"{path} has no context_ns; run the stage step_cost again") from None


def at_context(rates: Rates, measured: float, wanted: float, read_seconds: float) -> Rates:
    """`rates` with the decode rate that was measured behind `measured` tokens, behind `wanted`.

    Raises InferlabError when `wanted` is so much shorter that a token would take no time.
    """
    seconds = 1 / rates.decode_tokens_per_s + (wanted - measured) * read_seconds
    if seconds <= 0:
        raise InferlabError(
            f"a decode rate measured behind {measured:g} tokens says nothing of {wanted:g}; "
            "measure it nearer to cost_report's lengths"
        )
    source = (
        f"{rates.source}; decoding at {rates.decode_tokens_per_s:,.1f} tokens/s behind "
        f"{measured:g} tokens, put behind {wanted:g} by the cost of a step"
    )
    return replace(rates, decode_tokens_per_s=1 / seconds, source=source)
