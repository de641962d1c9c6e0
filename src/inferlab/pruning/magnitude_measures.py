"""What magnitude pruning saves, bytes by format and milliseconds by kernel, and its metrics."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from inferlab.data.tables import Row
from inferlab.distillation.training import accuracy_error, device
from inferlab.models.encoder import TextClassifier
from inferlab.profiling.latency import median_ms
from inferlab.pruning.magnitude import format_bytes, with_sparse_layers

STORED = {"fp32": torch.float32, "bf16": torch.bfloat16}
NEVER = -1
"""In place of a sparsity: CSR is not faster at any that was measured."""


def size_table(models: Mapping[float, TextClassifier]) -> list[Row]:
    """Bytes of the prunable matrices of each model, by sparsity, in each format and type."""
    return [
        {
            "case": f"{name} {dtype} {100 * sparsity:g} %",
            "format": name,
            "dtype": dtype,
            "sparsity": sparsity,
            "megabytes": size / 1e6,
            "bytes": size,
        }
        for sparsity, model in models.items()
        for dtype, kind in STORED.items()
        for name, size in format_bytes(model, kind).items()
    ]


def latency_table(
    models: Mapping[float, TextClassifier],
    tokens: Tensor,
    batches: Sequence[int],
    rounds: int,
    threads: int,
) -> list[Row]:
    """Median milliseconds of classifying a batch of `tokens` [documents, length], by kernel.

    `dense` and `csr` (torch's sparse kernels) in fp32, the one type that both are made for here;
    `dense_bf16` is what one would serve instead, and what its weights are does not matter.
    """
    torch.set_num_threads(threads)
    served = {("dense", sparsity): model.to(device()) for sparsity, model in models.items()}
    served |= {("csr", key): with_sparse_layers(model) for (_, key), model in served.items()}
    served["dense_bf16", 0.0] = copy.deepcopy(models[0.0]).bfloat16()
    rows = []
    for batch in batches:
        part = tokens[:batch].to(device())
        with torch.no_grad():
            calls = {key: partial(model.eval(), part) for key, model in served.items()}
            found = median_ms(calls, rounds)
        rows += [
            {
                "case": f"{kernel} {100 * sparsity:g} %, batch {batch}",
                "kernel": kernel,
                "sparsity": sparsity,
                "batch": batch,
                "latency_ms": taken,
            }
            for (kernel, sparsity), taken in found.items()
        ]
    return rows


def sparse_faster_from(latencies: Sequence[Row], than: str) -> float:
    """The lowest sparsity at which CSR takes less time than the kernel `than`, or `NEVER`.

    Of the first batch size. A kernel that was measured at 0 only is as fast at any sparsity.
    """
    times = _times(latencies)
    for (kernel, sparsity), taken in sorted(times.items()):
        if kernel == "csr" and taken < times.get((than, sparsity), times[than, 0.0]):
            return sparsity
    return NEVER


def summary(
    rows: Sequence[Row],
    sizes: Sequence[Row],
    latencies: Sequence[Row],
    other: int,
    documents: int,
) -> dict[str, float]:
    """The stage's metrics, for the iterative schedule with a global threshold.

    bytes_…: of the whole model in fp32, its matrices in the smallest format and the `other` bytes.
    latency_ms_…: of the first batch size, with the faster of both kernels in fp32.
    """
    found: dict[str, float] = {}
    times = _times(latencies)
    levels = sorted({row["sparsity"] for row in sizes})
    for sparsity in levels:
        name = f"{100 * sparsity:g}"
        own = [one for one in sizes if (one["sparsity"], one["dtype"]) == (sparsity, "fp32")]
        found[f"accuracy_{name}"] = accuracy_of(rows, sparsity)
        found[f"bytes_{name}"] = other + min(one["bytes"] for one in own)
        found[f"latency_ms_{name}"] = min(times["dense", sparsity], times["csr", sparsity])
    last = levels[-1]
    for schedule in ("one_shot", "one_shot_retrained"):
        found[f"accuracy_{schedule}_{100 * last:g}"] = accuracy_of(rows, last, schedule)
    found[f"accuracy_layer_{100 * last:g}"] = accuracy_of(rows, last, threshold="layer")
    return found | {
        "accuracy_0_se": accuracy_error(found["accuracy_0"], documents),
        "unpruned_bytes": other,
        "sparse_faster_from": sparse_faster_from(latencies, "dense"),
        "sparse_faster_than_bf16_from": sparse_faster_from(latencies, "dense_bf16"),
    }


def accuracy_of(
    rows: Sequence[Row], sparsity: float, schedule: str = "iterative", threshold: str = "global"
) -> float:
    """The mean accuracy of one row of the table; at 0 that of the start, after one round."""
    wanted = (schedule if sparsity else "unpruned", threshold, sparsity)
    own = [row for row in rows if (row["schedule"], row["threshold"], row["sparsity"]) == wanted]
    return float(min(own, key=lambda row: abs(row["rounds"] - 1))["accuracy_mean"])


def kernel_times(latencies: Sequence[Row]) -> dict[str, float]:
    """`<kernel>_ms_<sparsity>_batch_<n>` of every row, for the timing file."""
    return {
        f"{row['kernel']}_ms_{100 * row['sparsity']:g}_batch_{row['batch']}": row["latency_ms"]
        for row in latencies
    }


def _times(latencies: Sequence[Row]) -> dict[tuple[str, float], float]:
    """Milliseconds of the first batch size, by kernel and sparsity."""
    first = [row for row in latencies if row["batch"] == latencies[0]["batch"]]
    return {(row["kernel"], row["sparsity"]): row["latency_ms"] for row in first}
