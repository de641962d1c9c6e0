"""Random eviction, the baseline: whatever a head holds goes with equal chance."""

import torch
from torch import Tensor

from inferlab.kvcache.eviction.policy import Limits, Policy


def uniform(limits: Limits) -> Policy:
    """A draw for every slot, anew each time, so that a token's chances do not depend on its age."""
    generator = torch.Generator().manual_seed(limits.seed)

    def priorities(scores: Tensor, positions: Tensor, newest: int) -> Tensor:
        return torch.rand(positions.shape, generator=generator)

    return Policy(priorities)
