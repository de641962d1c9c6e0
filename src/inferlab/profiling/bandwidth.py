"""How fast this machine reads its memory, which bounds how fast one sequence can be decoded."""

import time

import torch

BLOCK_BYTES = 2**29
ROUNDS = 5


def read_bandwidth(block_bytes: int = BLOCK_BYTES) -> float:
    """Bytes a second that a sum over a block reads, with torch's threads, at its best of some.

    The block must be much larger than the processor's caches.
    """
    block = torch.ones(block_bytes // 4, dtype=torch.float32)
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        block.sum()
        seconds.append(time.perf_counter() - start)
    return block.nbytes / min(seconds)
