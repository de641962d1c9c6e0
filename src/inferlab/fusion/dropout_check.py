"""Is a fused dropout still dropout? Its mask against independent coins, its gradient against it.

An output of 0 says that a weight was dropped, since softmax gives none. For independent coins of
`rate`, four numbers are standard normal: the share that was kept; the spread of the counts kept in
rows, and in columns, against a binomial's; and how often a second call keeps the same.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def check_dropout(
    function: Function, scores: Tensor, given: Tensor, rate: float
) -> dict[str, float]:
    """Check `function`, softmax and dropout of `scores` [rows, columns], twice in training.

    `given`: the gradient of its output. `…_z`: the four numbers above; `max_error` and
    `max_gradient_error`: largest difference to the unfused result with the same mask.
    """
    leaf = scores.detach().requires_grad_()
    output = function(leaf)
    (gradient,) = torch.autograd.grad(output, leaf, given)
    kept = output.detach() != 0
    exact = F.softmax(leaf, -1) * kept / (1 - rate)
    (exact_gradient,) = torch.autograd.grad(exact, leaf, given)
    again = function(leaf).detach() != 0
    chance = 1 - rate
    same = chance**2 + rate**2
    return {
        "kept_share": float(kept.double().mean()),
        "share_z": share_z(kept, chance),
        "rows_z": spread_z(kept, chance),
        "columns_z": spread_z(kept.T, chance),
        "again_z": share_z(kept == again, same),
        "max_error": float((output - exact).detach().abs().max()),
        "max_gradient_error": float((gradient - exact_gradient).abs().max()),
    }


def share_z(coins: Tensor, chance: float) -> float:
    """Standard score of the share of true `coins`, each true with `chance`."""
    error = math.sqrt(chance * (1 - chance) / coins.numel())
    return (float(coins.double().mean()) - chance) / error


def spread_z(coins: Tensor, chance: float) -> float:
    """Standard score of the variance of row counts of `coins` [rows, columns].

    Of binomial counts it is columns · chance · (1 − chance), and its estimate from many rows has
    a relative standard error of √(2 / (rows − 1)). Shared coins, as of a tile whose mask repeats,
    make it wrong.
    """
    rows, columns = coins.shape
    variance = float(coins.sum(-1).double().var()) / (columns * chance * (1 - chance))
    return (variance - 1) / math.sqrt(2 / (rows - 1))


def largest_z(rows: list[dict[str, Any]]) -> float:
    """The largest standard score of all checks, without its sign."""
    return max(abs(value) for row in rows for name, value in row.items() if name.endswith("_z"))
