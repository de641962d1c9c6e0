"""What speculation brings when every drafted token is kept with the same probability.

Leviathan et al. 2023 (arXiv 2211.17192), equation 1 and theorem 3.8. α is the acceptance rate, γ
the draft length, c the cost of one draft step over that of one target call. A call that verifies
γ + 1 places counts as one: true where it waits for memory, not for arithmetic.
"""

from collections.abc import Sequence

from inferlab.errors import InferlabError


def expected_tokens(acceptance: float, length: int) -> float:
    """(1 − α^(γ+1)) / (1 − α), as the sum 1 + α + … + α^γ, which also holds at α = 1."""
    return float(sum(acceptance**kept for kept in range(length + 1)))


def tokens_per_call(acceptance: float, length: int) -> float:
    """The same for what was asked for and not measured.

    Raises InferlabError for an acceptance outside (0, 1] or a length below 1.
    """
    if not 0 < acceptance <= 1:
        raise InferlabError(f"the acceptance must be above 0 and at most 1; got {acceptance:g}")
    if length < 1:
        raise InferlabError(f"the draft length must be at least 1; got {length}")
    return expected_tokens(acceptance, length)


def speedup(tokens: float, length: int, cost_ratio: float) -> float:
    """Tokens a call over its cost γc + 1, in units of plain decoding's one token a call."""
    return tokens / (length * cost_ratio + 1)


def best_length(acceptance: float, cost_ratio: float, lengths: Sequence[int]) -> int:
    """The draft length with the largest speed-up; the shortest of equals."""
    return max(
        sorted(lengths),
        key=lambda length: speedup(tokens_per_call(acceptance, length), length, cost_ratio),
    )
