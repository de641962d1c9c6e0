"""Quantize a checkpoint layer by layer with one function, and say how well it went.

The maths of a method sees one matrix and its statistics; reading, formats and the comparison with
round-to-nearest are here, the same for every method.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from inferlab.calibration.statistics import Calibration
from inferlab.errors import InferlabError
from inferlab.models.adapters import LinearGroup, adapter_for, layer_names, linear_groups
from inferlab.quantization.affine import (
    Grid,
    Quantized,
    minmax_grid,
    quantize,
    resolve_group_size,
)
from inferlab.quantization.formats import PACKABLE, Dequantized, Format, GptqFormat
from inferlab.quantization.gptq import output_error
from inferlab.run import log, progress
from inferlab.store import Checkpoint, load_tensors, open_checkpoint, save_checkpoint


@dataclass(frozen=True)
class Job:
    """What a method is given: the checkpoint, its calibration, and the folder to fill."""

    checkpoint: Checkpoint
    calibration: Calibration
    windows: Path
    output: Path
    threads: int

    def calibration_windows(self) -> Tensor:
        """The windows [windows, length] that `calibrate` read, for a library that runs its own."""
        windows = load_tensors(self.windows)["input_ids"]
        return windows[: self.calibration.tokens() // windows.shape[1]]


@dataclass(frozen=True)
class Layer:
    """One matrix to quantize: the stacked layers of a group. `weight`: [out, in], fp32.

    `rows`: how many of the rows each of the stacked layers has.
    """

    name: str
    weight: Tensor
    rows: list[int]
    statistics: dict[str, Tensor]


@dataclass(frozen=True)
class Report:
    """`output_error_vs_rtn`: mean over groups of the method's output error over that of
    round-to-nearest of the same weights (smoothed ones, where a method smooths) with the same bits
    and group size (per channel for methods without groups).
    `bits_per_weight`: as stored, scales included, or as it would be when nothing was packed.
    `layers_16bit`: linear layers left as they were.
    """

    layers_quantized: int
    layers_fallback: int
    output_error_vs_rtn: float
    bits_per_weight: float
    packed: bool
    layers_16bit: int = 0


Solver = Callable[[Layer, int], tuple[Quantized, bool]]
"""From a layer and its group size to its quantized form, and whether the method fell back."""


def quantize_checkpoint(
    job: Job,
    solver: Solver,
    target: Format,
    bits: int,
    group_size: int,
    symmetric: bool,
    kept: Collection[str] = (),
) -> Report:
    """Quantize every linear layer of the blocks with `solver` and save them in the format `target`.

    The groups named in `kept` stay in 16 bits. Raises InferlabError before any work when the group
    size does not divide a layer or nothing is left to quantize.
    """
    every = linear_groups(job.checkpoint)
    groups = [group for group in every if group.name not in kept]
    if not groups:
        raise InferlabError(f"all {len(every)} groups of linear layers are kept in 16 bits")
    check_group_size(job.checkpoint, groups, group_size)
    tensors: dict[str, Tensor] = {}
    ratios, bits_used, weights, fallen = [], 0.0, 0, 0
    for group in progress(groups, "quantize"):
        layer = _layer(job, group)
        quantized, fell_back = solver(layer, resolve_group_size(layer.weight.shape[1], group_size))
        if fell_back:
            log.warning("%s: fell back to round-to-nearest", group.name)
            fallen += len(group.layers)
        ratios.append(_error_ratio(layer, quantized.dequantize(), bits, group_size, symmetric))
        bits_used += quantized.bits_per_weight() * layer.weight.numel()
        weights += layer.weight.numel()
        for name, part in zip(group.layers, split_rows(quantized, layer.rows), strict=True):
            tensors |= target.tensors(name, part)
    _save(job, target, tensors, groups)
    left = weights_of(job.checkpoint, every) - weights
    simulated = (bits_used + 16 * left) / (weights + left)
    return Report(
        len(layer_names(groups)),
        fallen,
        mean(ratios),
        stored_bits_per_weight(job) if target.packed else simulated,
        target.packed,
        len(layer_names(every)) - len(layer_names(groups)),
    )


def errors_against_rtn(
    job: Job,
    weights: Callable[[str], Tensor],
    bits: int,
    group_size: int,
    symmetric: bool,
) -> float:
    """`output_error_vs_rtn` of a library's result. `weights(layer)` is its matrix [out, in]."""
    ratios = []
    for group in linear_groups(job.checkpoint):
        layer = _layer(job, group)
        result = torch.cat([weights(name).float() for name in group.layers])
        ratios.append(_error_ratio(layer, result, bits, group_size, symmetric))
    return mean(ratios)


def stored_bits_per_weight(job: Job) -> float:
    """Bits that the saved linear layers take, scales and zero points included, for each weight."""
    saved = open_checkpoint(job.output, quantized=True)
    groups = linear_groups(job.checkpoint)
    owners = set(layer_names(groups))
    tensors = (saved.tensor(name) for name in saved.names if _owner(name, owners))
    return 8 * sum(tensor.nbytes for tensor in tensors) / weights_of(job.checkpoint, groups)


def weights_of(checkpoint: Checkpoint, groups: Iterable[LinearGroup]) -> int:
    """How many weights the layers of `groups` have, biases left out."""
    layers = layer_names(list(groups))
    return sum(math.prod(checkpoint.shape(f"{layer}.weight")) for layer in layers)


def check_group_size(
    checkpoint: Checkpoint, groups: Iterable[LinearGroup], group_size: int
) -> None:
    """Raises InferlabError naming the first layer whose columns the group size does not divide."""
    for group in groups:
        shape = checkpoint.shape(f"{group.layers[0]}.weight")
        resolve_group_size(shape[0] if group.transposed else shape[1], group_size, group.layers[0])


def packed_format(job: Job, bits: int, group_size: int, symmetric: bool) -> Format:
    """The GPTQ format where it can hold the result, else dequantized weights (with a log line)."""
    transposed = adapter_for(job.checkpoint).transposed
    if bits in PACKABLE and not transposed:
        return GptqFormat(bits, group_size, symmetric)
    log.warning(
        "saved dequantized: the GPTQ format packs %s bits of [out, in] layers, not %d bits of %s",
        PACKABLE,
        bits,
        job.checkpoint.config.get("model_type"),
    )
    return Dequantized(transposed)


def split_rows(quantized: Quantized, rows: list[int]) -> Iterator[Quantized]:
    """Undo the stacking of a group's layers, which have so many `rows` each."""
    grid = quantized.grid
    pieces = zip(
        quantized.codes.split(rows), grid.scale.split(rows), grid.zero.split(rows), strict=True
    )
    for codes, scale, zero in pieces:
        yield Quantized(codes, Grid(scale, zero, grid.bits, grid.group_size))


def _layer(job: Job, group: LinearGroup) -> Layer:
    parts = group.weights(job.checkpoint)
    rows = [len(part) for part in parts]
    return Layer(group.name, torch.cat(parts).float(), rows, job.calibration.load(group))


def _owner(name: str, layers: set[str]) -> bool:
    """Is the tensor `name` part of how one of `layers` stores its weight?"""
    parts = name.split(".")
    prefixes = (".".join(parts[:stop]) for stop in range(1, len(parts)))
    return parts[-1] != "bias" and any(prefix in layers for prefix in prefixes)


def _error_ratio(
    layer: Layer, result: Tensor, bits: int, group_size: int, symmetric: bool
) -> float:
    hessian = layer.statistics["hessian"]
    columns = resolve_group_size(layer.weight.shape[1], group_size)
    nearest = quantize(layer.weight, minmax_grid(layer.weight, bits, columns, symmetric))
    baseline = output_error(layer.weight, nearest.dequantize(), hessian)
    return output_error(layer.weight, result, hessian) / max(baseline, 1e-30)


def _save(job: Job, target: Format, tensors: dict[str, Tensor], groups: list[LinearGroup]) -> None:
    done = {f"{layer}.weight" for layer in layer_names(groups)}
    kept = {n: job.checkpoint.tensor(n) for n in job.checkpoint.names if n not in done}
    config = dict(job.checkpoint.config)
    if declared := target.config():
        config["quantization_config"] = declared
    save_checkpoint(job.output, config, kept | tensors, aside_from=job.checkpoint.folder)
