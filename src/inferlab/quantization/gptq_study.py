"""GPTQ on one layer, taken apart: its steps, its options, and where in the row errors arise."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inferlab.calibration.statistics import Calibration
from inferlab.errors import InferlabError, lookup
from inferlab.models.adapters import linear_groups
from inferlab.params import section
from inferlab.quantization.affine import Quantized, quantize, resolve_group_size
from inferlab.quantization.gptq import damped, output_error
from inferlab.quantization.methods.gptq import (
    GptqParams,
    chosen_hessian,
    first_grid,
    solve_layer,
)
from inferlab.quantization.naive import solve_naively, steps
from inferlab.store import Checkpoint

Row = dict[str, float | str]


@section
class GptqLayerParams:
    """The section `gptq_layer`. `gptq`: GPTQ with all its options on."""

    layer: str
    row: int
    gptq: GptqParams


@dataclass(frozen=True)
class Subject:
    """The layer under study. `weight`: [rows, columns] fp32; `hessian`: [columns, columns]."""

    weight: Tensor
    hessian: Tensor


def load_subject(
    checkpoint: Checkpoint, calibration: Calibration, layer: str, params: GptqParams
) -> Subject:
    """Raises InferlabError when the checkpoint has no such linear layer, with a suggestion."""
    groups = {name: group for group in linear_groups(checkpoint) for name in group.layers}
    group = lookup(groups, layer, "linear layer (params.yaml: gptq_layer.layer)")
    weight = group.weights(checkpoint)[group.layers.index(layer)].float()
    return Subject(weight, chosen_hessian(calibration.load(group), params))


def baseline(subject: Subject, params: GptqParams) -> Quantized:
    """Round-to-nearest in the same bits and groups, on scales that just cover each group."""
    plain = replace(params, scale_search="none")
    return quantize(subject.weight, _grid(subject, plain))


def solved(subject: Subject, params: GptqParams) -> Quantized:
    """GPTQ with the options that `params` has."""
    return solve_layer(subject.weight, subject.hessian, _grid(subject, params), params).quantized


def recipes(params: GptqParams) -> Iterator[tuple[str, GptqParams]]:
    """GPTQ with no option, each one alone, all together, and all but each, with their names."""
    options: dict[str, dict[str, Any]] = {
        "groups": {"group_size": params.group_size},
        "activation order": {"activation_order": True},
        "scale search": {"scale_search": params.scale_search},
        "signed scale search": {"scale_search": params.scale_search, "signed_scales": True},
        "refinement": {"refinements": params.refinements},
    }
    off: dict[str, dict[str, Any]] = {
        "groups": {"group_size": 0},
        "activation order": {"activation_order": False},
        "scale search": {"scale_search": "none"},
        "signed scale search": {"signed_scales": False},
        "refinement": {"refinements": 0},
    }
    bare = replace(
        params,
        group_size=0,
        activation_order=False,
        scale_search="none",
        signed_scales=False,
        refinements=0,
    )
    yield "bare", bare
    for name, changes in options.items():
        yield f"only {name}", replace(bare, **changes)
    yield "all", params
    for name, changes in off.items():
        yield f"all but {name}", replace(params, **changes)


def option_table(subject: Subject, params: GptqParams) -> list[Row]:
    """Output error of each recipe, and of round-to-nearest on the scales that the recipe takes.

    `over_rtn` is relative to `baseline`.
    """
    reference = _error(subject, baseline(subject, params))
    rows: list[Row] = []
    for name, recipe in recipes(params):
        found = solved(subject, recipe)
        nearest = quantize(subject.weight, _grid(subject, recipe))
        rows.append(
            {
                "recipe": name,
                "output_error": _error(subject, found),
                "over_rtn": _error(subject, found) / reference,
                "rounded_over_rtn": _error(subject, nearest) / reference,
                "weight_mse": _weight_mse(subject, found),
                "bits_per_weight": found.bits_per_weight(),
            }
        )
    return rows


def step_table(subject: Subject, params: GptqParams, row: int) -> list[Row]:
    """Every step of one row, in the order of the columns: what was there, what was made of it.

    `value` is the weight with what earlier columns passed on; `error` what rounding took from it;
    `inverse_diagonal` [H⁻¹]qq of the columns that were left; `passed_on_to` the column that moved
    most to make up for it, by `passed_on`. Raises InferlabError when there is no such row.
    """
    rows, columns = subject.weight.shape
    if not 0 <= row < rows:
        raise InferlabError(
            f"gptq_layer.row must be 0 to {rows - 1}, a row of the layer; got {row} (params.yaml)"
        )
    weight = subject.weight[row : row + 1]
    grid = _grid(Subject(weight, subject.hessian), params)
    scale, nearest = grid.columns(grid.scale)[0], quantize(weight, grid).codes[0]
    table: list[Row] = []
    for step in steps(weight, subject.hessian, grid, params.damping, torch.arange(columns)):
        left = step.column < columns - 1
        target = int(step.shifts[0].abs().argmax()) if left else step.column
        q, value, error = step.column, float(step.weights[0]), float(step.errors[0])
        table.append(
            {
                "column": q,
                "weight": float(weight[0, q]),
                "value": value,
                "scale": float(scale[q]),
                "code": int(step.codes[0]),
                "rtn_code": int(nearest[q]),
                "quantized": value - error,
                "error": error,
                "inverse_diagonal": float(step.inverse[q]),
                "passed_on_to": target,
                "passed_on": float(step.shifts[0, target]),
            }
        )
    return table


def column_table(subject: Subject, results: dict[str, tuple[Quantized, Tensor]]) -> list[Row]:
    """Output error by column for each result, which comes with the order of its columns.

    With H = A·Aᵀ and A upper triangular, in that order, the output error of D = W − Q is the sum
    over columns of ‖D·A_q‖². A column's share depends on it and those before it only: it is what
    no choice of later columns can repair, and what GPTQ's rounding of that column makes least.
    """
    table: list[Row] = []
    for name, (found, order) in results.items():
        ordered = subject.hessian[order][:, order]
        upper = torch.linalg.cholesky(damped(ordered, 1e-6).flip(0, 1)).flip(0, 1)
        difference = (subject.weight - found.dequantize())[:, order]
        shares = (difference @ upper).square().sum(0) / (2 * len(difference))
        for position, (share, total) in enumerate(
            zip(shares.tolist(), shares.cumsum(0).tolist(), strict=True)
        ):
            table.append(
                {
                    "result": name,
                    "columns_done": position + 1,
                    "column": int(order[position]),
                    "share": share,
                    "cumulative": total,
                }
            )
    return table


def column_results(subject: Subject, params: GptqParams) -> dict[str, tuple[Quantized, Tensor]]:
    """Round-to-nearest, GPTQ on its scales in both orders, and GPTQ with all options."""
    in_order = torch.arange(len(subject.hessian))
    by_size = torch.argsort(subject.hessian.diagonal(), descending=True)
    plain = replace(params, scale_search="none", refinements=0, activation_order=False)
    return {
        "round-to-nearest": (baseline(subject, params), in_order),
        "GPTQ": (solved(subject, plain), in_order),
        "GPTQ, activation order": (
            solved(subject, replace(plain, activation_order=True)),
            by_size,
        ),
        "GPTQ, all options": (solved(subject, params), by_size),
    }


def summary(subject: Subject, params: GptqParams) -> dict[str, float]:
    """The metrics of the study."""
    nearest, found = baseline(subject, params), solved(subject, params)
    plain = solved(subject, replace(params, scale_search="none", refinements=0))
    errors = {
        "output_error_rtn": _error(subject, nearest),
        "output_error_gptq_rtn_scales": _error(subject, plain),
        "output_error_gptq": _error(subject, found),
        "weight_mse_rtn": _weight_mse(subject, nearest),
        "weight_mse_gptq": _weight_mse(subject, found),
    }
    ratio = {"output_error_over_rtn": errors["output_error_gptq"] / errors["output_error_rtn"]}
    return (
        errors
        | ratio
        | naive_comparison(subject, params)
        | hessian_summary(subject, params.damping)
    )


def naive_comparison(subject: Subject, params: GptqParams) -> dict[str, float]:
    """How far the fast solver is from the paper's equations: codes, and output error."""
    plain = replace(params, refinements=0)
    fast = solved(subject, plain)
    order = torch.argsort(subject.hessian.diagonal(), descending=True)
    if not params.activation_order:
        order = torch.arange(len(subject.hessian))
    slow = solve_naively(
        subject.weight, subject.hessian, _grid(subject, plain), params.damping, order
    )
    slow_error = _error(subject, slow)
    return {
        "naive_codes_differing": float((fast.codes != slow.codes).float().mean()),
        "naive_output_error_difference": abs(_error(subject, fast) / slow_error - 1),
    }


def hessian_summary(subject: Subject, damping: float) -> dict[str, float]:
    """Dead columns, and the condition number before and after damping."""
    diagonal = subject.hessian.diagonal()
    values = torch.linalg.eigvalsh(damped(subject.hessian, 0.0).double())
    shift = damping * float(diagonal.mean())
    return {
        "dead_columns": int((diagonal == 0).sum()),
        "hessian_condition": float(values[-1] / values[0].clamp(min=1e-30)),
        "damped_condition": float((values[-1] + shift) / (values[0] + shift)),
    }


def _grid(subject: Subject, params: GptqParams) -> Any:
    size = resolve_group_size(subject.weight.shape[1], params.group_size)
    return first_grid(subject.weight, subject.hessian, params, size)


def _error(subject: Subject, found: Quantized) -> float:
    return output_error(subject.weight, found.dequantize(), subject.hessian)


def _weight_mse(subject: Subject, found: Quantized) -> float:
    return float((subject.weight - found.dequantize()).square().mean())
