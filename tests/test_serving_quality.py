"""What the stages hand on about quality as served: tables and ratios, and where there is none."""

import logging
from pathlib import Path

import pytest

from inferlab.serving import quality


def test_evaluated_perplexities_are_read_from_the_table(tmp_path: Path) -> None:
    (tmp_path / "int8.csv").write_text("window,token_perplexity\n0,20.5\n1,10\n")
    assert quality.evaluated_perplexities(tmp_path / "int8.csv") == [20.5, 10.0]


@pytest.mark.parametrize("content", [None, '{"failed_requests": 0}'])
def test_ratio_that_was_not_measured_is_1_with_one_warning(
    content: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "int8.json"
    if content:
        file.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert quality.measured_ratio(file) == 1
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{file} has no served_perplexity_ratio: vLLM's arithmetic is taken to cost no quality"
    )


def test_ratio_that_was_measured_is_taken_quietly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gptq.json").write_text('{"served_perplexity_ratio": 1.04}')
    with caplog.at_level(logging.WARNING):
        assert quality.measured_ratio(tmp_path / "gptq.json") == 1.04
    assert not caplog.records
