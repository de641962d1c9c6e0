"""Linear quantization of random tensors beside the theory of its error.

A step s leaves an error between −s/2 and s/2. Where the step is small beside the width of the
distribution the error is nearly uniform there, so its mean magnitude is s/4 (Bennett 1948, "Spectra
of quantized signals", section 3). Where it is not, the mean is integrated over the density.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from scipy.stats import norm
from torch import Tensor

from inferlab.params import section
from inferlab.quantization.affine import Grid, minmax_grid, quantize

BITS = (8, 4)
BINS = 80
Row = dict[str, float | str]


@section
class BasicsParams:
    """The section `quantization_basics`."""

    size: Annotated[int, Field(ge=8)]
    outlier_share: Annotated[float, Field(gt=0, lt=1)]
    outlier_factor: Annotated[float, Field(gt=1)]


@dataclass(frozen=True)
class Input:
    """A random tensor and what it was drawn from.

    `values`: [size, size], fp32, from a mixture of normal distributions around 0, each a pair of
    its share and its standard deviation; `folded` ones are magnitudes only.
    """

    values: Tensor
    mixture: tuple[tuple[float, float], ...]
    folded: bool = False


@dataclass(frozen=True)
class Outcome:
    """One tensor on one grid. `errors`: [size, size], what came back minus what went in."""

    source: str
    bits: int
    scheme: str
    step: float
    errors: Tensor
    zeroed: float
    expected_mae: float

    @property
    def mae(self) -> float:
        """Mean magnitude of the error."""
        return float(self.errors.abs().double().mean())

    @property
    def max_error(self) -> float:
        """Largest magnitude of the error."""
        return float(self.errors.abs().max())

    def row(self) -> Row:
        """What is measured beside what theory says; `zeroed` is the share that became 0."""
        return {
            "case": f"{self.source} INT{self.bits} {self.scheme}",
            "step": self.step,
            "mae": self.mae,
            "quarter_step": self.step / 4,
            "expected_mae": self.expected_mae,
            "max_error": self.max_error,
            "half_step": self.step / 2,
            "mae_over_quarter_step": 4 * self.mae / self.step,
            "mae_over_expected": self.mae / self.expected_mae,
            "max_error_over_half_step": 2 * self.max_error / self.step,
            "zeroed": self.zeroed,
        }


def make_inputs(params: BasicsParams, seed: int) -> dict[str, Input]:
    """Normal values; the same with a few made much larger; and magnitudes, as after a ReLU."""
    generator = torch.Generator().manual_seed(seed)
    shape = (params.size, params.size)
    values = torch.randn(shape, generator=generator)
    large = torch.rand(shape, generator=generator) < params.outlier_share
    share, factor = params.outlier_share, params.outlier_factor
    return {
        "normal": Input(values, ((1.0, 1.0),)),
        "with outliers": Input(
            torch.where(large, values * factor, values), ((1 - share, 1.0), (share, factor))
        ),
        "one-sided": Input(values.abs(), ((1.0, 1.0),), folded=True),
    }


def outcomes(inputs: dict[str, Input]) -> list[Outcome]:
    """Each input in each width, symmetric and asymmetric, one scale for the whole tensor."""
    return [
        _outcome(source, given, bits, symmetric)
        for source, given in inputs.items()
        for bits in BITS
        for symmetric in (True, False)
    ]


def expected_mae(given: Input, grid: Grid) -> float:
    """The mean magnitude of the error over the density that the input was drawn from.

    A level c takes all values between the midpoints to its neighbours. Over a stretch from a to b
    of a normal distribution with standard deviation d, ∫(x−c)·p(x) is
    −d·[φ(b/d)−φ(a/d)] − c·[Φ(b/d)−Φ(a/d)].
    """
    levels = _levels(grid)
    edges = np.concatenate(([-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]))
    floor = 0.0 if given.folded else -np.inf
    low, middle, high = (np.maximum(x, floor) for x in (edges[:-1], levels, edges[1:]))
    total = sum(
        share * (_moment(middle, high, levels, width) - _moment(low, middle, levels, width)).sum()
        for share, width in given.mixture
    )
    return float(total) * (2 if given.folded else 1)


def histogram(cases: list[Outcome]) -> list[Row]:
    """How often each error occurs, in steps: a density that is 1 from −½ to ½ by the theory."""
    rows: list[Row] = []
    for case in cases:
        scaled = (case.errors / case.step).numpy().ravel()
        density, edges = np.histogram(scaled, BINS, range=(-0.5, 0.5), density=True)
        for left, right, height in zip(edges[:-1], edges[1:], density, strict=True):
            middle = float((left + right) / 2)
            rows.append(
                {"width": f"INT{case.bits}", "error_in_steps": middle, "density": float(height)}
            )
    return rows


def metrics(cases: list[Outcome]) -> dict[str, float]:
    """The metrics of the study: symmetric grids on normal values first, then what breaks."""
    found = {(case.source, case.bits, case.scheme): case for case in cases}
    values: dict[str, float] = {}
    for bits in BITS:
        row = found["normal", bits, "symmetric"].row()
        for name in ("mae", "max_error", "mae_over_quarter_step", "max_error_over_half_step"):
            values[f"int{bits}_{name}"] = float(row[name])
    for bits in BITS:
        row = found["with outliers", bits, "symmetric"].row()
        values[f"int{bits}_mae_outliers"] = float(row["mae"])
        values[f"int{bits}_zeroed_outliers"] = float(row["zeroed"])
    one_sided = [found["one-sided", 4, scheme].mae for scheme in ("asymmetric", "symmetric")]
    values["int4_mae_one_sided_asymmetric_over_symmetric"] = one_sided[0] / one_sided[1]
    values["mae_from_expected_max"] = max(abs(case.mae / case.expected_mae - 1) for case in cases)
    return values


def _outcome(source: str, given: Input, bits: int, symmetric: bool) -> Outcome:
    flat = given.values.reshape(1, -1)
    grid = minmax_grid(flat, bits, flat.shape[1], symmetric)
    result = quantize(flat, grid).dequantize()
    return Outcome(
        source,
        bits,
        "symmetric" if symmetric else "asymmetric",
        float(grid.scale),
        (result - flat).view_as(given.values),
        float(((result == 0) & (flat != 0)).float().mean()),
        expected_mae(given, grid),
    )


def _levels(grid: Grid) -> NDArray[np.float64]:
    """What the codes stand for, ascending."""
    return (np.arange(2**grid.bits) - float(grid.zero)) * float(grid.scale)


def _moment(
    start: NDArray[np.float64],
    stop: NDArray[np.float64],
    centre: NDArray[np.float64],
    width: float,
) -> NDArray[np.float64]:
    """∫(x−centre)·p(x) from `start` to `stop` for each centre, p normal around 0 with `width`."""
    a, b = start / width, stop / width
    return -width * (norm.pdf(b) - norm.pdf(a)) - centre * (norm.cdf(b) - norm.cdf(a))
