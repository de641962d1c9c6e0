"""Speculative decoding in the runtime: the same text as without, drafters, and break-even."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from scipy import stats
from transformers import AutoTokenizer

from inferlab.errors import InferlabError
from inferlab.models.runtime.decoding import GREEDY, Sampling, generate, probabilities
from inferlab.models.runtime.llama import Llama
from inferlab.models.runtime.loading import load_llama
from inferlab.params import load
from inferlab.speculative import draft_study as study
from inferlab.speculative.break_even import best_length, break_even, speedup
from inferlab.speculative.closed_form import expected_tokens
from inferlab.speculative.decoding import Trace, decide, speculate
from inferlab.speculative.drafters import LookupDrafter, ModelDrafter, NgramDrafter, Proposal
from inferlab.speculative.prompts import KINDS, make_prompts
from tests.runtime_models import make_model, quantized

PROMPT = [5, 9, 5, 9, 5, 9, 7]
SAMPLED = Sampling(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Llama:
    return load_llama(folder, "fp32")


@pytest.fixture(scope="module")
def draft(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Llama:
    return load_llama(quantized(folder, tmp_path_factory.mktemp("draft") / "int4", "int4"), "fp32")


def plain(model: Llama, prompt: list[int], count: int) -> list[int | None]:
    return [step[0] for step in generate(model, [prompt], count, stop_at_end=False)]


@pytest.mark.parametrize("length", [1, 3, 7])
@pytest.mark.parametrize("kind", ["same", "int4", "ngram", "lookup"])
def test_greedy_text_is_that_of_plain_decoding(
    target: Llama, draft: Llama, kind: str, length: int
) -> None:
    text = np.array([5, 9, 5, 9, 7, 5, 9])
    drafter = {
        "same": lambda: ModelDrafter(target, GREEDY),
        "int4": lambda: ModelDrafter(draft, GREEDY),
        "ngram": lambda: NgramDrafter(text, 3),
        "lookup": lambda: LookupDrafter(3, 1),
    }[kind]()
    trace = speculate(target, PROMPT, drafter, length, 40)
    assert trace.tokens == plain(target, PROMPT, 40)
    if kind == "same":
        assert trace.accepted == trace.tried
        assert trace.target_passes == -(-39 // (length + 1))
    assert sum(trace.accepted) + trace.target_passes == 39


def test_a_drafter_serves_one_prompt_after_another(target: Llama, draft: Llama) -> None:
    drafter = ModelDrafter(draft, GREEDY)
    for prompt in (PROMPT, PROMPT[:3], [8]):
        assert speculate(target, prompt, drafter, 4, 20).tokens == plain(target, prompt, 20)


def test_sampled_text_follows_the_target(target: Llama) -> None:
    """The token after a proposal is distributed as the target alone would have it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, generator=generator) * 1.5
    wanted = probabilities(logits, SAMPLED)
    q = torch.softmax(torch.randn(6, generator=generator), 0)
    for chances in (q, None):
        seen: Counter[int] = Counter()
        for _ in range(6000):
            token = int(torch.multinomial(q, 1, generator=generator)) if chances is not None else 2
            proposal = Proposal([token], None if chances is None else chances[None])
            seen[decide(logits, proposal, SAMPLED, generator)[0]] += 1
        observed = np.array([seen[token] for token in range(6)])
        found = stats.chisquare(observed, wanted[0].double().numpy() * 6000 / wanted[0].sum())
        assert found.pvalue > 0.001


def test_a_sampled_draft_equal_to_the_target_is_always_accepted(target: Llama) -> None:
    trace = speculate(target, PROMPT, ModelDrafter(target, SAMPLED), 3, 25, SAMPLED)
    assert trace.accepted == trace.tried
    assert len(trace.tokens) == 25


def test_ngram_takes_the_likeliest_and_backs_off() -> None:
    drafter = NgramDrafter(np.array([1, 2, 3, 1, 2, 3, 1, 2, 4, 9, 9, 9, 9]), 3)
    assert drafter.propose([1, 2], 3).tokens == [3, 1, 2]
    assert drafter.propose([7, 4], 1).tokens == [9]  # only the last token is known
    assert drafter.propose([7, 8], 1).tokens == [9]  # neither: the commonest of all
    assert NgramDrafter(np.array([5, 6, 6]), 1).propose([1], 2).tokens == [6, 6]


def test_lookup_takes_the_longest_then_latest_match() -> None:
    text = [1, 2, 3, 8, 1, 2, 4, 7, 3, 1, 2]
    assert LookupDrafter(2, 1).propose(text, 2).tokens == [4, 7]
    assert LookupDrafter(3, 1).propose([*text[:-3], 2, 3], 1).tokens == [8]
    assert LookupDrafter(2, 2).propose([1, 2, 3], 2).tokens == []


def test_trace_counts_only_what_was_looked_at(target: Llama) -> None:
    class Wrong:
        def start(self, prompt: Any, room: int) -> None: ...

        def propose(self, tokens: Any, count: int) -> Proposal:
            return Proposal([(plain_next(tokens) + 1) % 96] * count)

    def plain_next(tokens: Any) -> int:
        return int(plain(target, list(tokens), 1)[0] or 0)

    trace = speculate(target, PROMPT, Wrong(), 4, 6)
    assert trace.accepted == [0, 0, 0, 0]
    assert trace.tried[0] == 4 and trace.tried[1:] == [0, 0, 0]
    assert trace.target_passes == 5


def test_closed_form_by_hand() -> None:
    assert expected_tokens(0.5, 2) == pytest.approx(1.75)
    assert expected_tokens(1.0, 4) == 5
    free = [1.0] * 8
    assert speedup(0.5, 2, 0.25, free) == pytest.approx(1.75 / 1.5)
    assert best_length(0.0, 0.1, free) == 1
    assert best_length(0.99, 0.0, free) == 7
    # a draft of cost c and one proposal pays when 1 + a >= 1 + c
    assert break_even(0.3, free) == pytest.approx(0.3, abs=0.0011)
    assert break_even(0.3, [1.0, 2.0, 3.0]) == float("inf")


def test_prompts_of_every_kind(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    windows = torch.arange(3, 163).reshape(2, 80)
    prompts = make_prompts(tokenizer, windows, 2, 32)
    assert Counter(kind for kind, _ in prompts) == dict.fromkeys(KINDS, 2)
    assert prompts[0][1] == list(range(3, 35))
    with pytest.raises(InferlabError, match=r"wants 3 held-out windows of at least 32 tokens"):
        make_prompts(tokenizer, windows, 3, 32)


def test_rounds_without_a_proposal_gain_and_cost_nothing() -> None:
    # Half of the rounds: 1 + 0.5 + 0.25 tokens for 2·0.1 + 1.2; the others 1 token for 1 pass.
    assert speedup(0.5, 2, 0.1, [1, 1.1, 1.2], 0.5) == pytest.approx((1.75 + 1) / (1.4 + 1))
    assert speedup(0.5, 2, 0.1, [1, 1.1, 1.2], 0.0) == 1
    assert speedup(0.5, 2, 0.1, [1, 1.1, 1.2]) == pytest.approx(1.75 / 1.4)


def test_share_of_passes_with_a_proposal() -> None:
    looked = Trace(tokens=[0] * 8, target_passes=4)
    looked.count(2, 1)
    looked.count(0, 0)
    looked.count(2, 0)
    looked.count(0, 0)
    silent = Trace(tokens=[0] * 3, target_passes=4)
    assert study.Tally([looked]).proposing == 0.5
    assert study.Tally([looked, silent]).proposing == 0.25


@pytest.mark.parametrize("length", [0, 8])
def test_draft_length_out_of_range(target: Llama, length: int) -> None:
    with pytest.raises(InferlabError, match=rf"draft length must be 1 to 7; got {length}"):
        speculate(target, PROMPT, LookupDrafter(2, 1), length, 4)


def test_bad_sections_are_refused(tmp_path: Path) -> None:
    good = yaml.safe_load((Path(__file__).parent.parent / "params.yaml").read_text())
    cases = {
        "shortest must be at most longest; got 3 and 2": {"lookup": {"longest": 2, "shortest": 3}},
        "draft_models.length must be less than or equal to 7": {"length": 9},
        "draft_models.ngram_order must be less than or equal to 6": {"ngram_order": 7},
    }
    for message, changes in cases.items():
        file = tmp_path / "params.yaml"
        file.write_text(yaml.safe_dump({"draft_models": good["draft_models"] | changes}))
        with pytest.raises(InferlabError, match=message):
            load("draft_models", study.DraftModelsParams, file)


def test_study_on_a_tiny_model(target: Llama, draft: Llama) -> None:
    params = study.DraftModelsParams(
        target="base",
        drafts={"int4": "gptq"},
        ngram_order=3,
        lookup=study.LookupParams(longest=3, shortest=2),
        length=3,
        prompts=1,
        prompt_tokens=8,
        new_tokens=12,
        temperature=1.0,
        vllm=False,
    )
    prompts = [("free", PROMPT), ("code", PROMPT[::-1])]
    drafters = {"same": study.by_model(target), "int4": study.by_model(draft)}
    tallies = study.run_prompts(target, drafters, prompts, params, 0)
    found = study.costs(target, {"int4": draft}, PROMPT * 2)
    values = study.summary(tallies)
    assert values["greedy_mismatches"] == 0
    assert values["acceptance_same"] == 1
    assert 0 <= values["acceptance_int4"] <= 1
    rows = study.table(tallies, found, params)
    assert len(rows) == 8  # drafters, decodings, kinds
    same = next(row for row in rows if row["drafter"] == "same" and row["decoding"] == "greedy")
    assert same["tokens_per_pass"] == pytest.approx(11 / 3)
    assert found.verify[0] == 1 and len(found.verify) == 8
    places = study.position_table(tallies)
    assert [row["place"] for row in places if row["drafter"] == "same"] == [1, 2, 3, 1, 2, 3]
