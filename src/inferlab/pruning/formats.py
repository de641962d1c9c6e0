"""Sparse storage formats, really packed: what a pruned matrix takes in bytes.

2:4 keeps two values of each four and their 2-bit positions; a bitmask keeps the values and one bit
a weight; CSR keeps the values, a 32-bit column each and a 32-bit offset a row, as torch and scipy
read it.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inferlab.errors import InferlabError


@dataclass(frozen=True)
class TwoFourPacked:
    """values: [rows, columns/2]; positions: uint8, four 2-bit positions a byte, the first lowest.

    The layout of NVIDIA's sparse tensor cores but for the order of blocks, which they shuffle.
    """

    values: Tensor
    positions: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of values and positions."""
        return self.values.nbytes + self.positions.nbytes

    def dense(self) -> Tensor:
        """The matrix [rows, columns] again."""
        rows, half = self.values.shape
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
        codes = (self.positions[:, None] >> shifts) & 3
        positions = codes.flatten()[: rows * half].long().view(rows, half // 2, 2)
        fours = self.values.new_zeros(rows, half // 2, 4)
        return fours.scatter_(2, positions, self.values.view(rows, -1, 2)).flatten(1)


@dataclass(frozen=True)
class BitmaskPacked:
    """values: [nonzero], row by row; mask: uint8 [ceil(rows·columns/8)], the first bit highest."""

    values: Tensor
    mask: Tensor
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of values and mask."""
        return self.values.nbytes + self.mask.nbytes

    def dense(self) -> Tensor:
        """The matrix [rows, columns] again."""
        count = self.shape[0] * self.shape[1]
        bits = np.unpackbits(self.mask.numpy(), count=count)
        weight = self.values.new_zeros(count)
        weight[torch.from_numpy(bits).bool()] = self.values
        return weight.view(self.shape)


def is_two_four(weight: Tensor) -> bool:
    """Has each four neighbours of a row at most two weights that are not zero?"""
    if weight.shape[1] % 4:
        return False
    return bool(((weight != 0).unflatten(1, (-1, 4)).sum(2) <= 2).all())


def pack_two_four(weight: Tensor) -> TwoFourPacked:
    """Pack `weight` [rows, columns]. Raises InferlabError when it is not 2:4 sparse."""
    if not is_two_four(weight):
        raise InferlabError(
            f"a matrix of {weight.shape[0]} x {weight.shape[1]} is not 2:4 sparse: "
            "each four neighbours of a row may have two values; prune it to 2:4 first"
        )
    fours = weight.unflatten(1, (-1, 4))
    # A stable sort puts the places of values first, each in its order, and zeros fill up.
    positions = torch.argsort((fours == 0).byte(), dim=2, stable=True)[..., :2].sort(2).values
    values = fours.gather(2, positions).flatten(1).contiguous()
    codes = positions.flatten().byte()
    codes = torch.nn.functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4)
    packed = codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6
    return TwoFourPacked(values, packed)


def pack_bitmask(weight: Tensor) -> BitmaskPacked:
    """Pack any matrix [rows, columns]."""
    kept = weight != 0
    mask = torch.from_numpy(np.packbits(kept.numpy()))
    return BitmaskPacked(weight[kept], mask, (weight.shape[0], weight.shape[1]))


def to_csr(weight: Tensor) -> Tensor:
    """A torch CSR tensor with 32-bit indices."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        plain = weight.to_sparse_csr()
    rows, columns = plain.crow_indices().int(), plain.col_indices().int()
    return torch.sparse_csr_tensor(
        rows, columns, plain.values(), weight.shape, check_invariants=True
    )


def csr_bytes(csr: Tensor) -> int:
    """Bytes of a CSR tensor's offsets, columns and values."""
    return csr.crow_indices().nbytes + csr.col_indices().nbytes + csr.values().nbytes


def stored_bytes(weight: Tensor) -> dict[str, int]:
    """Bytes of `weight` [rows, columns] in each format that can hold it."""
    sizes = {
        "dense": weight.nbytes,
        "csr": csr_bytes(to_csr(weight)),
        "bitmask": pack_bitmask(weight).nbytes,
    }
    return sizes | ({"two_four": pack_two_four(weight).nbytes} if is_two_four(weight) else {})
