"""Decode rates put behind another context than they were measured at, by hand."""

import json
from pathlib import Path

import pytest

from inferlab.economics.context import at_context, cache_read_seconds, mean_context
from inferlab.economics.cost import Rates
from inferlab.errors import InferlabError

RATES = Rates(1000.0, 400.0, "by hand")


def test_the_context_of_an_output_token() -> None:
    """Two tokens decoded after a prompt of 500 have 500 and 501 before them."""
    assert mean_context(500, 1) == 500
    assert mean_context(500, 2) == 500.5


def test_a_longer_context_costs_its_reads() -> None:
    """A rate of 400 behind 100 tokens: 500 tokens more at 1 us are 0.5 ms on top of 2.5."""
    longer = at_context(RATES, 100, 600, 1e-6)
    assert 1 / longer.decode_tokens_per_s == pytest.approx(3e-3)
    assert longer.prefill_tokens_per_s == 1000
    assert "400.0 tokens/s behind 100 tokens, put behind 600" in longer.source
    assert at_context(RATES, 100, 100, 1e-6).decode_tokens_per_s == pytest.approx(400)
    with pytest.raises(InferlabError, match=r"measured behind 9000 tokens says nothing of 600"):
        at_context(RATES, 9000, 600, 1e-6)


def test_the_cost_of_a_read_and_its_faults(tmp_path: Path) -> None:
    path = tmp_path / "step_cost.json"
    with pytest.raises(InferlabError, match=r"step_cost.json is missing; run the stage step_cost"):
        cache_read_seconds(path)
    path.write_text("{")
    with pytest.raises(InferlabError, match=r"step_cost.json is not JSON"):
        cache_read_seconds(path)
    path.write_text("{}")
    with pytest.raises(InferlabError, match=r"step_cost.json has no context_ns; run the stage"):
        cache_read_seconds(path)
    path.write_text(json.dumps({"context_ns": 3500.0}))
    assert cache_read_seconds(path) == pytest.approx(3.5e-6)
