"""The rule of speculative sampling for many sequences at once.

Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1), Chen et al. 2023 (arXiv 2302.01318, algorithm
2). A token x drafted from q is kept with probability min(1, p(x)/q(x)). At the first that is not,
the token comes from the residual max(0, p − q), normalised: kept and resampled tokens together
follow p, whatever q is. When all are kept, one more comes from p.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from inferlab.errors import InferlabError


@dataclass(frozen=True)
class Verdict:
    """accepted: how many drafted tokens a sequence keeps [sequences]; token: the next [sequences].

    So a target call gives `accepted + 1` tokens.
    """

    accepted: Tensor
    token: Tensor


def verify(target: Tensor, draft: Tensor, drafted: Tensor, generator: torch.Generator) -> Verdict:
    """Judge `drafted` [sequences, length], which were drawn from `draft`.

    target: p at each drafted place and the one after, [sequences, length + 1, vocabulary]; draft: q
    at each drafted place, [sequences, length, vocabulary].
    Raises InferlabError when nothing is drafted or the shapes do not go together.
    """
    sequences, length = drafted.shape
    vocabulary = target.shape[-1]
    if length < 1:
        raise InferlabError("the draft length must be at least 1; got 0")
    wanted = [(sequences, length + 1, vocabulary), (sequences, length, vocabulary)]
    if [tuple(target.shape), tuple(draft.shape)] != wanted:
        raise InferlabError(
            f"target and draft must be {wanted[0]} and {wanted[1]} for {length} drafted tokens; "
            f"got {tuple(target.shape)} and {tuple(draft.shape)}"
        )
    likely = target[:, :-1].gather(2, drafted.unsqueeze(2)).squeeze(2)
    stated = draft.gather(2, drafted.unsqueeze(2)).squeeze(2)
    accepted = count_accepted(likely, stated, generator)
    rows = torch.arange(sequences)
    wants = target[rows, accepted]
    left = residual(wants, draft[rows, accepted.clamp(max=length - 1)])
    weights = torch.where((accepted < length).unsqueeze(1), left, wants)
    return Verdict(accepted, sample(weights, generator))


def count_accepted(likely: Tensor, stated: Tensor, generator: torch.Generator) -> Tensor:
    """How many tokens come before the first refused one [sequences].

    likely, stated: p and q of the drafted tokens [sequences, length].
    """
    chance = torch.rand(likely.shape, generator=generator, dtype=torch.float64)
    return (chance * stated < likely).long().cumprod(1).sum(1)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """Weights of the token in place of a refused one: max(0, p − q) [rows, vocabulary].

    p itself where the two differ by rounding alone, so that nothing is left.
    """
    left = (target - draft).clamp(min=0)
    return torch.where(left.sum(1, keepdim=True) > 0, left, target)


def sample(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One index a row [rows], in proportion to weights [rows, vocabulary] of any sum."""
    sums = weights.cumsum(1, dtype=torch.float64)
    points = torch.rand(len(weights), 1, generator=generator, dtype=torch.float64) * sums[:, -1:]
    drawn = torch.searchsorted(sums, points, right=True).squeeze(1)
    return drawn.clamp(max=weights.shape[1] - 1)
