"""33.26: tiled attention beside the standard one and torch's own: errors, memory, time, tiles."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from inferlab import params as parameters
from inferlab.attention.standard import standard_attention
from inferlab.attention.tiled import tiled_attention
from inferlab.profiling.memory import peak_allocated, peak_resident

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
Positive = Annotated[int, Field(gt=0)]
MIB = 2**20


@parameters.section
class FlashAttentionParams:
    """The section `flash_attention`."""

    device: Literal["cpu", "cuda"]
    batch: Positive
    heads: Positive
    head_dim: Positive
    lengths: Annotated[tuple[Positive, ...], Field(min_length=1)]
    backward_length: Positive
    query_tile: Positive
    key_tile: Positive
    swept_tiles: Annotated[tuple[Positive, ...], Field(min_length=1)]
    repeats: Positive


def implementations(params: FlashAttentionParams) -> dict[str, Attention]:
    """What is compared, by name; the first is the reference."""
    found: dict[str, Attention] = {
        "standard": standard_attention,
        "tiled": partial(tiled_attention, query_tile=params.query_tile, key_tile=params.key_tile),
        "sdpa": _sdpa,
    }
    if params.device == "cuda":
        from inferlab.attention.triton_kernel import triton_attention

        found["triton"] = triton_attention
    return found


def compare(params: FlashAttentionParams) -> list[dict[str, Any]]:
    """Error, peak memory and median time of the forward pass, by length, causal or not.

    The timed runs of the implementations alternate, so that a busy moment hits all of them; the
    run that memory is read off comes before and is not timed.
    """
    rows = []
    for length in params.lengths:
        inputs = random_inputs(params, length)
        for causal in (True, False):
            calls = {
                name: partial(attention, *inputs, causal)
                for name, attention in implementations(params).items()
            }
            with torch.inference_mode():
                runs = {name: peak_allocated(call, params.device) for name, call in calls.items()}
                repeats = params.repeats if causal else 1
                seconds = alternating_seconds(calls, repeats, params.device)
            exact = runs["standard"][1]
            rows += [
                {
                    "series": f"{name}, {'causal' if causal else 'full'}",
                    "implementation": name,
                    "causal": int(causal),
                    "length": length,
                    "max_error": float((output - exact).abs().max()),
                    "peak_mib": peak / MIB,
                    "milliseconds": 1000 * seconds[name],
                }
                for name, (peak, output) in runs.items()
            ]
    return rows


def backward(params: FlashAttentionParams) -> list[dict[str, Any]]:
    """The same of a forward and backward pass, causal, with the largest error of a gradient."""
    inputs = [tensor.requires_grad_() for tensor in random_inputs(params, params.backward_length)]
    given = torch.randn_like(inputs[0])

    def gradients(attention: Attention) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(*inputs, True), inputs, given)

    calls = {name: partial(gradients, found) for name, found in implementations(params).items()}
    runs = {name: peak_allocated(call, params.device) for name, call in calls.items()}
    seconds = alternating_seconds(calls, 1, params.device)
    exact = runs["standard"][1]
    return [
        {
            "implementation": name,
            "length": params.backward_length,
            "max_gradient_error": max(
                float((own - one).abs().max()) for own, one in zip(found, exact, strict=True)
            ),
            "peak_mib": peak / MIB,
            "milliseconds": 1000 * seconds[name],
        }
        for name, (peak, found) in runs.items()
    ]


@torch.inference_mode()
def sweep_tiles(params: FlashAttentionParams) -> list[dict[str, Any]]:
    """Time and peak memory of the tiled forward pass, causal, at the longest length, by tile."""
    inputs = random_inputs(params, max(params.lengths))
    calls = {
        (queries, keys): partial(tiled_attention, *inputs, True, queries, keys)
        for queries in params.swept_tiles
        for keys in params.swept_tiles
    }
    seconds = alternating_seconds(calls, params.repeats, params.device)
    return [
        {
            "tile": f"{queries} x {keys}",
            "query_tile": queries,
            "key_tile": keys,
            "milliseconds": 1000 * seconds[queries, keys],
            "peak_mib": peak_allocated(call, params.device)[0] / MIB,
        }
        for (queries, keys), call in calls.items()
    ]


def resident_peaks(params: FlashAttentionParams) -> dict[str, int]:
    """Resident bytes that the causal forward pass adds at the longest length, on a CPU."""
    return {name: peak_resident(_prepared, name, params) for name in implementations(params)}


def _prepared(name: str, params: FlashAttentionParams) -> Callable[[], Tensor]:
    inputs = random_inputs(params, max(params.lengths))
    attention = implementations(params)[name]
    attention(*(tensor[:, :, : params.key_tile] for tensor in inputs), True)
    return partial(attention, *inputs, True)


def metrics(
    rows: list[dict[str, Any]], gradients: list[dict[str, Any]], resident: Mapping[str, int]
) -> dict[str, float]:
    """Errors over all lengths, and memory at the longest one against the standard pass."""
    longest = max(row["length"] for row in rows)
    values: dict[str, float] = {}
    peaks = {
        row["implementation"]: row["peak_mib"]
        for row in rows
        if row["length"] == longest and row["causal"]
    }
    for name, peak in peaks.items():
        values[f"peak_mib_{name}_{longest}"] = round(peak, 2)
    for name in ("tiled", "sdpa"):
        own = [row["max_error"] for row in rows if row["implementation"] == name]
        values[f"max_error_{name}"] = max(own)
    values["max_gradient_error_tiled"] = next(
        row["max_gradient_error"] for row in gradients if row["implementation"] == "tiled"
    )
    values["memory_ratio_tiled"] = round(peaks["standard"] / peaks["tiled"], 1)
    return values | {f"resident_mib_{name}": round(v / MIB, 1) for name, v in resident.items()}


def times(rows: list[dict[str, Any]], gradients: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of the causal pass at the longest length, and of forward and backward."""
    longest = max(row["length"] for row in rows)
    return {
        f"milliseconds_{row['implementation']}_{longest}": round(row["milliseconds"], 1)
        for row in rows
        if row["length"] == longest and row["causal"]
    } | {
        f"backward_milliseconds_{row['implementation']}": round(row["milliseconds"], 1)
        for row in gradients
    }


def random_inputs(params: FlashAttentionParams, length: int) -> list[Tensor]:
    """Queries, keys and values [batch, heads, length, head_dim], fp32, normally distributed."""
    shape = (params.batch, params.heads, length, params.head_dim)
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(shape, generator=generator).to(params.device) for _ in range(3)]


def alternating_seconds(
    calls: Mapping[Any, Callable[[], Any]], repeats: int, device: str
) -> dict[Any, float]:
    """The median seconds of each call over `repeats` rounds, in each of which all take a turn."""
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: median(taken) for name, taken in seconds.items()}


def _sdpa(queries: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=causal)
