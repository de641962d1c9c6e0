"""The inner loops of quantization that are slow as tensor operations, compiled by numba.

Both walk over every weight many times, and each time do so little that tensors the size of the
matrix cost more than the arithmetic. They take arrays that share memory with tensors.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float32]
CACHED_ROWS = 512
"""Rows of a block of 64 columns that stay in the cache while errors are passed on."""

# Sums may be taken in any order, which lets them run sixteen at a time.
_compiled = njit(cache=True, nogil=True, fastmath={"contract", "reassoc", "nsz"})


@_compiled
def best_factors(
    groups: Floats, scale: Floats, zero: Floats, importance: Floats, factors: Floats, top: float
) -> Floats:
    """The one of `factors` for each group's scale that leaves the least weighted squared error.

    `groups`: [rows, groups, group_size]; `scale`, `zero`: [rows, groups]; `importance`: [groups,
    group_size], the weight of a column's error; `top`: the largest code. Returns [rows, groups].
    Of equals the first wins.
    """
    rows, count, size = groups.shape
    best = np.empty((rows, count), np.float32)
    for row in range(rows):
        for group in range(count):
            low, high = -zero[row, group], np.float32(top) - zero[row, group]
            least = np.float32(np.inf)
            best[row, group] = factors[0]
            for factor in factors:
                step = scale[row, group] * factor
                error = np.float32(0)
                for column in range(size):
                    value = groups[row, group, column]
                    level = min(max(np.rint(value / step), low), high)
                    missed = level * step - value
                    error += missed * missed * importance[group, column]
                if error < least:
                    least = error
                    best[row, group] = factor
    return best


@_compiled
def _round_column(
    weights: Floats,
    scale: Floats,
    zero: Floats,
    top: float,
    codes: NDArray[np.uint8],
    errors: Floats,
) -> None:
    for row in range(len(weights)):
        code = np.rint(weights[row] / scale[row]) + zero[row]
        code = min(max(code, np.float32(0)), np.float32(top))
        codes[row] = np.uint8(code)
        errors[row] = weights[row] - (code - zero[row]) * scale[row]


@_compiled
def _pass_on(errors: Floats, share: float, weights: Floats) -> None:
    for row in range(len(errors)):
        weights[row] -= share * errors[row]


@_compiled
def quantize_block(
    weights: Floats, scale: Floats, zero: Floats, factor: Floats, top: float
) -> tuple[NDArray[np.uint8], Floats]:
    """Columns quantized one by one, each passing its error on to the columns after it.

    `weights`, `scale`, `zero`: [columns, rows], so that neighbours belong to one column; `factor`:
    [columns, columns], upper, the part of `gptq.inverse_factor` that belongs to them. Returns codes
    and errors [columns, rows], the errors over the factor's diagonal. `weights` is overwritten.
    """
    columns, rows = weights.shape
    codes = np.empty((columns, rows), np.uint8)
    errors = np.empty((columns, rows), np.float32)
    for start in range(0, rows, CACHED_ROWS):
        part = slice(start, min(start + CACHED_ROWS, rows))
        for column in range(columns):
            _round_column(
                weights[column, part],
                scale[column, part],
                zero[column, part],
                top,
                codes[column, part],
                errors[column, part],
            )
            errors[column, part] /= factor[column, column]
            for later in range(column + 1, columns):
                _pass_on(errors[column, part], factor[column, later], weights[later, part])
    return codes, errors
