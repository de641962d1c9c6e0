"""Who shares a scale: a whole matrix, a row, or a group of columns; and why it matters.

A step s leaves a mean squared error of s²/12, so the error of a layer should be the mean of its
squared steps over 12, whatever its weights are. Then one scale a tensor is worse than one a channel
by max²/mean(max²), with max over rows of their largest weight. That is tested on every layer.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from inferlab.errors import lookup
from inferlab.models.adapters import layer_names, linear_groups
from inferlab.params import section
from inferlab.quantization.affine import Grid, minmax_grid, quantize, resolve_group_size
from inferlab.quantization.driver import check_group_size
from inferlab.run import progress
from inferlab.store import Checkpoint

Sharing = Literal["tensor", "channel", "group"]
Row = dict[str, float | str]


@section
class ChannelScalesParams:
    """The section `channel_scales`."""

    layer: str
    bits: Literal[2, 3, 4, 8]
    group_size: Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class LayerErrors:
    """One layer, quantized three ways. Squared errors are means over weights.

    `steps`: [rows], the scale of each row; `tensor_step`: that of the whole matrix. `row_mse`:
    [rows] for each way. `predicted`: the mean of the squared steps over 12.
    """

    name: str
    steps: Tensor
    tensor_step: float
    row_mse: dict[Sharing, Tensor]
    predicted: dict[Sharing, float]

    def mse(self, sharing: Sharing) -> float:
        """Measured mean squared error."""
        return float(self.row_mse[sharing].double().mean())

    def ratio(self, sharing: Sharing) -> float:
        """Squared error of one scale a tensor over that of `sharing`; 1 where nothing is lost."""
        return _ratio(self.mse("tensor"), self.mse(sharing))

    def predicted_ratio(self, sharing: Sharing) -> float:
        """The same from the scales alone."""
        return _ratio(self.predicted["tensor"], self.predicted[sharing])


def layer_errors(checkpoint: Checkpoint, params: ChannelScalesParams) -> list[LayerErrors]:
    """Every linear layer of the blocks, in the order in which the model runs them.

    Raises InferlabError before any work for an unknown `layer` and a group size that does not
    divide a layer, and when a weight is not finite.
    """
    groups = linear_groups(checkpoint)
    known = dict.fromkeys(layer_names(groups))
    lookup(known, params.layer, "linear layer (params.yaml: channel_scales.layer)")
    check_group_size(checkpoint, groups, params.group_size)
    return [
        measure(name, weight, params.bits, params.group_size)
        for group in progress(groups, "channel_scales")
        for name, weight in zip(group.layers, group.weights(checkpoint), strict=True)
    ]


def measure(name: str, weight: Tensor, bits: int, group_size: int) -> LayerErrors:
    """Quantize `weight` [rows, columns] symmetrically, round-to-nearest, each way."""
    weight = weight.float()
    rows, columns = weight.shape
    shapes: dict[Sharing, tuple[Tensor, int]] = {
        "tensor": (weight.reshape(1, -1), weight.numel()),
        "channel": (weight, columns),
        "group": (weight, resolve_group_size(columns, group_size, name)),
    }
    row_mse: dict[Sharing, Tensor] = {}
    predicted: dict[Sharing, float] = {}
    steps: dict[Sharing, Tensor] = {}
    for sharing, (matrix, size) in shapes.items():
        grid = minmax_grid(matrix, bits, size, symmetric=True)
        squared = quantize(matrix, grid).dequantize().sub_(matrix).square_()
        row_mse[sharing] = squared.view(rows, columns).mean(1)
        steps[sharing] = _steps(matrix, grid)
        predicted[sharing] = float(steps[sharing].double().square().mean() / 12)
    return LayerErrors(name, steps["channel"][:, 0], float(steps["tensor"]), row_mse, predicted)


def layer_table(errors: list[LayerErrors]) -> list[Row]:
    """One row a layer: errors, ratios, their prediction, and how its channels' scales spread."""
    return [
        {
            "layer": one.name,
            "mse_tensor": one.mse("tensor"),
            "mse_channel": one.mse("channel"),
            "mse_group": one.mse("group"),
            "tensor_over_channel": one.ratio("channel"),
            "tensor_over_channel_predicted": one.predicted_ratio("channel"),
            "tensor_over_group": one.ratio("group"),
            "tensor_over_group_predicted": one.predicted_ratio("group"),
            "channel_step_median_over_tensor_step": _ratio(
                float(one.steps.median()), one.tensor_step
            ),
        }
        for one in errors
    ]


def channel_table(one: LayerErrors) -> list[Row]:
    """One row a channel of a layer: its step, and its squared error each way."""
    columns = (one.steps, *(one.row_mse[sharing] for sharing in ("tensor", "channel", "group")))
    names = ("step", "mse_tensor", "mse_channel", "mse_group")
    return [
        {"channel": channel, **dict(zip(names, values, strict=True))}
        for channel, values in enumerate(torch.stack(columns, dim=1).tolist())
    ]


def metrics(errors: list[LayerErrors], layer: str) -> dict[str, float]:
    """The metrics of the study; `detail_…` are those of `layer`.

    The correlation is Pearson's, of the logarithms, over layers.
    """
    detail = next(one for one in errors if one.name == layer)
    measured = np.array([one.ratio("channel") for one in errors])
    predicted = np.array([one.predicted_ratio("channel") for one in errors])
    deviation = 100 * np.abs(predicted / measured - 1)
    return {
        "tensor_over_channel_min": measured.min(),
        "tensor_over_channel_median": np.median(measured),
        "tensor_over_channel_max": measured.max(),
        "tensor_over_group_median": np.median([one.ratio("group") for one in errors]),
        "prediction_correlation": np.corrcoef(np.log(measured), np.log(predicted))[0, 1],
        "prediction_error_pct_median": np.median(deviation),
        "prediction_error_pct_max": deviation.max(),
        "detail_mse_tensor": detail.mse("tensor"),
        "detail_mse_channel": detail.mse("channel"),
        "detail_mse_group": detail.mse("group"),
        "detail_tensor_over_channel": detail.ratio("channel"),
        "detail_tensor_over_channel_predicted": detail.predicted_ratio("channel"),
    }


def _steps(matrix: Tensor, grid: Grid) -> Tensor:
    """The scales [rows, groups], 0 for a group of zeros, which no scale can lose."""
    largest = matrix.unflatten(1, (-1, grid.group_size)).abs().amax(-1)
    return torch.where(largest > 0, grid.scale, 0.0)


def _ratio(value: float, base: float) -> float:
    return value / base if base else 1.0
