"""Fused operators against the unfused ones; counts read off the profiler; dropout as dropout."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inferlab.errors import InferlabError
from inferlab.fusion import compiling, operators
from inferlab.fusion.compiling import compilable, compile_seconds, fresh_cache
from inferlab.fusion.dropout_check import check_dropout, share_z, spread_z
from inferlab.fusion.operators import (
    linear_relu,
    linear_relu_fused,
    softmax_,
    softmax_dropout,
    softmax_dropout_fused,
)
from inferlab.fusion.study import (
    LinearShape,
    OperatorFusionParams,
    SoftmaxShape,
    cases,
    compile_all,
    metrics,
    pairs,
)
from inferlab.params import load
from inferlab.profiling.kernels import profile_work, saved_bytes
from stages import operator_fusion


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    return (output, *torch.autograd.grad(output, leaves, normal(*output.shape, seed=9)))


def test_linear_relu_by_hand() -> None:
    inputs, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0], [-1.0, 0.0]])
    assert linear_relu_fused(inputs, weight, torch.tensor([0.5, 0.0])).tolist() == [[3.5, 0]]


@pytest.mark.parametrize("rows", [1, 3, 6, 7])
def test_linear_relu_and_its_gradients_are_torchs(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "PRODUCT_ROWS", 3)
    tensors = normal(rows, 5), normal(6, 5, seed=1), normal(6, seed=2)
    for own, one in zip(
        gradients(linear_relu_fused, *tensors), gradients(linear_relu, *tensors), strict=True
    ):
        torch.testing.assert_close(own, one, rtol=0, atol=1e-5)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows or so a tile, and a last one that is not full."""
    monkeypatch.setattr(operators, "TILE_VALUES", 20)


@given(st.integers(1, 30), st.integers(1, 30))
@settings(deadline=None, max_examples=30)
def test_softmax_in_place(rows: int, columns: int) -> None:
    scores = 5 * normal(2, rows, columns)
    exact = scores.softmax(-1)
    found = softmax_(scores)
    assert found.data_ptr() == scores.data_ptr()
    torch.testing.assert_close(scores, exact, rtol=0, atol=1e-6)


def test_softmax_in_place_of_large_scores(small_tiles: None) -> None:
    scores = 1e4 * normal(5, 8)
    exact = scores.softmax(-1)
    torch.testing.assert_close(softmax_(scores), exact, rtol=0, atol=1e-6)


def test_dropout_has_the_mask_of_its_output_and_its_gradient(small_tiles: None) -> None:
    scores, rate = normal(3, 11, 8), 0.3
    torch.manual_seed(0)
    output, gradient = gradients(lambda leaf: softmax_dropout_fused(leaf, rate), scores)
    kept = output != 0
    assert 0.6 < kept.double().mean() < 0.8
    exact, exact_gradient = gradients(lambda leaf: F.softmax(leaf, -1) * kept / (1 - rate), scores)
    torch.testing.assert_close(output, exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, exact_gradient, rtol=0, atol=1e-6)


def test_rate_zero_is_softmax() -> None:
    found = gradients(lambda leaf: softmax_dropout_fused(leaf, 0.0), normal(4, 9))
    exact = gradients(lambda leaf: F.softmax(leaf, -1), normal(4, 9))
    for own, one in zip(found, exact, strict=True):
        torch.testing.assert_close(own, one, rtol=0, atol=1e-6)


def test_gradient_by_finite_differences(small_tiles: None) -> None:
    def function(scores: Tensor) -> Tensor:
        torch.manual_seed(3)
        return softmax_dropout_fused(scores, 0.4)

    assert torch.autograd.gradcheck(function, normal(5, 6).double().requires_grad_())


@pytest.mark.parametrize("arm", ["unfused", "fused"])
def test_dropout_passes_its_own_check(arm: str) -> None:
    function = {
        "unfused": lambda scores: softmax_dropout(scores, 0.2, True),
        "fused": lambda scores: softmax_dropout_fused(scores, 0.2),
    }[arm]
    torch.manual_seed(0)
    found = check_dropout(function, normal(600, 300), normal(600, 300, seed=1), 0.2)
    assert found["kept_share"] == pytest.approx(0.8, abs=0.005)
    assert max(abs(v) for name, v in found.items() if name.endswith("_z")) < 4
    assert max(found["max_error"], found["max_gradient_error"]) < 1e-6


def repeated_mask(scores: Tensor) -> Tensor:
    """The fault of a tile that draws the same coins as the one before."""
    kept = torch.empty(1, scores.shape[1]).bernoulli_(0.8)
    return scores.softmax(-1) * kept / 0.8


def fixed_mask(scores: Tensor) -> Tensor:
    kept = torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)) < 0.8
    return scores.softmax(-1) * kept / 0.8


def wrong_rate(scores: Tensor) -> Tensor:
    return F.dropout(scores.softmax(-1), 0.21)


@pytest.mark.parametrize(
    ("faulty", "score"),
    [(repeated_mask, "columns_z"), (fixed_mask, "again_z"), (wrong_rate, "share_z")],
)
def test_check_finds_faults(faulty: Callable[[Tensor], Tensor], score: str) -> None:
    torch.manual_seed(0)
    found = check_dropout(faulty, normal(600, 300), normal(600, 300, seed=1), 0.2)
    assert abs(found[score]) > 5


def test_check_finds_a_wrong_gradient() -> None:
    def function(scores: Tensor) -> Tensor:
        output = softmax_dropout_fused(scores, 0.2)
        return output + 0.5 * (scores - scores.detach()) * (output.detach() != 0)

    found = check_dropout(function, normal(50, 30), normal(50, 30, seed=1), 0.2)
    assert found["max_error"] < 1e-6 and found["max_gradient_error"] > 0.1


def test_standard_scores_by_hand() -> None:
    """Three of four true coins of a half: (¾ − ½) / ¼. Counts of 2 and 0: variance 2, not ½."""
    assert share_z(torch.tensor([True, True, True, False]), 0.5) == 1
    coins = torch.tensor([[True, True], [False, False]])
    assert spread_z(coins, 0.5) == pytest.approx((2 / 0.5 - 1) / 2**0.5)


def test_what_a_call_does_by_hand() -> None:
    """A product and a ReLU: two operators; the bias is copied first, so three passes over data."""
    inputs, weight, bias = normal(64, 32), normal(48, 32, seed=1), normal(48, seed=2)
    with torch.inference_mode():
        work, result = profile_work(lambda: linear_relu(inputs, weight, bias))
        fused, _ = profile_work(lambda: linear_relu_fused(inputs, weight, bias))
    size = 64 * 48 * 4
    assert torch.equal(result, linear_relu(inputs, weight, bias))
    assert (work.operators, work.kernels) == (2, 3)
    assert (work.allocations, work.allocated_bytes, work.peak_bytes) == (2, 2 * size, 2 * size)
    assert (fused.allocations, fused.peak_bytes) == (1, size)


def test_views_are_no_kernels() -> None:
    tensor = normal(4, 6)
    work, _ = profile_work(lambda: tensor.t()[1:].unsqueeze(0).expand(3, -1, -1).detach())
    assert work.operators >= 5
    assert (work.kernels, work.allocations) == (0, 0)
    copied, _ = profile_work(lambda: tensor.t().contiguous())
    assert (copied.kernels, copied.allocated_bytes) == (1, tensor.nbytes)


def test_gradients_hold_less_when_fused() -> None:
    """Without the gradient of ReLU as a whole."""
    leaves = [t.requires_grad_() for t in (normal(4096, 16), normal(64, 16), normal(64))]
    given = normal(4096, 64)
    size = given.nbytes

    def peak(function: Callable[..., Tensor]) -> int:
        def call() -> tuple[Tensor, ...]:
            output = function(*leaves)
            return (output, *torch.autograd.grad(output, leaves, given))

        return profile_work(call)[0].peak_bytes

    assert peak(linear_relu) > 2.2 * size
    assert peak(linear_relu_fused) < 1.5 * size


def test_what_is_saved_by_hand() -> None:
    """Unfused: weights and mask of dropout; fused: one tensor. Nothing without gradients."""
    scores = normal(64, 32).requires_grad_()
    assert saved_bytes(lambda: softmax_dropout(scores, 0.1, True)) == 2 * scores.nbytes
    assert saved_bytes(lambda: softmax_dropout_fused(scores, 0.1)) == scores.nbytes
    assert saved_bytes(lambda: softmax_dropout(scores.detach(), 0.1, True)) == 0


def test_dropout_holds_less_when_fused() -> None:
    scores = normal(2048, 256).requires_grad_()
    size = scores.nbytes
    given = normal(2048, 256, seed=1)

    def peak(function: Callable[[Tensor], Tensor]) -> int:
        def call() -> tuple[Tensor, ...]:
            output = function(scores)
            return (output, *torch.autograd.grad(output, scores, given))

        return profile_work(call)[0].peak_bytes

    assert peak(lambda s: softmax_dropout(s, 0.1, True)) >= 4 * size
    assert peak(lambda s: softmax_dropout_fused(s, 0.1)) < 3.3 * size


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_rate_out_of_range(rate: float) -> None:
    with pytest.raises(InferlabError, match="rate of dropout must be at least 0 and below 1; got"):
        softmax_dropout_fused(normal(2, 2), rate)


def test_scores_that_must_not_be_overwritten() -> None:
    with pytest.raises(InferlabError, match="so they cannot have a gradient"):
        softmax_(normal(2, 3).requires_grad_())
    with pytest.raises(InferlabError, match="softmax_ wants contiguous scores"):
        softmax_(normal(2, 3).t())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropout": 1.0}, "dropout must be less than 1; got 1.0"),
        ({"dropout": 0.0}, "dropout must be greater than 0; got 0.0"),
        ({"softmax": {"rows": 1, "columns": 8}}, "rows must be greater than or equal to 2; got 1"),
        ({"linear": {"rows": 4, "ins": 0, "outs": 2}}, "ins must be greater than 0; got 0"),
        ({"device": "gpu"}, "device must be one of 'cpu', 'cuda'; got 'gpu'"),
    ],
)
def test_parameters_out_of_range(change: dict[str, Any], message: str, workspace: Path) -> None:
    write_params(change)
    with pytest.raises(InferlabError, match=message):
        load("operator_fusion", OperatorFusionParams)


def write_params(change: dict[str, Any]) -> None:
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["run"]["threads"] = 1
    content["operator_fusion"] |= change
    Path("params.yaml").write_text(yaml.safe_dump(content))


PARAMS = OperatorFusionParams(
    "cpu", LinearShape(32, 16, 24), SoftmaxShape(32, 16), 0.1, 1, compile=True
)


@pytest.mark.smoke
def test_without_a_compiler_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor import config, cpp_builder

    monkeypatch.setattr(config.cpp, "cxx", (None, "no-such-compiler"))
    cpp_builder.cpp_compiler_search.cache_clear()
    torch._dynamo.reset()
    found = [case for pair in pairs(PARAMS, 0) for case in cases(pair)]
    with fresh_cache(True), caplog.at_level("WARNING"):
        left, seconds = compile_all(found)
    cpp_builder.cpp_compiler_search.cache_clear()
    assert [list(case.calls) for case in left] == [["unfused", "fused"]] * 4
    assert seconds == {}
    assert "torch.compile does not work here, so it is left out: " in caplog.text


def test_metrics_say_when_nothing_was_compiled() -> None:
    row = {"pair": "linear_relu", "mode": "training", "arm": "fused", "peak_mib": 1.0}
    rows = [row | {"kernels": 3, "max_error": 0.0}]
    checks = [{"share_z": -1.5, "rows_z": 0.5, "max_error": 1e-7, "max_gradient_error": 0.0}]
    assert metrics(rows, checks) == {
        "compiled": 0,
        "peak_mib_linear_relu_fused": 1.0,
        "kernels_linear_relu_fused": 3,
        "max_error": 1e-7,
        "dropout_largest_z": 1.5,
    }
    assert metrics([*rows, rows[0] | {"arm": "compiled"}], checks)["compiled"] == 1


@pytest.mark.slow
def test_compiled_arm_fuses(workspace: Path) -> None:
    if (
        compile_seconds(lambda: compilable(linear_relu)(normal(2, 2), normal(2, 2), normal(2)))
        is None
    ):
        pytest.skip("needs a C++ compiler that torch.compile can use; found none")
    function = compilable(softmax_dropout)
    found = check_dropout(
        lambda scores: function(scores, 0.2, True), normal(600, 304), normal(600, 304, seed=1), 0.2
    )
    assert found["max_gradient_error"] < 1e-6
    compiled, _ = profile_work(lambda: function(normal(64, 32), 0.1, False))
    unfused, _ = profile_work(lambda: softmax_dropout(normal(64, 32), 0.1, False))
    assert compiling.OPTIONS and compiled.kernels == unfused.kernels


@pytest.mark.smoke
def test_stage(workspace: Path) -> None:
    write_params(
        {
            "linear": {"rows": 64, "ins": 32, "outs": 48},
            "softmax": {"rows": 64, "columns": 32},
            "rounds": 1,
            "compile": False,
        }
    )
    operator_fusion.main()
    found = json.loads(Path("metrics/operator_fusion.json").read_text())
    assert found["compiled"] == 0 and found["max_error"] < 1e-5 and found["dropout_largest_z"] < 6
    fused, unfused = (found[f"peak_mib_softmax_dropout_{arm}"] for arm in ("fused", "unfused"))
    assert fused < unfused * 1.5
    with Path("plots/operator_fusion/cases.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    timing = json.loads(Path("metrics/timing/operator_fusion.json").read_text())
    assert {f"ms_{row['pair']}_{row['mode']}_{row['arm']}" for row in rows} <= set(timing)
    assert Path("plots/operator_fusion/fusion.png").stat().st_size > 10_000
