"""Where outliers live, in weights and in activations, and what they cost in INT8.

Every linear layer is measured alone, before and after smoothing; groups of them are then left in
16 bits by several rules, and a few of the mixtures are run on held-out text.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated

import torch
from pydantic import Field
from scipy.stats import spearmanr
from torch import Tensor

from inferlab.calibration.statistics import Calibration, overview
from inferlab.models.adapters import linear_groups
from inferlab.params import section
from inferlab.quantization.affine import minmax_grid, quantize
from inferlab.quantization.mixed_precision import (
    RULES,
    TextParams,
    Unit,
    curve,
    kurtosis,
    largest_over_median,
    outlier_share,
)
from inferlab.quantization.sensitivity import Effect
from inferlab.run import progress
from inferlab.store import Checkpoint

Row = dict[str, float | str]
Share = Annotated[float, Field(gt=0, lt=1)]
SIGNS = (
    "outlier_share",
    "kurtosis",
    "largest_over_median",
    "input_largest_over_median",
    "input_kurtosis",
    "zeroed",
)
COSTS = ("int8_error_tensor", "int8_error_channel", "noise", "nats")
SMOOTHED = "_smoothed"


@section
class OutliersParams:
    """The section `outliers`."""

    sigmas: Annotated[float, Field(gt=0)]
    smoothing: Annotated[float, Field(gt=0, le=1)]
    sensitivity: TextParams
    heldout: TextParams
    shares_16bit: Annotated[tuple[Share, ...], Field(min_length=1)]
    remaining: Share


def layer_table(
    checkpoint: Checkpoint,
    calibration: Calibration,
    effects: Mapping[str, Effect],
    sigmas: float,
) -> list[Row]:
    """One row a layer: its weights, its inputs, and what INT8 costs.

    `int8_error_…`: squared error of the weights over their square, one scale a tensor or a channel;
    `noise`, `zeroed`, `nats`: of its `Effect`.
    """
    rows: list[Row] = []
    for group in progress(linear_groups(checkpoint), "outliers"):
        (inputs,) = overview({group.name: calibration.load(group)})
        for name, weight in zip(group.layers, group.weights(checkpoint), strict=True):
            values = weight.float()
            rows.append(
                {
                    "layer": name,
                    "group": group.name,
                    "weights": values.numel(),
                    "outlier_share": outlier_share([values], sigmas),
                    "kurtosis": kurtosis(values),
                    "largest_over_median": largest_over_median(values),
                    "input_largest_over_median": inputs["absmax_over_median"],
                    "input_kurtosis": inputs["kurtosis"],
                    "int8_error_tensor": _int8_error(values.reshape(1, -1)),
                    "int8_error_channel": _int8_error(values),
                    **effect_columns(effects[name]),
                }
            )
    return rows


def effect_columns(effect: Effect, suffix: str = "") -> Row:
    """The columns of `layer_table` that hold an effect."""
    values = {"zeroed": effect.zeroed, "noise": effect.noise, "nats": effect.nats}
    return {f"{name}{suffix}": value for name, value in values.items()}


def units_of(layers: Iterable[Row], suffix: str = "") -> list[Unit]:
    """The groups of layers of `layer_table`, with the effects in the columns of `suffix`."""
    by_group: dict[str, list[Row]] = {}
    for row in layers:
        by_group.setdefault(str(row["group"]), []).append(row)
    return [_unit(name, rows, suffix) for name, rows in by_group.items()]


def correlation_table(layers: list[Row]) -> list[Row]:
    """Spearman's rank correlation over layers, of each sign of outliers with each cost."""
    return [
        {"pair": f"{sign} with {cost}", "rank_correlation": _correlation(layers, sign, cost)}
        for sign in SIGNS
        for cost in COSTS
    ]


def curve_table(units: list[Unit], smoothed: list[Unit]) -> list[Row]:
    """The curves of all rules, and of sensitivity after smoothing."""
    rows = [row for rule in RULES for row in curve(units, rule)]
    after = [row | {"rule": f"sensitivity{SMOOTHED}"} for row in curve(smoothed, "sensitivity")]
    return rows + after


def metrics(
    layers: list[Row], curves: list[Row], mixtures: list[Row], remaining: float
) -> dict[str, float]:
    """The metrics of the study.

    `layers_16bit`, `share_16bit`: kept by sensitivity until the loss rises by `remaining` of what
    it does when all is INT8; `…_by_outlier_share`: kept by the outliers of the weights instead.
    `nats…`: KL divergence from the 16-bit model on held-out text.
    """
    first = {rule: _first_within(curves, rule, remaining) for rule in RULES}
    measured = {str(row["mixture"]): float(row["nats"]) for row in mixtures}
    mixed = [row for row in mixtures if row["nats_predicted"]]
    deviation = [abs(float(row["nats_predicted"]) / float(row["nats"]) - 1) for row in mixed]
    return {
        "outlier_share_max": max(float(row["outlier_share"]) for row in layers),
        "input_largest_over_median_max": max(
            float(row["input_largest_over_median"]) for row in layers
        ),
        "rank_correlation": _correlation(layers, "outlier_share", "int8_error_channel"),
        "rank_correlation_nats": _correlation(layers, "outlier_share", "nats"),
        "rank_correlation_inputs_nats": _correlation(layers, "input_largest_over_median", "nats"),
        "layers_16bit": int(first["sensitivity"]["layers_16bit"]),
        "share_16bit": float(first["sensitivity"]["share_16bit"]),
        "layers_16bit_by_outlier_share": int(first["outlier_share"]["layers_16bit"]),
        "share_16bit_by_outlier_share": float(first["outlier_share"]["share_16bit"]),
        "nats_int8": measured["all INT8"],
        "nats_int8_smoothed": measured["all INT8 smoothed"],
        "prediction_error_pct_median": 100 * float(torch.tensor(deviation).median()),
    }


def _unit(name: str, rows: list[Row], suffix: str) -> Unit:
    sizes = [int(row["weights"]) for row in rows]
    outliers = sum(
        float(row["outlier_share"]) * size for row, size in zip(rows, sizes, strict=True)
    )
    return Unit(
        name,
        tuple(str(row["layer"]) for row in rows),
        sum(sizes),
        nats=sum(float(row[f"nats{suffix}"]) for row in rows),
        outlier_share=outliers / sum(sizes),
        input_outliers=float(rows[0]["input_largest_over_median"]),
    )


def _int8_error(matrix: Tensor) -> float:
    """Squared error of `matrix`, one scale a row, over its square; 0 for a matrix of zeros."""
    grid = minmax_grid(matrix, 8, matrix.shape[1], symmetric=True)
    lost = quantize(matrix, grid).dequantize().sub_(matrix).square_().mean()
    return float(lost / matrix.square().mean().clamp(min=1e-30))


def _correlation(rows: list[Row], sign: str, cost: str) -> float:
    """0 where one of the two is the same in all rows, so that there is no order."""
    signs, costs = ([row[name] for row in rows] for name in (sign, cost))
    if len(set(signs)) == 1 or len(set(costs)) == 1:
        return 0.0
    return float(spearmanr(signs, costs).statistic)


def _first_within(curves: list[Row], rule: str, remaining: float) -> Row:
    own = [row for row in curves if row["rule"] == rule]
    limit = remaining * float(own[0]["nats"])
    return next(row for row in own if float(row["nats"]) <= limit)
