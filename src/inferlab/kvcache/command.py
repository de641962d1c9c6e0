"""`inferlab kv`: size a deployment from a model's config."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from inferlab.errors import InferlabError, lookup
from inferlab.kvcache.capacity import (
    GIB,
    WEIGHT_BITS,
    Capacity,
    DoesNotFitError,
    Plan,
    capacity,
)
from inferlab.kvcache.shape import CACHE_TYPES, Architecture
from inferlab.terminal import console

BATCHES = [1, 8, 32, 128]
WEIGHTS = ["fp16", "int8", "int4"]
GPUS = ["a100", "h100"]


def kv(
    model: Annotated[
        str,
        typer.Argument(
            help="config.json, a folder with one, or llama_3_8b, llama_3_70b, mixtral_8x7b.",
            metavar="CONFIG_OR_NAME",
        ),
    ],
    batch: Annotated[list[int], typer.Option(help="Sequences; may be given several times.")] = (
        BATCHES
    ),
    length: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of each; several times. A quarter, half and all of the context."),
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"Cache: {', '.join(CACHE_TYPES)}.")] = "fp16",
    weights: Annotated[
        list[str], typer.Option(help=f"Weights, several times: {', '.join(WEIGHT_BITS)}.")
    ] = WEIGHTS,
    gpu: Annotated[
        list[str], typer.Option(help="GPU, several times: a100, h100, l4 and others.")
    ] = GPUS,
    tensor_parallel: Annotated[
        int, typer.Option(help="GPUs that share the model; 0 = as few as it takes.")
    ] = 0,
    reserve_share: Annotated[
        float, typer.Option(help="Of each GPU's memory, for activations and the CUDA context.")
    ] = 0.1,
) -> None:
    """Bytes of a model's KV cache, and what fits beside its weights on GPUs."""
    if not 0 <= reserve_share < 1:
        raise InferlabError(f"--reserve-share must be at least 0 and below 1; got {reserve_share}")
    if min(batch) < 1 or (length and min(length) < 1) or tensor_parallel < 0:
        raise InferlabError("--batch and --length must be at least 1, --tensor-parallel at least 0")
    lookup(CACHE_TYPES, dtype, "cache dtype")
    for kind in weights:
        lookup(WEIGHT_BITS, kind, "weight dtype")
    # transformers takes seconds to import; the other commands shall not wait for it.
    from inferlab.kvcache.architecture import load_architecture

    found = load_architecture(model)
    lengths = sorted(length or _usual_lengths(found))
    plans = [
        Plan(name, kind, dtype, reserve_share, tensor_parallel) for name in gpu for kind in weights
    ]
    fitting, faults = [], []
    for plan in plans:
        try:
            fitting.append(capacity(found, plan, lengths[-1]))
        except DoesNotFitError as fault:
            faults.append(fault)
    if not fitting:
        raise faults[0]
    terminal = console()
    terminal.print(_description(found, dtype), soft_wrap=True)
    terminal.print(_sizes(found, dtype, batch, lengths))
    terminal.print(_batches(fitting, lengths))
    terminal.print(_lengths(fitting, batch))
    for fault in faults:
        terminal.print(str(fault), soft_wrap=True)


def _usual_lengths(found: Architecture) -> list[int]:
    context = found.shape.context or 8192
    return [max(1, context // 4), max(1, context // 2), context]


def _description(found: Architecture, dtype: str) -> str:
    shape = found.shape
    parts = [
        f"{found.name}: {shape.bytes_per_token(dtype):,} bytes a token ({dtype})",
        f"{len(shape.windows)} layers with {shape.kv_heads} KV heads, "
        f"keys of {shape.key_dim} and values of {shape.value_dim} numbers",
        f"{(found.matrices + found.others) / 1e9:,.2f} billion parameters",
    ]
    windows = [window for window in shape.windows if window]
    if windows:
        parts.append(f"{len(windows)} layers keep the last {max(windows):,} tokens only")
    defaults = {"num_attention_heads": shape.query_heads, "num_key_value_heads": shape.kv_heads}
    assumed = [f"{key} {value}" for key, value in defaults.items() if key in found.assumed]
    if assumed:
        parts.append(f"not in the config, so the architecture's default: {', '.join(assumed)}")
    return "; ".join(parts) + "."


def _sizes(
    found: Architecture, dtype: str, batches: Sequence[int], lengths: Sequence[int]
) -> Table:
    table = _table(f"GiB of {dtype} cache", "batch", *(f"{length:,} tokens" for length in lengths))
    for batch in batches:
        sizes = (found.shape.cache_bytes(length, dtype, batch) / GIB for length in lengths)
        table.add_row(f"{batch:,}", *(f"{size:,.2f}" for size in sizes))
    return table


def _batches(capacities: Sequence[Capacity], lengths: Sequence[int]) -> Table:
    columns = (f"{length:,} tokens" for length in lengths)
    title = "Most sequences beside the weights (GiB on each GPU)"
    table = _table(title, "GPUs", "weights", "GiB", "left for cache", *columns)
    for one in capacities:
        room = (f"{part / GIB:,.1f}" for part in (one.weight_bytes, one.room_bytes))
        batches = (f"{one.largest_batch(length):,}" for length in lengths)
        table.add_row(f"{one.gpus} {one.plan.gpu}", one.plan.weights, *room, *batches)
    return table


def _lengths(capacities: Sequence[Capacity], batches: Sequence[int]) -> Table:
    columns = (f"batch {batch:,}" for batch in batches)
    table = _table("Longest sequences, up to the model's context", "GPUs", "weights", *columns)
    for one in capacities:
        lengths = (f"{one.largest_length(batch):,}" for batch in batches)
        table.add_row(f"{one.gpus} {one.plan.gpu}", one.plan.weights, *lengths)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table
