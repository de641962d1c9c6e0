"""torch's kernels for 2:4 matrices, where the device has them."""

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.sparse import to_sparse_semi_structured

from inferlab.pruning.patterns import TwoFour
from inferlab.run import log

CAPABILITY = (8, 0)
ROUNDS = 20


def missing() -> str | None:
    """Why the kernels cannot run here, or None."""
    wanted = f"torch's 2:4 kernels need a CUDA device of compute capability {CAPABILITY[0]}.0"
    if not torch.cuda.is_available():
        return f"{wanted} or newer; found no CUDA device"
    found = torch.cuda.get_device_capability()
    return f"{wanted} or newer; found {found[0]}.{found[1]}" if found < CAPABILITY else None


def two_four_times(weight: Tensor, tokens: int) -> dict[str, float]:
    """Median milliseconds of inputs [tokens, columns] times `weight` [rows, columns], in bf16.

    Dense, and 2:4 sparse by magnitude, in alternate rounds; and dense over sparse. Nothing, and a
    log line that says why, where the device has no such kernels.
    """
    if reason := missing():
        log.info("skipped: %s", reason)
        return {}
    dense = (weight * TwoFour().keep(weight.abs())).to("cuda", torch.bfloat16)
    sparse = to_sparse_semi_structured(dense)
    inputs = torch.randn(tokens, weight.shape[1], device="cuda", dtype=torch.bfloat16)
    layers = {"dense": dense, "two_four": sparse}
    times: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(ROUNDS):
        for name, matrix in layers.items():
            times[name].append(
                _milliseconds(lambda matrix=matrix: torch.nn.functional.linear(inputs, matrix))
            )
    found = {f"{name}_ms": median(values) for name, values in times.items()}
    return found | {"two_four_speedup": found["dense_ms"] / found["two_four_ms"]}


def _milliseconds(work: Callable[[], Tensor]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
