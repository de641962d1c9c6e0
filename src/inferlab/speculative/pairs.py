"""A target and a draft of it that agree to a given degree, and speculation between the two.

Agreement is 1 − the total variation distance, which is Σ min(p, q): exactly the probability that a
drafted token is kept (Leviathan et al. 2023, arXiv 2211.17192, theorem 3.5).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from inferlab.errors import InferlabError
from inferlab.speculative.verification import count_accepted, residual


@dataclass(frozen=True)
class Pair:
    """Next-token distributions by context: target and draft fp64 [contexts, vocabulary].

    The context of a token is the one before it, modulo the number of contexts.
    """

    target: Tensor
    draft: Tensor


@dataclass(frozen=True)
class Outcome:
    """Sums over sequences and calls. counts: how often each token came [contexts, vocabulary].

    `judged` drafted tokens stood before the first refusal of their call or were refused.
    """

    calls: int
    accepted: int
    judged: int
    counts: Tensor

    @property
    def acceptance(self) -> float:
        """Kept over judged tokens: those after a refusal say nothing about the draft."""
        return self.accepted / self.judged

    @property
    def tokens_per_call(self) -> float:
        """Tokens that one call of the target gives."""
        return (self.accepted + self.calls) / self.calls


class Table:
    """Draws from a few distributions by the million: one search in all cumulative sums at once."""

    def __init__(self, weights: Tensor) -> None:
        """weights: [rows, vocabulary], each row of any sum above 0."""
        sums = weights.cumsum(1)
        self.vocabulary = weights.shape[1]
        # Row r's sums lie in (r, r + 1], so that together they ascend.
        self.sums = (torch.arange(len(sums)).unsqueeze(1) + sums / sums[:, -1:]).flatten()

    def draw(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """One token of each row number in rows [sequences]."""
        points = rows + torch.rand(len(rows), generator=generator, dtype=torch.float64)
        drawn = torch.searchsorted(self.sums, points, right=True) - rows * self.vocabulary
        return drawn.clamp(max=self.vocabulary - 1)


def make_target(contexts: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Zipf's law (the r-th token in proportion to 1/r), fp64, in another order each context."""
    weights = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    orders = torch.rand(contexts, vocabulary, generator=generator).argsort(1)
    return (weights / weights.sum())[orders]


def make_draft(target: Tensor, agreement: float) -> Tensor:
    """A draft [contexts, vocabulary] that agrees with `target` to `agreement` in each context.

    A mixture of the target with itself in reverse order: its distance grows with the share.
    Raises InferlabError outside (0, 1], and below what the target has in common with its reverse.
    """
    if not 0 < agreement <= 1:
        raise InferlabError(f"the agreement must be above 0 and at most 1; got {agreement:g}")
    order = target.argsort(1)
    reverse = torch.empty_like(target).scatter_(1, order, target.gather(1, order.flip(1)))
    distance = total_variation(target, reverse)
    share = (1 - agreement) / distance
    if float(share.max()) > 1:
        least = 1 - float(distance.min())
        raise InferlabError(
            f"an agreement of {agreement:g} is out of reach: this target and its reverse have "
            f"{least:.2f} in common; use at least that, or a larger vocabulary"
        )
    return torch.lerp(target, reverse, share.unsqueeze(1))


def total_variation(one: Tensor, other: Tensor) -> Tensor:
    """Half the sum of absolute differences of distributions [..., vocabulary], 0 to 1."""
    return (one - other).abs().sum(-1) / 2


def speculate(
    pair: Pair,
    length: int,
    sequences: int,
    calls: int,
    generator: torch.Generator,
    broken: bool = False,
) -> Outcome:
    """Continue `sequences` by `calls` target calls each, `length` tokens drafted before a call.

    `broken` leaves the residual out: in place of a refused token comes one from p itself, which
    favours what the draft says too often. Raises InferlabError for a length below 1.
    """
    if length < 1:
        raise InferlabError(f"the draft length must be at least 1; got {length}")
    contexts, vocabulary = pair.target.shape
    drafts = Table(pair.draft)
    refused = pair.target if broken else residual(pair.target, pair.draft)
    afterwards = Table(torch.cat([refused, pair.target]))
    context = torch.randint(contexts, (sequences,), generator=generator)
    counts = torch.zeros(contexts * vocabulary, dtype=torch.int64)
    accepted = judged = 0
    for _ in range(calls):
        places, drawn = [context], []
        for _ in range(length):
            drawn.append(drafts.draw(places[-1], generator))
            places.append(drawn[-1] % contexts)
        seen, drafted = torch.stack(places, 1), torch.stack(drawn, 1)
        cells = seen[:, :-1] * vocabulary + drafted
        likely, stated = pair.target.take(cells), pair.draft.take(cells)
        kept = count_accepted(likely, stated, generator)
        last = seen.gather(1, kept.unsqueeze(1)).squeeze(1)
        token = afterwards.draw(last + (kept == length) * contexts, generator)
        through = torch.arange(length) < kept.unsqueeze(1)
        said = torch.cat([cells[through], last * vocabulary + token])
        counts += torch.bincount(said, minlength=len(counts))
        accepted += int(kept.sum())
        judged += int((kept + 1).clamp(max=length).sum())
        context = token % contexts
    return Outcome(sequences * calls, accepted, judged, counts.view(contexts, vocabulary))
