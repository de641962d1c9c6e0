"""How one matrix is pruned: three scores, the last one with compensation.

magnitude: |w|. activation: |w|·‖x‖, the weight times the norm of its input over the calibration
tokens (Wanda, Sun et al. 2023, arXiv:2306.11695). sparsegpt: w²/[H⁻¹], and what is kept absorbs the
error of what is removed (Frantar & Alistarh 2023, "SparseGPT: Massive Language Models Can Be
Accurately Pruned in One-Shot", arXiv:2301.00774).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from inferlab.params import section
from inferlab.pruning.patterns import Pattern
from inferlab.quantization.gptq import inverse_factor

Score = Literal["magnitude", "activation", "sparsegpt"]
BLOCK = 32
"""Columns between two updates of everything that follows; divides 128, else only speed."""


@section
class CompensationParams:
    """How `sparsegpt` inverts the Hessian and in which order it prunes columns."""

    damping: Annotated[float, Field(gt=0, le=1)]
    activation_order: bool


@dataclass(frozen=True)
class Pruned:
    """`weight`: [rows, columns], fp32, zeros where it was pruned.

    `fell_back`: the Hessian had no inverse, so that the activation score had to do. `damping`: the
    share of its mean diagonal that was needed, 0 where it was not inverted.
    """

    weight: Tensor
    fell_back: bool = False
    damping: float = 0.0


def prune(
    weight: Tensor,
    statistics: Mapping[str, Tensor],
    pattern: Pattern,
    score: Score,
    compensation: CompensationParams,
) -> Pruned:
    """Prune `weight` [rows, columns] to `pattern`.

    `statistics` are the calibration's, of the inputs: `square` [columns], their mean square, and
    `hessian` [columns, columns]. Raises InferlabError when the pattern does not fit the columns.
    """
    pattern.check(weight.shape[1])
    weight = weight.float()
    match score:
        case "magnitude":
            return Pruned(weight * pattern.keep(weight.abs()))
        case "activation":
            return Pruned(weight * pattern.keep(weight.abs() * statistics["square"].sqrt()))
        case "sparsegpt":
            return _sparsegpt(weight, statistics, pattern, compensation)


def _sparsegpt(
    weight: Tensor,
    statistics: Mapping[str, Tensor],
    pattern: Pattern,
    compensation: CompensationParams,
) -> Pruned:
    hessian = statistics["hessian"]
    order = torch.arange(len(hessian))
    if compensation.activation_order:
        order = _largest_first(hessian.diagonal(), pattern.group)
    factor, damping = inverse_factor(hessian[order][:, order], compensation.damping)
    if factor is None:
        fallback = prune(weight, statistics, pattern, "activation", compensation)
        return Pruned(fallback.weight, fell_back=True)
    pruned = _prune_columns(weight[:, order].t().contiguous(), factor, pattern)
    return Pruned(pruned.t()[:, torch.argsort(order)].contiguous(), damping=damping)


def _largest_first(diagonal: Tensor, group: int) -> Tensor:
    """Columns in the order of their inputs' energy, `group` neighbours moved as one."""
    energy = diagonal.unflatten(0, (-1, group)).sum(1)
    first = torch.argsort(energy, descending=True) * group
    return (first[:, None] + torch.arange(group)).flatten()


def _prune_columns(work: Tensor, factor: Tensor, pattern: Pattern) -> Tensor:
    """The column loop, in place. `work` [columns, rows] is the transpose, columns in order.

    A mask is decided for `pattern.together` columns at once, when all columns before them have
    passed their errors on. Within a block errors go on one column at a time, to the columns after
    the block all at once.
    """
    diagonal = factor.diagonal()
    columns = len(work)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = torch.empty_like(work[start:stop])
        for column in range(start, stop):
            if column % pattern.together == 0:
                decided = slice(column, column + pattern.together)
                scores = (work[decided] / diagonal[decided, None]).square()
                removed = ~pattern.keep_shared(scores.t()).t()
            error = work[column] * removed[column % pattern.together] / diagonal[column]
            errors[column - start] = error
            work[column:stop].addr_(factor[column, column:stop], error, alpha=-1)
            work[column].masked_fill_(removed[column % pattern.together], 0)
        work[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
    return work
