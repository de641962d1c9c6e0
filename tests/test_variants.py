"""The table of variants: ordered by quality, gaps shown as gaps, nothing without a run."""

import json
from pathlib import Path

import pytest

from inferlab.errors import InferlabError
from inferlab.reporting.variants import HEADINGS, variant_rows


def write(file: Path, values: dict[str, float]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values))


def quality(perplexity: float, packed: int = 1) -> dict[str, float]:
    return {
        "token_perplexity": perplexity,
        "trivia_accuracy": 0.5,
        "trivia_accuracy_se": 0.03,
        "cloze_accuracy": 0.25,
        "cloze_accuracy_se": 0.02,
        "model_bytes": 2_000_000,
        "bits_per_weight": 4.31,
        "packed": packed,
    }


def test_rows_are_ordered_by_perplexity_and_complete(tmp_path: Path) -> None:
    write(tmp_path / "evaluate" / "a.json", quality(20.0, packed=0))
    write(tmp_path / "evaluate" / "b.json", quality(10.0))
    served = {
        "output_tokens_per_s_c1": 30.0,
        "output_tokens_per_s_c16": 200.4,
        "output_tokens_per_s_c16_spread": 0.1,
        "ttft_ms_p50_c1": 99.6,
    }
    write(tmp_path / "serve_benchmark" / "b.json", served)
    costs = {"usd_per_mtok_input_this_machine_b": 0.1, "usd_per_mtok_output_this_machine_b": 0.25}
    write(tmp_path / "cost_report.json", costs)
    first, second = variant_rows(tmp_path)
    assert first == [
        "b",
        "2",
        "4.31",
        "10.00",
        "0.50±0.03",
        "0.25±0.02",
        "30",
        "200 (16)",
        "100",
        "0.10, 0.25",
    ]
    assert second[0] == "a (simulated)" and second[6:] == ["-"] * 4
    assert len(first) == len(second) == len(HEADINGS)


def test_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InferlabError, match="run the pipeline: make repro"):
        variant_rows(tmp_path)
