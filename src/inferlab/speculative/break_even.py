"""What speculation is worth by formula, when each proposal is kept with one chance on its own.

Leviathan et al. (2023), section 3, with one difference: there a pass over a draft costs as much as
one over a token, which holds where memory is the limit; here its measured cost enters.
"""

from collections.abc import Sequence

import numpy as np

from inferlab.speculative.closed_form import expected_tokens


def speedup(
    acceptance: float,
    length: int,
    draft_cost: float,
    verify: Sequence[float],
    proposing: float = 1.0,
) -> float:
    """Over plain decoding. `draft_cost`: a pass of the draft; `verify[n]`: the target over n + 1.

    Both in passes of the target over one token. `proposing`: share of the rounds that the drafter
    has something to propose for; the others are passes over one token.
    """
    tokens = proposing * expected_tokens(acceptance, length) + (1 - proposing)
    cost = proposing * (length * draft_cost + verify[length]) + (1 - proposing)
    return tokens / cost


def best_length(acceptance: float, draft_cost: float, verify: Sequence[float]) -> int:
    """The draft length that is fastest, of 1 to the longest that `verify` knows the cost of."""
    lengths = range(1, len(verify))
    return max(lengths, key=lambda length: speedup(acceptance, length, draft_cost, verify))


def break_even(draft_cost: float, verify: Sequence[float]) -> float:
    """The least acceptance that pays at the best length, to 0.001; above 1 when none does."""
    for acceptance in np.arange(0, 1.0005, 0.001):
        length = best_length(float(acceptance), draft_cost, verify)
        if speedup(float(acceptance), length, draft_cost, verify) >= 1:
            return float(acceptance)
    return float("inf")
