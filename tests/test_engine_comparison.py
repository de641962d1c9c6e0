"""vLLM against TensorRT-LLM: what is compared, what is left out, and what is refused."""

import csv
import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import report_project

from inferlab.errors import InferlabError
from inferlab.serving.engine_comparison import (
    CONDITIONS,
    Pair,
    differences,
    match,
    mismatch_table,
)
from inferlab.serving.engine_findings import Finding, answer, finding_table, verdict
from inferlab.serving.engine_measured import measured_table
from inferlab.serving.published import METRICS, TENSORRT, VLLM, Row, read_published
from stages import engine_comparison

ROWS = read_published()
GOOD = {
    "engine": VLLM,
    "engine_version": "1",
    "era": "2025-H2",
    "model": "m",
    "precision": "BF16",
    "gpu": "H100",
    "gpus": "1",
    "input_tokens": "100",
    "output_tokens": "50",
    "load": "static batch of 1",
    "metric": "total_throughput",
    "unit": "tokens/s",
    "value": "10",
    "source_title": "t",
    "source_location": "l",
    "source_date": "2025",
}


def row(line: int = 2, **changes: str) -> Row:
    raw = GOOD | changes
    kept = {key: raw[key] for key in Row.__dataclass_fields__ if key in raw}
    return Row(**kept | {"line": line, "value": float(raw["value"]), "source": raw["source_title"]})


def test_advantage_by_hand_is_above_one_when_tensorrt_is_ahead() -> None:
    faster = Pair(row(value="10"), row(3, engine=TENSORRT, value="12"))
    assert faster.advantage == pytest.approx(1.2)
    sooner = Pair(row(metric="ttft_median", value="10"), row(3, metric="ttft_median", value="12"))
    assert sooner.advantage == pytest.approx(10 / 12)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_any_other_condition_keeps_rows_apart(condition: str) -> None:
    ours, theirs = row(), row(3, engine=TENSORRT)
    assert differences(ours, theirs, 0.01) == []
    other = "200" if condition.endswith("tokens") else "other"
    changed = dataclasses.replace(theirs, **{condition: other})
    assert differences(ours, changed, 0.01) == [condition]
    assert match([ours, changed], 0.01) == ([], [ours, changed])


def test_lengths_may_differ_by_the_tolerance_only() -> None:
    ours, theirs = row(), row(3, engine=TENSORRT, input_tokens="101")
    assert differences(ours, theirs, 0.01) == []
    assert differences(ours, theirs, 0.009) == ["input_tokens"]


def test_what_is_not_stated_is_equal_within_one_source_only() -> None:
    ours, theirs = row(input_tokens=""), row(3, engine=TENSORRT, input_tokens="")
    assert differences(ours, theirs, 0.01) == []
    assert differences(ours, dataclasses.replace(theirs, source="u"), 0.01) == ["input_tokens"]
    assert differences(ours, row(3, engine=TENSORRT), 0.01) == ["input_tokens"]


def test_a_row_is_used_once() -> None:
    rows = [row(2), row(3), row(4, engine=TENSORRT)]
    pairs, alone = match(rows, 0.01)
    assert [(pair.vllm.line, pair.tensorrt.line) for pair in pairs] == [(2, 4)]
    assert [one.line for one in alone] == [3]


def test_matching_agrees_with_trying_all_combinations() -> None:
    """Brute force over the rows of the package, with the conditions compared as text."""
    pairs, alone = match(ROWS, 0.0)

    def key(one: Row) -> tuple[str, ...]:
        return (one.metric, *(getattr(one, name) for name in CONDITIONS))

    equal = [
        (ours.line, theirs.line)
        for ours, theirs in itertools.product(ROWS, ROWS)
        if (ours.engine, theirs.engine) == (VLLM, TENSORRT) and key(ours) == key(theirs)
    ]
    assert sorted((pair.vllm.line, pair.tensorrt.line) for pair in pairs) == sorted(equal)
    assert len(alone) == len(ROWS) - 2 * len(pairs)


def test_the_rows_of_the_package_are_solid_and_mostly_matched() -> None:
    assert 55 <= len(ROWS) <= 80
    assert all(one.source and one.era for one in ROWS)
    pairs, alone = match(ROWS, 0.01)
    assert 2 * len(pairs) > 0.9 * len(ROWS) and alone
    assert {pair.vllm.metric for pair in pairs} == set(METRICS)
    for pair in pairs:
        assert pair.vllm.source == pair.tensorrt.source


def test_mismatches_say_what_differs() -> None:
    _, alone = match(ROWS, 0.01)
    table = {one["line"]: one for one in mismatch_table(alone, ROWS, 0.01)}
    assert len(table) == len(alone) and all(one["differs_in"] for one in table.values())
    int8 = next(one for one in table.values() if one["precision"] == "int8")
    assert int8["differs_in"] == "precision"
    lonely = row(metric="tpot_mean")
    assert mismatch_table([lonely], [lonely], 0.01)[0]["differs_in"] == "metric"


def test_findings_rest_on_their_rows() -> None:
    pairs, _ = match(ROWS, 0.01)
    by_line = {one.line: one for one in ROWS}
    findings = answer(pairs)
    assert len({(one.question, one.group) for one in findings}) == len(findings)
    for one, told in zip(findings, finding_table(findings, 0.05), strict=True):
        assert told["lowest"] <= told["advantage"] <= told["highest"]
        lines = [part.split("/") for part in told["lines"].split()]
        assert len(lines) == told["pairs"] == len(one.pairs)
        for ours, theirs in lines:
            assert by_line[int(ours)].engine == VLLM and by_line[int(theirs)].engine == TENSORRT


def test_the_larger_the_batch_of_short_texts_the_further_tensorrt_is_ahead() -> None:
    """128 tokens on an H100: 285.47/257.56 for one sequence, 12070.46/9704.66 for 64."""
    pairs, _ = match(ROWS, 0.01)
    short = {
        int(pair.vllm.load.split()[-1]): pair.advantage
        for pair in pairs
        if pair.vllm.metric == "total_throughput"
        and pair.vllm.gpu.startswith("H100")
        and pair.vllm.input_tokens == "128"
    }
    assert short[1] == pytest.approx(285.47 / 257.56) and short[64] == pytest.approx(
        12070.46 / 9704.66
    )
    assert short[64] > short[32] > short[16] > short[1]


def test_verdict_needs_every_pair_beyond_the_margin() -> None:
    def finding(*ratios: float, metric: str = "total_throughput") -> Finding:
        return Finding(
            "q",
            "g",
            [
                Pair(row(metric=metric, value="1"), row(3, metric=metric, value=str(ratio)))
                for ratio in ratios
            ],
        )

    assert verdict(finding(1.06, 1.2), 0.05) == TENSORRT
    assert verdict(finding(1.04, 1.2), 0.05) == "neither"
    assert verdict(finding(0.9, 0.8), 0.05) == VLLM
    assert verdict(finding(1.5, metric="memory_peak"), 0.05) == "no verdict"


def test_what_ran_together_gets_a_ratio_and_nothing_else() -> None:
    arms = [
        {"arm": "transformers", "decode_tokens_per_s": "20"},
        {"arm": "runtime", "decode_tokens_per_s": "50"},
        {"arm": "window", "decode_tokens_per_s": "55"},
    ]
    formats = [{"variant": "base", "transformers_decode_tokens_per_s": "22"}]
    configurations = [
        {"engine": engine, "variant": variant, "speculative": drafts, "decode_tokens_per_s": speed}
        for engine, variant, drafts, speed in (
            ("transformers", "base", "0", "10"),
            ("vllm", "int8", "0", "15"),
            ("vllm", "base", "1", "19"),
        )
    ]
    prompts = {
        "serve_benchmark": 128,
        "format_comparison": 256,
        "memory_efficient": 1024,
        "end_to_end": 64,
    }
    served = {"base": {"tpot_ms_p50_c1": 25.0}}
    found = measured_table(served, formats, arms, configurations, prompts)
    assert [
        (one["engine"], one["decode_tokens_per_s"], one["over_transformers"]) for one in found
    ] == [
        ("vLLM", 40.0, ""),
        ("transformers", 22.0, ""),
        ("transformers", 20.0, 1.0),
        ("lean runtime", 50.0, 2.5),
        ("transformers", 10.0, 1.0),
        ("vLLM", 15.0, 1.5),
    ]
    assert [one["prompt_tokens"] for one in found] == [128, 256, 1024, 1024, 64, 64]


def published(folder: Path, *rows: Mapping[str, str]) -> Path:
    file = folder / "rows.csv"
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(GOOD))
        writer.writeheader()
        writer.writerows(rows)
    return file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unit": ""}, "rows.csv:3 has no unit; give it, or take the row out"),
        ({"source_title": " "}, "rows.csv:3 has no source_title"),
        ({"source_location": ""}, "rows.csv:3 has no source_location"),
        ({"source_date": ""}, "rows.csv:3 has no source_date"),
        ({"era": ""}, "rows.csv:3 has no era"),
        ({"unit": "ms"}, "rows.csv:3: total_throughput must be in tokens/s; got ms"),
        ({"engine": "vLM"}, "rows.csv:3: unknown engine 'vLM'; known: TensorRT-LLM, vLLM; did you"),
        ({"metric": "tpot"}, "rows.csv:3: unknown metric 'tpot'; known: memory_peak,"),
        ({"value": "2300-2500"}, "rows.csv:3: value must be a number above 0; got '2300-2500'"),
        ({"value": "0"}, "rows.csv:3: value must be a number above 0; got '0'"),
        ({"value": "inf"}, "value must be a number above 0; got 'inf'"),
    ],
)
def test_bad_rows_are_refused_by_line(
    tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(InferlabError) as caught:
        read_published(published(tmp_path, GOOD, GOOD | changes))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.smoke
def test_stage(workspace: Path) -> None:
    report_project.write_run()
    report_project.write_json("metrics/serve_benchmark/base.json", {"tpot_ms_p50_c1": 30.0})
    arms = [{"arm": name, "decode_tokens_per_s": 30.0} for name in ("transformers", "runtime")]
    report_project.write_table("plots/memory_efficient/arms.csv", arms)
    engine_comparison.main()
    found = json.loads(Path("metrics/engine_comparison.json").read_text())
    assert found["rows"] == 2 * found["pairs"] + found["rows_left_out"] == len(ROWS)
    short = (285.47 / 257.56 * 143.73 / 140.18) ** 0.5  # H100 and A100, one sequence
    assert found["throughput_advantage_128_batch_1"] == pytest.approx(short)
    assert found["throughput_advantage_2048_batch_64"] < 1 < found["throughput_advantage_2025_h2"]
    assert len(found) <= 12
    for name, least in (("findings", 10), ("pairs", 30), ("mismatches", 2), ("measured", 5)):
        assert Path(f"plots/engine_comparison/{name}.csv").read_text().count("\n") > least
    assert Path("plots/engine_comparison/engines.png").stat().st_size > 10_000
