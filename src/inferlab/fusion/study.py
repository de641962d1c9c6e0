"""33.27: two pairs of operators, unfused, fused by hand and compiled, in inference and training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from inferlab import params as parameters
from inferlab.fusion import operators
from inferlab.fusion.compiling import compilable, compile_seconds
from inferlab.fusion.dropout_check import check_dropout, largest_z
from inferlab.profiling.kernels import profile_work, saved_bytes
from inferlab.profiling.latency import median_ms

Positive = Annotated[int, Field(gt=0)]
Function = Callable[..., Tensor]
Call = Callable[[], tuple[Tensor, ...]]
MIB = 2**20
REFERENCE, COMPILED = "unfused", "compiled"


@parameters.section
class LinearShape:
    """The block `linear` of the section `operator_fusion`."""

    rows: Positive
    ins: Positive
    outs: Positive


@parameters.section
class SoftmaxShape:
    """The block `softmax` of the section `operator_fusion`."""

    rows: Annotated[int, Field(ge=2)]
    columns: Annotated[int, Field(ge=2)]


@parameters.section
class OperatorFusionParams:
    """The section `operator_fusion`."""

    device: Literal["cpu", "cuda"]
    linear: LinearShape
    softmax: SoftmaxShape
    dropout: Annotated[float, Field(gt=0, lt=1)]
    rounds: Positive
    compile: bool


@dataclass(frozen=True)
class Pair:
    """Two operators that follow each other: their inputs, and functions of these by arm.

    `given`: the gradient of their output, from which training goes back.
    """

    name: str
    inputs: tuple[Tensor, ...]
    given: Tensor
    inference: Mapping[str, Function]
    training: Mapping[str, Function]


@dataclass(frozen=True)
class Case:
    """A pair in one mode. A call returns the output, and in training the inputs' gradients too."""

    pair: str
    mode: str
    calls: Mapping[str, Call]

    @property
    def name(self) -> str:
        """As in metrics."""
        return f"{self.pair}_{self.mode}"

    @property
    def by_chance(self) -> bool:
        """Whether outputs depend on chance, and so differ between arms."""
        return self.name == "softmax_dropout_training"

    def without(self, arm: str) -> "Case":
        """The case less one arm."""
        return replace(self, calls={name: self.calls[name] for name in self.calls if name != arm})


def pairs(params: OperatorFusionParams, seed: int) -> tuple[Pair, Pair]:
    """Linear + ReLU and softmax + dropout with random inputs; nothing is compiled yet."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(params.device)

    return _linear_relu(params, normal), _softmax_dropout(params, normal)


def _linear_relu(params: OperatorFusionParams, normal: Function) -> Pair:
    shape = params.linear
    weight, bias = normal(shape.outs, shape.ins) / shape.ins**0.5, normal(shape.outs)
    arms: dict[str, Function] = {
        REFERENCE: operators.linear_relu,
        "fused": operators.linear_relu_fused,
    }
    if params.compile:
        arms[COMPILED] = compilable(operators.linear_relu)
    inputs = (normal(shape.rows, shape.ins), weight, bias)
    return Pair("linear_relu", inputs, normal(shape.rows, shape.outs), arms, arms)


def _softmax_dropout(params: OperatorFusionParams, normal: Function) -> Pair:
    shape, rate = params.softmax, params.dropout
    inference: dict[str, Function] = {
        REFERENCE: lambda scores: operators.softmax_dropout(scores, rate, False),
        "fused": operators.softmax_,
    }
    training: dict[str, Function] = {
        REFERENCE: lambda scores: operators.softmax_dropout(scores, rate, True),
        "fused": lambda scores: operators.softmax_dropout_fused(scores, rate),
    }
    if params.compile:
        compiled = compilable(operators.softmax_dropout)
        inference[COMPILED] = lambda scores: compiled(scores, rate, False)
        training[COMPILED] = lambda scores: compiled(scores, rate, True)
    scores, given = (normal(shape.rows, shape.columns) for _ in range(2))
    return Pair("softmax_dropout", (scores,), given, inference, training)


def cases(pair: Pair) -> list[Case]:
    """The pair in both modes. Each arm has inputs of its own, since one overwrites them."""

    def inputs() -> list[Tensor]:
        return [tensor.clone() for tensor in pair.inputs]

    inference = {arm: _inference(one, inputs()) for arm, one in pair.inference.items()}
    training = {arm: _training(one, inputs(), pair.given) for arm, one in pair.training.items()}
    return [Case(pair.name, "inference", inference), Case(pair.name, "training", training)]


def _inference(function: Function, inputs: list[Tensor]) -> Call:
    def call() -> tuple[Tensor, ...]:
        with torch.inference_mode():
            return (function(*inputs),)

    return call


def _training(function: Function, inputs: list[Tensor], given: Tensor) -> Call:
    leaves = [tensor.requires_grad_() for tensor in inputs]

    def call() -> tuple[Tensor, ...]:
        output = function(*leaves)
        return (output.detach(), *torch.autograd.grad(output, leaves, given))

    return call


def compile_all(found: list[Case]) -> tuple[list[Case], dict[str, float]]:
    """Compile: the cases, and `compile_seconds_<case>`; without the compiled arms if it fails."""
    seconds: dict[str, float] = {}
    for case in (one for one in found if COMPILED in one.calls):
        taken = compile_seconds(case.calls[COMPILED])
        if taken is None:
            return [one.without(COMPILED) for one in found], {}
        seconds[f"compile_seconds_{case.name}"] = round(taken, 2)
    return found, seconds


def measure(case: Case, params: OperatorFusionParams) -> list[dict[str, Any]]:
    """One row an arm: its work as the profiler saw it, and its median time in turns.

    `saved_mib`: kept from the forward for the backward pass, inputs included. `max_error`: largest
    difference of outputs and gradients to the unfused ones, over the largest of these, in the first
    call of each; none where dropout is at work, for which see `check`.
    """
    errors = {} if case.by_chance else _errors(case)
    runs = {arm: profile_work(call, params.device)[0] for arm, call in case.calls.items()}
    saved = {arm: saved_bytes(call) for arm, call in case.calls.items()}
    milliseconds = median_ms(case.calls, params.rounds)
    return [
        {
            "case": f"{case.pair}, {case.mode}, {arm}",
            "pair": case.pair,
            "mode": case.mode,
            "arm": arm,
            "peak_mib": work.peak_bytes / MIB,
            "saved_mib": saved[arm] / MIB,
            "allocations": work.allocations,
            "allocated_mib": work.allocated_bytes / MIB,
            "operators": work.operators,
            "kernels": work.kernels,
            "milliseconds": milliseconds[arm],
            "max_error": errors.get(arm, ""),
        }
        for arm, work in runs.items()
    ]


def _errors(case: Case) -> dict[str, float]:
    found = {arm: call() for arm, call in case.calls.items()}
    return {
        arm: max(
            float((a - b).abs().max() / b.abs().max())
            for a, b in zip(own, found[REFERENCE], strict=True)
        )
        for arm, own in found.items()
    }


def check(pair: Pair, arms: Sequence[str], rate: float) -> list[dict[str, Any]]:
    """One row an arm of softmax + dropout in training: `check_dropout`."""
    return [
        {"arm": arm} | check_dropout(pair.training[arm], *pair.inputs, pair.given, rate)
        for arm in arms
    ]


def metrics(rows: list[dict[str, Any]], checks: list[dict[str, Any]]) -> dict[str, float]:
    """Peaks and kernels of training; errors, and the largest standard score of all masks.

    `compiled` is 0 where torch.compile was off or did not work: then that arm's are missing.
    """
    values: dict[str, float] = {"compiled": int(any(row["arm"] == COMPILED for row in rows))}
    for row in rows:
        if row["mode"] == "training":
            name = f"{row['pair']}_{row['arm']}"
            values[f"peak_mib_{name}"] = round(row["peak_mib"], 2)
            values[f"kernels_{name}"] = row["kernels"]
    values["max_error"] = max(
        *(row["max_error"] for row in rows if row["max_error"] != ""),
        *(max(row["max_error"], row["max_gradient_error"]) for row in checks),
    )
    return values | {"dropout_largest_z": largest_z(checks)}


def times(rows: list[dict[str, Any]]) -> dict[str, float]:
    """`ms_<pair>_<mode>_<arm>` of each row."""
    return {
        f"ms_{row['pair']}_{row['mode']}_{row['arm']}": round(row["milliseconds"], 3)
        for row in rows
    }
