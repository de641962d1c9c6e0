"""Statistics of the inputs of linear layers: Hessians, ranges and outliers, and their files.

One safetensors file a block, one entry a group of layers that read the same input, so that a
method maps one layer at a time:
  <group>.hessian       [in, in]  fp32, 2·XᵀX over the tokens, divided by their number
  <group>.weighted_hessian  [in, in]  fp32, the same with a weight a token, divided by their sum;
                        only where gradients were asked for
  <group>.minimum, .maximum, .mean, .square, .fourth  [in]  fp32, the moments of each column
  <group>.token_absmax  [tokens]  fp32, the largest magnitude of each token's input
  <group>.sample        [tokens/31, in]  bf16, the inputs of every 31st token
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from inferlab.errors import InferlabError
from inferlab.models.adapters import LinearGroup
from inferlab.store import load_tensors, save_tensors

SAMPLE_STRIDE = 31
GRAM_BLOCK = 512
"""Columns of a Hessian that are made at once; those below the diagonal are not made at all."""


class Accumulator:
    """Sums over batches of inputs [tokens, in] of the group of layers `name`.

    XᵀX is summed in fp32: in bf16 it would not be positive definite.
    """

    def __init__(self, name: str = "a layer") -> None:
        self.name = name
        self.tokens = 0
        self.sums: dict[str, Tensor] = {}
        self.absmax: list[Tensor] = []
        self.sample: list[Tensor] = []

    def observe(self, inputs: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch of inputs [tokens, in], and of the `weights` [tokens] of these tokens."""
        x = inputs.float()
        self.tokens += len(x)
        self.absmax.append(x.abs().amax(1))
        self.sample.append(inputs[::SAMPLE_STRIDE].bfloat16())
        self._add("hessian", _upper_gram(x))
        self._add("mean", x.sum(0))
        self._add("fourth", x.square().square_().sum(0))
        self._extreme("minimum", x.amin(0), torch.minimum)
        self._extreme("maximum", x.amax(0), torch.maximum)
        if weights is not None:
            self._add("weights", weights.sum())
            self._add("weighted_hessian", _upper_gram(x * weights.sqrt()[:, None]))

    def statistics(self) -> dict[str, Tensor]:
        """The finished statistics, by name. Raises InferlabError on a value that is not finite."""
        hessian = _symmetric(self.sums["hessian"]) * (2 / self.tokens)
        result = {
            "hessian": hessian,
            "minimum": self.sums["minimum"],
            "maximum": self.sums["maximum"],
            "mean": self.sums["mean"] / self.tokens,
            "square": hessian.diagonal() / 2,
            "fourth": self.sums["fourth"] / self.tokens,
            "token_absmax": torch.cat(self.absmax),
            "sample": torch.cat(self.sample),
        }
        if "weighted_hessian" in self.sums:
            scale = 2 / self.sums["weights"].clamp(min=1e-30)
            result["weighted_hessian"] = _symmetric(self.sums["weighted_hessian"]) * scale
        for name, value in result.items():
            if not torch.isfinite(value.sum(dtype=torch.float64)):
                raise InferlabError(
                    f"{self.name}: the {name} of the calibration inputs is not finite (NaN or "
                    "infinity); the model overflows before this layer, check its weights"
                )
        return result

    def _add(self, name: str, value: Tensor) -> None:
        self.sums[name] = value if name not in self.sums else self.sums[name].add_(value)

    def _extreme(self, name: str, value: Tensor, better: Callable[..., Tensor]) -> None:
        self.sums[name] = value if name not in self.sums else better(self.sums[name], value)


def _upper_gram(x: Tensor) -> Tensor:
    """XᵀX of x [tokens, in] fp32, its upper triangle at least: the rest is 0 in blocks.

    Factors may be rounded to bf16, sums are in fp32. That is exact for the inputs of a bf16 model,
    and XᵀX of the rounded X for weighed ones; with AMX it takes half the time.
    """
    columns = x.shape[1]
    result = torch.zeros(columns, columns)
    with _bf16_factors():
        for start in range(0, columns, GRAM_BLOCK):
            stop = start + GRAM_BLOCK
            result[start:stop, start:] = x[:, start:stop].t() @ x[:, start:]
    return result


@contextlib.contextmanager
def _bf16_factors() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _symmetric(upper: Tensor) -> Tensor:
    return upper.triu() + upper.triu(1).t()


def overview(statistics: dict[str, dict[str, Tensor]]) -> list[dict[str, float | str]]:
    """One row a group: how far its inputs are from well behaved.

    `absmax_over_median`: the largest column maximum over the median one; `kurtosis`: mean of the
    columns' fourth moment over the square of the second (3 for a normal distribution).
    """
    rows = []
    for name, found in statistics.items():
        absmax = torch.maximum(found["maximum"].abs(), found["minimum"].abs())
        alive = found["square"] > 0
        kurtosis = (found["fourth"] / found["square"].square())[alive]
        rows.append(
            {
                "layer": name,
                "tokens": len(found["token_absmax"]),
                "columns": len(absmax),
                "dead_columns": int((~alive).sum()),
                "absmax": float(absmax.max()),
                "absmax_over_median": float(absmax.max() / absmax.median().clamp(min=1e-30)),
                "kurtosis": float(kurtosis.mean()) if len(kurtosis) else 0.0,
            }
        )
    return rows


def summary(rows: list[dict[str, float | str]]) -> dict[str, float]:
    """The metrics of a calibration, from the rows of `overview`.

    `groups_short_of_tokens` counts Hessians that cannot have full rank: fewer tokens than columns.
    """
    return {
        "tokens": rows[0]["tokens"],
        "groups": len(rows),
        "groups_short_of_tokens": sum(row["tokens"] < row["columns"] for row in rows),
        "dead_columns": sum(row["dead_columns"] for row in rows),
        "absmax_over_median_max": max(row["absmax_over_median"] for row in rows),
        "kurtosis_max": max(row["kurtosis"] for row in rows),
    }


@dataclass(frozen=True)
class Calibration:
    """A folder of calibration statistics."""

    folder: Path

    def save(self, block: int, statistics: dict[str, dict[str, Tensor]]) -> None:
        """Write the statistics of one block: {group name: {statistic: tensor}}."""
        flat = {f"{g}.{name}": value for g, s in statistics.items() for name, value in s.items()}
        save_tensors(self._file(block), flat)

    def load(self, group: LinearGroup) -> dict[str, Tensor]:
        """The statistics of one group. Raises InferlabError when they are not there."""
        tensors = load_tensors(self._file(group.block))
        prefix = f"{group.name}."
        found = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        if not found:
            raise InferlabError(f"{self.folder} has no statistics of {group.name}; run calibrate")
        return found

    def tokens(self) -> int:
        """How many tokens the statistics were taken over."""
        tensors = load_tensors(self._file(0))
        return next(len(value) for name, value in tensors.items() if name.endswith("token_absmax"))

    def _file(self, block: int) -> Path:
        return self.folder / f"block_{block:03d}.safetensors"
