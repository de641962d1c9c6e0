"""The command line: readable tables, and every fault one line with exit status 1."""

import sys

import pytest

from inferlab import cli

OWN = "--prefill-tokens-per-s 1000 --decode-tokens-per-s 400 --usd-per-hour 2"


def run(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str]:
    """Exit status (or the line that goes to standard error with status 1) and standard output."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "argv", ["inferlab", *arguments.split()])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code, capsys.readouterr().out


def test_cost_of_ones_own_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One second a request: 43,200 a day an instance at a peak of 2, 48 USD a day."""
    status, output = run(
        f"cost {OWN} --requests-per-day 43201 --price-date 2026-12-01 --api house/model=1:8",
        monkeypatch,
        capsys,
    )
    assert not status
    assert "96.00" in output  # two instances
    assert "22,858" in output  # 48 USD over 0.0021 a request, and one more
    assert "2026-12-01" in output and "given on the command line" in output


def test_cost_of_a_known_offer_names_price_date_and_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, output = run(
        "cost --offer aws_p5_4xlarge --api groq/llama-3.1-8b-instant", monkeypatch, capsys
    )
    assert not status
    for text in ("2026-07-13", "6.88", "genai-prices", "LLM-Inference-Bench", "fit error", "never"):
        assert text in output


@pytest.mark.parametrize("name", ["[/red]", "[red]mine", "mine:one:"])
def test_names_are_shown_as_they_are(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets and colons are no markup: they neither vanish nor end in a traceback."""
    status, output = run(f"cost {OWN} --api {name}=1:8", monkeypatch, capsys)
    assert not status
    assert output.count(name) == 3  # a row, a column, a row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Missing command"),
        ("costs", "No such command 'costs'"),
        (
            "cost",
            "missing rates: give --prefill-tokens-per-s and --decode-tokens-per-s, or --offer",
        ),
        ("cost --prefill-tokens-per-s 5", "give both --prefill-tokens-per-s and --decode"),
        (
            "cost --prefill-tokens-per-s 5 --decode-tokens-per-s 5",
            "missing price: give --usd-per-hour, or --offer",
        ),
        (f"cost {OWN} --decode-tokens-per-s 0", "decode_tokens_per_s must be above 0; got 0"),
        (f"cost {OWN} --usd-per-hour -1", "a price per hour must be above 0; got -1"),
        (f"cost {OWN} --input-tokens many", "Invalid value for '--input-tokens'"),
        (f"cost {OWN} --requests-per-day 0", "--requests-per-day must be at least 1"),
        (f"cost {OWN} --price-date today", "--price-date must be a day as YYYY-MM-DD; got 'today'"),
        (f"cost {OWN} --api groq/llama-3.1-8b", "did you mean groq/llama-3.1-8b-instant"),
        (f"cost {OWN} --api mine=1", "--api must be NAME=INPUT:OUTPUT in USD; got 'mine=1'"),
        (f"cost {OWN} --api =1:8", "--api must be NAME=INPUT:OUTPUT in USD; got '=1:8'"),
        ("cost --offer h100", "unknown offer 'h100'; known: aws_p4de_24xlarge"),
        ("cost --offer aws_p5_4xlarge --published-model gpt", "unknown published model 'gpt'"),
    ],
)
def test_faults_are_one_line(
    arguments: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line, output = run(arguments, monkeypatch, capsys)
    assert isinstance(line, str) and line.startswith("inferlab: ")
    assert message in line and "\n" not in line
    assert output == ""
