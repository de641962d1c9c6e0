"""The plan of loads, its bad input, and what is made of the outcomes."""

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.serving import quality, results
from inferlab.serving.experiment import (
    Load,
    Outcomes,
    Put,
    ServeBenchmarkParams,
    along,
    plan,
)
from inferlab.serving.load import ErrorKind, Outcome

SECTION = yaml.safe_load(Path("params.yaml").read_text())["serve_benchmark"]


def read(folder: Path, **changes: object) -> ServeBenchmarkParams:
    file = folder / "params.yaml"
    file.write_text(yaml.safe_dump({"serve_benchmark": {**SECTION, **changes}}))
    return parameters.load("serve_benchmark", ServeBenchmarkParams, file)


@pytest.fixture
def params(tmp_path: Path) -> ServeBenchmarkParams:
    return read(
        tmp_path,
        variants=["base", "int8"],
        concurrency=[2, 1],
        input_tokens=[8, 32],
        output_tokens=[4],
        middle={"concurrency": 2, "input_tokens": 8, "output_tokens": 4},
        prefill={"concurrency": 1, "input_tokens": 32, "output_tokens": 1},
        decode={"concurrency": 2, "input_tokens": 8, "output_tokens": 4},
        rounds=3,
        length_rounds=1,
        objective={"ttft_ms": 150.0, "tpot_ms": 1000.0, "share": 1.0},
    )


def answered(
    load: Load, slowness: float, error: ErrorKind | None = None, failing: int = 0
) -> list[Outcome]:
    """One request a client, all in step: tokens at 0.1, 0.2, … seconds, times `slowness`."""
    chunks = tuple(0.1 * slowness * (i + 1) for i in range(load.output_tokens))
    done = Outcome(0.0, 0.0, chunks[-1], chunks, load.input_tokens, load.output_tokens, None)
    failed = dataclasses.replace(done, error=error, output_tokens=0)
    return [failed if i < failing else done for i in range(load.concurrency)]


@pytest.fixture
def outcomes(params: ServeBenchmarkParams) -> Outcomes:
    """Three rounds that take 1, 2 and 1.5 times as long; int8 is twice as fast."""
    return {
        (variant, put): [answered(put.load, factor * speed) for factor in (1.0, 2.0, 1.5)[:rounds]]
        for variant, speed in (("base", 1.0), ("int8", 0.5))
        for put, rounds in plan(params).items()
    }


def test_one_axis_moves_at_a_time_around_the_middle(params: ServeBenchmarkParams) -> None:
    assert along("concurrency", params) == [Put(Load(1, 8, 4)), Put(Load(2, 8, 4))]
    assert along("input_tokens", params) == [Put(Load(2, 8, 4)), Put(Load(2, 32, 4))]
    assert along("output_tokens", params) == [Put(Load(2, 8, 4))]


def test_shared_loads_are_put_once_with_the_rounds_of_concurrency(
    params: ServeBenchmarkParams,
) -> None:
    assert plan(params) == {
        Put(Load(1, 8, 4)): 3,
        Put(Load(2, 8, 4)): 3,
        Put(Load(2, 32, 4)): 1,
        Put(Load(1, 32, 1), steady=False): 1,
        Put(Load(2, 8, 4), steady=False): 1,
    }


def test_metrics_are_medians_over_rounds(params: ServeBenchmarkParams, outcomes: Outcomes) -> None:
    values = results.variant_metrics(outcomes, "base", params)
    # Two requests of four tokens in 0.4, 0.8 and 0.6 seconds.
    assert values["output_tokens_per_s_c2"] == pytest.approx(8 / 0.6)
    assert values["output_tokens_per_s_c2_spread"] == pytest.approx((8 / 0.4 - 8 / 0.8) * 0.6 / 8)
    assert values["ttft_ms_p50_c2"] == pytest.approx(150)
    assert values["ttft_ms_p95_c1"] == pytest.approx(150)
    assert values["tpot_ms_p50_c1"] == pytest.approx(150)
    assert values["prefill_tokens_per_s"] == pytest.approx(32 / 0.1)
    assert values["decode_tokens_per_s"] == pytest.approx(2 / 0.1)
    assert values["decode_concurrency"] == 2
    assert values["failed_requests"] == 0


def test_operating_point_is_the_highest_concurrency_within_the_objective(
    params: ServeBenchmarkParams, outcomes: Outcomes
) -> None:
    values = results.variant_metrics(outcomes, "int8", params)
    assert values["operating_concurrency"] == 2
    assert values["goodput_requests_per_s"] == pytest.approx(2 / 0.3)
    for put in along("concurrency", params):
        outcomes["int8", put] = [answered(put.load, 4.0)] * 3
    values = results.variant_metrics(outcomes, "int8", params)
    assert (values["operating_concurrency"], values["goodput_requests_per_s"]) == (0, 0)


def test_failures_are_counted_over_all_loads_and_named_by_kind(
    params: ServeBenchmarkParams, outcomes: Outcomes
) -> None:
    short, long = Put(Load(2, 8, 4)), Put(Load(2, 32, 4))
    outcomes["base", short][1] = answered(short.load, 1.0, "cut", failing=1)
    outcomes["base", long][0] = answered(long.load, 1.0, "http_5xx", failing=1)
    assert results.variant_metrics(outcomes, "base", params)["failed_requests"] == 2
    assert results.variant_metrics(outcomes, "int8", params)["failed_requests"] == 0
    counted = {
        (row["variant"], row["error"]): row["requests"]
        for row in results.failure_table(outcomes, params.variants)
        if row["requests"]
    }
    assert counted == {("base", "cut"): 1, ("base", "http_5xx"): 1}


def test_table_of_an_axis_has_a_row_for_each_variant_and_value(
    params: ServeBenchmarkParams, outcomes: Outcomes
) -> None:
    rows = results.axis_table("concurrency", outcomes, params)
    assert [(row["variant"], row["concurrency"]) for row in rows] == [
        ("base", 1),
        ("base", 2),
        ("int8", 1),
        ("int8", 2),
    ]
    first = rows[0]
    assert (first["rounds"], first["requests"]) == (3, 3)
    assert first["ttft_ms_p50_min"] == pytest.approx(100)
    assert first["ttft_ms_p50"] == pytest.approx(150)
    assert first["ttft_ms_p50_max"] == first["ttft_ms_p95_max"] == pytest.approx(200)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "serve_benchmark.rounds must be greater than or equal to 1; got 0"),
        ({"concurrency": []}, "serve_benchmark.concurrency"),
        ({"concurency": [1]}, "did you mean concurrency?"),
        (
            {"input_tokens": [128, 2500]},
            "a request of 2564 tokens of input and output is longer than engine.max_model_len, "
            "2560; shorten it or raise the limit",
        ),
        ({"engine": {**SECTION["engine"], "dtype": "int8"}}, "serve_benchmark.engine.dtype"),
        (
            {"prefill": {"concurrency": 1, "input_tokens": 64, "output_tokens": 2}},
            "prefill.output_tokens must be 1",
        ),
    ],
)
def test_bad_parameters_are_told_before_any_work(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InferlabError) as caught:
        read(tmp_path, **changes)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_served_perplexity_is_compared_on_the_windows_that_were_served() -> None:
    ratio = quality.perplexity_ratio([22.0, 11.0], [20.0, 10.0, 99.0])
    assert ratio == pytest.approx(1.1)


def test_served_quality_needs_the_evaluation_and_room(
    params: ServeBenchmarkParams, tmp_path: Path
) -> None:
    with pytest.raises(InferlabError, match=r"int8.csv is missing.*run dvc repro evaluate@int8"):
        quality.evaluated_perplexities(tmp_path / "int8.csv")
    limit = params.engine.max_model_len
    quality.require_room(torch.zeros(1, limit - 1), params.engine)
    with pytest.raises(InferlabError, match=f"{limit} tokens.*do not fit engine.max_model_len"):
        quality.require_room(torch.zeros(1, limit), params.engine)
