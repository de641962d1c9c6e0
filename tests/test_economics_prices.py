"""Prices and hardware: dates and sources, tiers, published rates, metrics files, bad names."""

import csv
import datetime
import json
import re
from importlib import resources
from pathlib import Path

import pytest

from inferlab.economics.cost import Price, Workload
from inferlab.economics.hardware import (
    MODELS,
    measured_rates,
    offers,
    published_rates,
    rented,
    share_of_peak,
)
from inferlab.economics.prices import api_price
from inferlab.errors import InferlabError

SHAPE = Workload(500, 200, 1.0)
DAY = datetime.date(2026, 12, 1)


def rows_of(name: str) -> list[dict[str, str]]:
    with resources.files("inferlab.economics").joinpath(name).open() as file:
        return list(csv.DictReader(file))


def test_api_price_and_cost_of_a_request() -> None:
    price = api_price("groq/llama-3.1-8b-instant", SHAPE, DAY)
    assert (price.usd_per_mtok_input, price.usd_per_mtok_output) == (0.05, 0.08)
    assert price.usd_per_request(SHAPE) == pytest.approx(500 * 0.05e-6 + 200 * 0.08e-6)
    assert price.date == "2026-12-01"
    assert re.search(r"genai-prices [\d.]+ .*https://", price.source)


def test_api_price_is_that_of_one_request_and_not_of_a_million_tokens() -> None:
    """This price has tiers by the length of the prompt; a short request is in the lowest."""
    short = api_price("anthropic/claude-sonnet-4-5", SHAPE, DAY)
    long = api_price("anthropic/claude-sonnet-4-5", Workload(300_000, 200, 1.0), DAY)
    assert short.usd_per_mtok_input == 3
    assert long.usd_per_mtok_input > short.usd_per_mtok_input


def test_api_price_is_that_of_the_day() -> None:
    name = "novita/meta-llama/llama-3.1-8b-instruct"
    before = api_price(name, SHAPE, datetime.date(2026, 10, 1))
    after = api_price(name, SHAPE, datetime.date(2026, 11, 1))
    assert before.usd_per_mtok_input > after.usd_per_mtok_input


def test_a_price_of_the_users_own_wins_and_needs_no_known_name() -> None:
    own = {"groq/llama-3.1-8b-instant": (1.0, 2.0), "house/model": (0.0, 3.0)}
    for name, usd in own.items():
        price = api_price(name, SHAPE, DAY, own)
        assert (price.usd_per_mtok_input, price.usd_per_mtok_output) == usd
        assert price.source == "set by the user"
    with pytest.raises(InferlabError, match=r"the price of a/b must be 0 or more; got \(-1.0, 1.0"):
        api_price("a/b", SHAPE, DAY, {"a/b": (-1.0, 1.0)})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("groq/llama-3.1-8b", "unknown API model .* did you mean groq/llama-3.1-8b-instant"),
        ("xyzzy", "unknown API model 'xyzzy'; write provider/model as genai-prices does"),
        ("cloudflare/@cf/pfnet/plamo-embedding-1b", "has no price by the token in genai-prices"),
        ("openrouter/meta-llama/llama-3.2-1b-instruct:free", "has no price by the token"),
    ],
)
def test_api_models_that_are_unknown_or_without_price(name: str, message: str) -> None:
    with pytest.raises(InferlabError, match=message) as error:
        api_price(name, SHAPE, DAY)
    assert "\n" not in str(error.value)


def test_every_number_in_the_package_has_a_source() -> None:
    for row in rows_of("gpu_prices.csv"):
        assert datetime.date.fromisoformat(row["date"])
        assert row["provider"] and row["item"] and float(row["usd_per_hour_total"]) > 0
    for row in rows_of("published_serving.csv"):
        assert row["source_title"] and row["source_location"] and row["source_date_or_version"]
    assert all(row["source"] for row in rows_of("gpu_specs.csv"))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("hardware", ["a100", "h100"])
def test_published_rates_fit_their_rows_and_stay_below_the_peak(hardware: str, model: str) -> None:
    rates = published_rates(hardware, model)
    assert 0 < rates.fit_error < 0.2
    assert MODELS[model].name in rates.source
    assert 0.1 < share_of_peak(hardware, model, rates.prefill_tokens_per_s) < 1


def test_published_prefill_rate_agrees_with_the_batch_prefilled_alone() -> None:
    """16 prompts of 1,024 tokens took 425.67 ms on the H100: 38,490 tokens/s."""
    rates = published_rates("h100", "llama_3_8b")
    assert rates.prefill_tokens_per_s == pytest.approx(16 * 1024 / 0.42567, rel=0.02)


def test_the_newer_gpu_is_faster_in_both_phases() -> None:
    for model in MODELS:
        old, new = published_rates("a100", model), published_rates("h100", model)
        assert new.prefill_tokens_per_s > old.prefill_tokens_per_s
        assert new.decode_tokens_per_s > old.decode_tokens_per_s


def test_an_instance_of_eight_gpus_is_eight_replicas_at_one_price() -> None:
    found = rented("a100", "aws_p4de_24xlarge", "llama_3_8b")
    assert found.replicas == 8
    assert found.instance_hour.usd == pytest.approx(27.44705)
    assert "p4de.24xlarge" in found.instance_hour.source
    own = Price(9.0, "2026-12-01", "mine")
    assert rented("a100", "aws_p4de_24xlarge", "llama_3_8b", own).instance_hour == own


@pytest.mark.parametrize(
    ("hardware", "offer", "model", "message"),
    [
        ("h100", "aws_p5", "llama_3_8b", "unknown offer 'aws_p5'; .* did you mean aws_p5_4xlarge"),
        ("a100", "aws_p5_4xlarge", "llama_3_8b", "is h100, not a100; offers of a100: aws_p4de"),
        ("b200", "aws_p5_4xlarge", "llama_3_8b", "not b200; known hardware: a100, h100"),
        ("h100", "aws_p5_4xlarge", "llama", "unknown published model 'llama'; known: llama_3_8b"),
    ],
)
def test_unknown_hardware(hardware: str, offer: str, model: str, message: str) -> None:
    with pytest.raises(InferlabError, match=message):
        rented(hardware, offer, model)
    assert offer == "aws_p5" or offer in offers()


def test_measured_rates_and_their_faults(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    with pytest.raises(InferlabError, match=r"base.json is missing; run the stage serve_benchmark"):
        measured_rates(path)
    path.write_text("{")
    with pytest.raises(InferlabError, match=r"base.json is not JSON"):
        measured_rates(path)
    values = {"prefill_tokens_per_s": 600.0, "decode_tokens_per_s": 400.0, "failed_requests": 2}
    for key in values:
        path.write_text(json.dumps({name: one for name, one in values.items() if name != key}))
        with pytest.raises(InferlabError, match=rf"base.json has no {key}; run the stage"):
            measured_rates(path)
    path.write_text(json.dumps(values | {"decode_tokens_per_s": 0}))
    with pytest.raises(InferlabError, match=r"decode_tokens_per_s must be above 0; .*base.json"):
        measured_rates(path)
    path.write_text(json.dumps(values))
    rates, failed = measured_rates(path)
    assert (rates.prefill_tokens_per_s, rates.decode_tokens_per_s, failed) == (600, 400, 2)
    assert "2 requests failed" in rates.source
