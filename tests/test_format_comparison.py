"""The format comparison: intervals, Pareto front, which figures stand for whom, and its stage."""

import csv
import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from inferlab.errors import InferlabError
from inferlab.evaluation.comparison import (
    FormatComparisonParams,
    pareto_front,
    perplexity_interval,
    summary,
    table,
)
from inferlab.evaluation.speed import speeds
from inferlab.store import save_tensors
from stages import format_comparison

PARAMS = FormatComparisonParams(
    variants=("base", "small"),
    served_as={"base": "base"},
    prompt_tokens=8,
    new_tokens=4,
    rounds=1,
    confidence=0.95,
)
QUALITY = {
    "base": {"model_bytes": 200, "bits_per_weight": 16, "trivia_accuracy": 0.5},
    "small": {"model_bytes": 100, "bits_per_weight": 4, "trivia_accuracy": 0.4},
}
WINDOWS = {"base": [10.0, 40.0, 20.0], "small": [11.0, 44.0, 22.0]}
SPEEDS = {"base": (100.0, 10.0), "small": (50.0, 5.0)}
SERVED = {
    "base": {
        "prefill_tokens_per_s": 300.0,
        "tpot_ms_p50_c1": 25.0,
        "served_perplexity_ratio": 1.01,
    }
}


def rows() -> list[dict[str, Any]]:
    return table(PARAMS, QUALITY, WINDOWS, SPEEDS, SERVED)


def test_perplexity_of_equal_windows_is_their_geometric_mean() -> None:
    found = perplexity_interval([10.0, 40.0], 0.95)
    assert found.value == pytest.approx(20)
    assert found.low * found.high == pytest.approx(400)
    # Student's quantile for one degree of freedom is 12.706, the standard error log(4)/2.
    assert math.log(found.high / 20) == pytest.approx(12.7062 * math.log(4) / 2, rel=1e-4)


def test_pairing_by_window_narrows_the_ratio() -> None:
    small, base = rows()
    assert small["ratio_to_base"] == pytest.approx(1.1)
    assert small["ratio_low"] == pytest.approx(1.1)
    assert small["ratio_high"] == pytest.approx(1.1)
    assert small["token_perplexity_high"] / small["token_perplexity_low"] > 1.5
    assert base["ratio_to_base"] == 1


def test_interval_covers_the_mean_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(400):
        nats = 3 + 0.2 * torch.randn(24, generator=generator)
        found = perplexity_interval(nats.exp().tolist(), 0.95)
        hits += found.low <= math.exp(3) <= found.high
    assert 0.92 < hits / 400 < 0.98


def test_one_window_gives_no_interval() -> None:
    with pytest.raises(InferlabError, match="over 1 held-out windows says nothing; raise prepare"):
        perplexity_interval([10.0], 0.95)


def test_served_speed_is_that_of_the_named_variant_and_empty_elsewhere() -> None:
    small, base = rows()
    assert (base["vllm_decode_tokens_per_s"], base["vllm_prefill_tokens_per_s"]) == (40, 300)
    assert base["vllm_measured_on"] == "base"
    assert base["vllm_perplexity_ratio"] == 1.01
    assert small["vllm_decode_tokens_per_s"] == small["vllm_perplexity_ratio"] == ""
    assert small["trivia_accuracy"] == 0.4


def test_variant_that_another_stands_for_has_its_speed_and_not_its_quality() -> None:
    params = dataclasses.replace(PARAMS, served_as={"base": "base", "small": "base"})
    small, base = table(params, QUALITY, WINDOWS, SPEEDS, SERVED)
    assert (small["vllm_decode_tokens_per_s"], small["vllm_prefill_tokens_per_s"]) == (40, 300)
    assert (small["vllm_measured_on"], small["vllm_perplexity_ratio"]) == ("base", "")
    assert base["vllm_perplexity_ratio"] == 1.01


def test_pareto_front_by_hand() -> None:
    points = [(1, 9.0), (2, 5.0), (2, 6.0), (3, 5.0), (4, 1.0)]
    assert pareto_front(points) == [True, True, False, False, True]


def test_summary_has_a_ratio_for_all_but_the_base() -> None:
    assert summary(rows()) == {"ratio_small": pytest.approx(1.1), "pareto_variants": 2}


def test_speeds_count_tokens_over_seconds(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    model = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    prompt = torch.arange(3, 11)[None]
    assert speeds({"one": model, "two": model}, prompt, new_tokens=5, rounds=2) == {
        "one": (8, 5),
        "two": (8, 5),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": ("a", "b")}, "variants must hold 'base'"),
        ({"served_as": {"big": "base"}}, "served_as names 'big', which is not among variants"),
    ],
)
def test_params_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PARAMS, **changes)


@pytest.mark.smoke
def test_stage_writes_its_table(workspace: Path, tiny_llama: Path) -> None:
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["run"]["threads"] = 1
    content["format_comparison"] |= {
        "variants": ["base", "small"],
        "served_as": {"base": "base"},
        "prompt_tokens": 8,
        "new_tokens": 2,
        "rounds": 1,
    }
    Path("params.yaml").write_text(yaml.safe_dump(content))
    for name in ("base", "small"):
        shutil.copytree(tiny_llama, Path("models", name))
        for folder in ("metrics/evaluate", "plots/evaluate"):
            Path(folder).mkdir(parents=True, exist_ok=True)
        Path(f"metrics/evaluate/{name}.json").write_text(json.dumps(QUALITY[name]))
        lines = [f"{number},{value}" for number, value in enumerate(WINDOWS[name])]
        Path(f"plots/evaluate/{name}.csv").write_text(
            "\n".join(["window,token_perplexity", *lines]) + "\n"
        )
    Path("data/windows").mkdir(parents=True)
    save_tensors(Path("data/windows/heldout.safetensors"), {"input_ids": torch.ones(1, 16).int()})
    with pytest.raises(SystemExit, match=r"metrics/serve_benchmark/base.json is missing"):
        format_comparison.main()
    Path("metrics/serve_benchmark").mkdir()
    Path("metrics/serve_benchmark/base.json").write_text(json.dumps(SERVED["base"]))
    format_comparison.main()
    with Path("plots/format_comparison/formats.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [row["variant"] for row in written] == ["small", "base"]
    assert float(written[0]["transformers_decode_tokens_per_s"]) > 0
    assert json.loads(Path("metrics/format_comparison.json").read_text())["pareto_variants"] == 2
    assert Path("plots/format_comparison/pareto.png").stat().st_size > 1000
