"""Where zeros may stand in a weight matrix: 2:4, or anywhere in a row.

A pattern turns scores [rows, columns] (higher is kept) into a mask of what is kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from inferlab.errors import InferlabError


@dataclass(frozen=True)
class TwoFour:
    """Of each four neighbours in a row the best two are kept: what sparse tensor cores run.

    Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks" (arXiv:2104.08378), section 3.
    """

    sparsity = 0.5
    group = 4
    """Columns that must stay together when columns are reordered."""
    together = 4
    """Columns whose mask SparseGPT decides at once."""

    def keep(self, scores: Tensor) -> Tensor:
        """The mask [rows, columns]. Raises InferlabError when 4 does not divide the columns."""
        self.check(scores.shape[1])
        fours = scores.unflatten(1, (-1, self.group))
        return _best(fours, self.group // 2).flatten(1)

    keep_shared = keep

    def check(self, columns: int, layer: str = "the matrix") -> None:
        """Raises InferlabError when 4 does not divide the columns."""
        if columns % self.group:
            raise InferlabError(
                f"{layer} has {columns} columns, which is no multiple of {self.group}; "
                "2:4 sparsity does not fit it: prune it unstructured"
            )


@dataclass(frozen=True)
class Unstructured:
    """Zeros anywhere; the share `sparsity` of each row, rounded down to whole weights.

    A row is what one output sees, and comparing within rows is best for both one-shot scores (Sun
    et al. 2023, "A Simple and Effective Pruning Approach for Large Language Models",
    arXiv:2306.11695, section 3). `keep_shared` lets rows compete: SparseGPT's rule, for each 128
    columns (Frantar & Alistarh 2023, arXiv:2301.00774, section 3.3).
    """

    sparsity: float
    group = 1
    together = 128

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)

    def keep(self, scores: Tensor) -> Tensor:
        """The mask [rows, columns]; every row has as many zeros as any other."""
        return _best(scores, self._kept(scores.shape[1]))

    def keep_shared(self, scores: Tensor) -> Tensor:
        """The mask [rows, columns]; the whole of it has the wanted sparsity, its rows may not."""
        return _best(scores.flatten(), self._kept(scores.numel())).view_as(scores)

    def check(self, columns: int, layer: str = "the matrix") -> None:
        """Fits any width."""

    def _kept(self, among: int) -> int:
        return among - int(among * self.sparsity)


Pattern = TwoFour | Unstructured


def check_sparsity(sparsity: float) -> None:
    """Raises InferlabError unless 0 <= sparsity < 1."""
    if not 0 <= sparsity < 1:
        raise InferlabError(f"sparsity must be at least 0 and below 1; got {sparsity:g}")


def _best(scores: Tensor, count: int) -> Tensor:
    """A mask of the `count` highest scores along the last dimension: exactly so many, ties too."""
    kept = torch.zeros_like(scores, dtype=torch.bool)
    return kept.scatter_(-1, scores.topk(count, dim=-1).indices, True)
