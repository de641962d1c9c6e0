"""H2O (Zhang et al., arXiv:2306.14048, section 4): the heaviest by accumulated attention stay."""

import torch
from torch import Tensor

from inferlab.kvcache.eviction.policy import Limits, Policy


def heavy_hitters(limits: Limits) -> Policy:
    """Of all but the `recent` latest, whatever received the least attention since it came goes."""

    def priorities(scores: Tensor, positions: Tensor, newest: int) -> Tensor:
        return scores.masked_fill(positions > newest - limits.recent, torch.inf)

    return Policy(priorities, needs_scores=True)
