"""Speculative decoding of one sequence: a drafter proposes, one pass of the target verifies.

The rule itself, and where it comes from, stands in verification.py.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from inferlab.errors import InferlabError
from inferlab.models.runtime.decoding import GREEDY, Sampling, choose, probabilities
from inferlab.models.runtime.llama import KERNEL_ROWS, Llama
from inferlab.speculative.drafters import Drafter, Proposal
from inferlab.speculative.verification import verify

LONGEST = KERNEL_ROWS - 1
"""Most tokens a round: a longer pass leaves the compiled kernel, whose sums do not depend on how
many tokens it is given, and greedy text could differ from plain decoding by rounding."""


@dataclass
class Trace:
    """What one sequence took. `accepted[i]` of `tried[i]` proposals at place i were kept.

    A proposal counts as tried when all before it in its round were kept. Seconds leave out the
    reading of the prompt, by target and drafter.
    """

    tokens: list[int] = field(default_factory=list)
    target_passes: int = 0
    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    seconds: float = 0.0

    def count(self, proposed: int, kept: int) -> None:
        """Add a round."""
        missing = max(0, proposed - len(self.tried))
        self.tried += [0] * missing
        self.accepted += [0] * missing
        for place in range(min(kept + 1, proposed)):
            self.tried[place] += 1
            self.accepted[place] += place < kept


@torch.inference_mode()
def speculate(
    target: Llama,
    prompt: Sequence[int],
    drafter: Drafter,
    length: int,
    new_tokens: int,
    sampling: Sampling = GREEDY,
) -> Trace:
    """Continue `prompt` by `new_tokens` tokens, end tokens like others, `length` drafted a round.

    Greedy text is that of plain decoding; sampled text follows the target's distribution. Raises
    InferlabError for a length outside 1 to LONGEST, and when the text exceeds the context.
    """
    if not 1 <= length <= LONGEST:
        raise InferlabError(f"the draft length must be 1 to {LONGEST}; got {length}")
    generator = torch.Generator().manual_seed(sampling.seed)
    cache = target.new_cache(1, len(prompt) + new_tokens)
    states = target.hidden(torch.tensor([list(prompt)]), cache)
    drafter.start(prompt, new_tokens)
    trace = Trace([int(choose(target.logits(states[:, -1]), sampling, generator))])
    start = time.perf_counter()
    while (missing := new_tokens - len(trace.tokens)) > 0:
        text = [*prompt, *trace.tokens]
        drafting = time.perf_counter()
        proposal = drafter.propose(text, min(length, missing - 1)) if missing > 1 else Proposal([])
        trace.draft_seconds += time.perf_counter() - drafting
        logits = target.forward(torch.tensor([[text[-1], *proposal.tokens]]), cache)[0]
        decided = decide(logits, proposal, sampling, generator)
        trace.tokens += decided
        trace.target_passes += 1
        trace.count(len(proposal.tokens), len(decided) - 1)
        cache.truncate(len(text) + len(decided) - 1)
    trace.seconds = time.perf_counter() - start
    return trace


def decide(
    logits: Tensor, proposal: Proposal, sampling: Sampling, generator: torch.Generator
) -> list[int]:
    """The proposals that the target keeps, and one token of its own after them.

    `logits` [proposals + 1, vocabulary]: the target's, before each proposal and after the last. A
    proposal without chances was certain: its q is 1 for that token.
    """
    if sampling.temperature == 0:
        likeliest = logits.argmax(-1).tolist()
        pairs = zip(proposal.tokens, likeliest, strict=False)
        kept = next((i for i, (a, b) in enumerate(pairs) if a != b), len(proposal.tokens))
        return likeliest[: kept + 1]
    chances = probabilities(logits, sampling)
    if not proposal.tokens:
        return torch.multinomial(chances[0], 1, generator=generator).tolist()
    drafted = torch.tensor([proposal.tokens])
    q = proposal.chances
    if q is None:
        q = F.one_hot(drafted[0], chances.shape[-1]).to(chances.dtype)
    verdict = verify(chances[None], q[None], drafted, generator)
    return [*proposal.tokens[: int(verdict.accepted)], int(verdict.token)]
