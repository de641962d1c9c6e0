"""StreamingLLM (Xiao et al., arXiv:2309.17453): the first tokens and the latest stay."""

import torch
from torch import Tensor

from inferlab.kvcache.eviction.policy import Limits, Policy


def sinks_and_recent(limits: Limits) -> Policy:
    """The oldest goes, but for the first `sinks`."""

    def priorities(scores: Tensor, positions: Tensor, newest: int) -> Tensor:
        return positions.double().masked_fill(positions < limits.sinks, torch.inf)

    return Policy(priorities)
