"""Perplexity and the ranking of answers against transformers' own losses and full logits."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from inferlab.errors import InferlabError
from inferlab.evaluation.harness import Row, Scorer, run_tasks
from inferlab.evaluation.perplexity import Perplexity, perplexity, token_nats
from inferlab.evaluation.tasks import write_task

CONTEXT = 512
Pairs = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_gpt2"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    """In fp32, so that only the arithmetic of ours and theirs is compared."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def windows(count: int = 3, length: int = 50) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(3, 512, (count, length), generator=generator).int(),
        "words": torch.tensor([10, 20, 30][:count]).int(),
        "bytes": torch.tensor([100, 150, 200][:count]).int(),
    }


def pairs(seed: int = 0) -> Pairs:
    """Contexts and continuations of many lengths, some of a single token, one context shared."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [(5, 2), (1, 1), (40, 3), (12, 9), (12, 1), (3, 30), (7, 7)]
    ids = [torch.randint(3, 512, (a + b,), generator=generator).tolist() for a, b in lengths]
    apart = [(row[:a], row[a:]) for row, (a, _) in zip(ids, lengths, strict=True)]
    return [*apart, (apart[3][0], apart[5][1]), (apart[3][0], apart[0][1]), (apart[3][0], [9])]


def scorer(model: PreTrainedModel, folder: Path, batch_tokens: int = 100) -> Scorer:
    return Scorer(model, AutoTokenizer.from_pretrained(folder), batch_tokens)


def scored(model: PreTrainedModel, folder: Path, asked: Pairs, batch_tokens: int) -> list:
    requests = [(None, context, continuation) for context, continuation in asked]
    return scorer(model, folder, batch_tokens)._loglikelihood_tokens(requests)


@torch.no_grad()
def plainly(model: PreTrainedModel, context: list[int], continuation: list[int]) -> tuple:
    """Log-likelihood and greediness from the logits of every position, one pair at a time."""
    logits = model(torch.tensor([context + continuation])).logits[0].float().log_softmax(-1)
    rows = logits[len(context) - 1 : -1]
    total = sum(float(row[token]) for row, token in zip(rows, continuation, strict=True))
    return total, rows.argmax(-1).tolist() == continuation


def test_perplexity_is_the_exponential_of_transformers_own_loss(model: PreTrainedModel) -> None:
    one = windows(count=1)
    ids = one["input_ids"].long()
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    score = perplexity(model, one, batch=1)
    assert score.token == pytest.approx(math.exp(loss), rel=1e-4)
    assert score.scored == 49


def test_perplexity_of_many_windows_is_of_all_their_tokens(model: PreTrainedModel) -> None:
    ids = windows()["input_ids"].long()
    with torch.no_grad():
        losses = [float(model(row[None], labels=row[None]).loss) for row in ids]
    for batch in (1, 2, 3):
        score = perplexity(model, windows(), batch)
        assert score.token == pytest.approx(math.exp(sum(losses) / 3), rel=1e-4)
        by_window = [row["token_perplexity"] for row in score.by_window()]
        assert by_window == pytest.approx([math.exp(loss) for loss in losses], rel=1e-4)


def test_words_and_bytes_by_hand() -> None:
    """7 bits over 4 tokens, 2 words and 14 bytes."""
    nats = torch.tensor([3.0, 4.0], dtype=torch.float64) * math.log(2)
    score = Perplexity(nats, torch.tensor([2, 2]), torch.tensor([1, 1]), torch.tensor([8, 6]))
    assert score.token == pytest.approx(2 ** (7 / 4))
    assert score.word == pytest.approx(2 ** (7 / 2))
    assert score.bits_per_byte == pytest.approx(0.5)
    assert score.scored == 4
    assert [row["window"] for row in score.by_window()] == [0, 1]
    assert [row["token_perplexity"] for row in score.by_window()] == pytest.approx([2**1.5, 4])


def test_counts_are_those_of_the_windows(model: PreTrainedModel) -> None:
    score = perplexity(model, windows(), 2)
    nats = float(score.nats.sum())
    assert score.word == pytest.approx(math.exp(nats / 60))
    assert score.bits_per_byte == pytest.approx(nats / 450 / math.log(2))


def test_logits_made_some_rows_at_a_time_are_the_same(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1100, 64, generator=generator)
    targets = torch.randint(0, 512, (1100,), generator=generator)
    with torch.no_grad():
        head = model.get_output_embeddings()
        expected = -head(states).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(token_nats(model, states, targets), expected)


def test_window_longer_than_the_context_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(InferlabError) as caught:
        perplexity(model, windows(1, CONTEXT + 1), 1)
    assert str(caught.value) == (
        "held-out windows of 513 tokens do not fit the model's context of 512; "
        "shorten them (params.yaml: prepare) to 512 or less"
    )
    assert math.isfinite(perplexity(model, windows(1, CONTEXT), 1).token)


def test_answers_are_scored_as_by_full_logits(model: PreTrainedModel, folder: Path) -> None:
    found = scored(model, folder, pairs(), batch_tokens=100)
    for (total, greedy), (context, continuation) in zip(found, pairs(), strict=True):
        expected, expected_greedy = plainly(model, context, continuation)
        assert total == pytest.approx(expected, rel=1e-4)
        assert greedy == expected_greedy


def test_greedy_is_true_for_what_the_model_itself_would_say(
    model: PreTrainedModel, folder: Path
) -> None:
    context = pairs()[0][0]
    said = list(context)
    for _ in range(4):
        with torch.no_grad():
            said.append(int(model(torch.tensor([said])).logits[0, -1].argmax()))
    own = said[len(context) :]
    other = [*own[:-1], (own[-1] + 1) % 512]
    first = [(own[0] + 1) % 512, *own[1:]]
    found = scored(model, folder, [(context, own), (context, other), (context, first)], 1000)
    assert [greedy for _, greedy in found] == [True, False, False]


@pytest.mark.parametrize("batch_tokens", [1, 30, 10_000])
def test_scores_do_not_depend_on_the_batches(
    model: PreTrainedModel, folder: Path, batch_tokens: int
) -> None:
    found = scored(model, folder, pairs(), batch_tokens)
    wanted = scored(model, folder, pairs(), 100)
    assert [total for total, _ in found] == pytest.approx([total for total, _ in wanted], rel=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]


def test_batches_hold_every_request_once_within_the_limit(
    model: PreTrainedModel, folder: Path
) -> None:
    one = scorer(model, folder, batch_tokens=50)
    requests = [(None, context, continuation) for context, continuation in pairs()]
    one._loglikelihood_tokens(requests)
    contexts = {tuple(context) for context, _ in pairs()}
    shared = sum(map(len, contexts)) + sum(len(continuation) - 1 for _, continuation in pairs())
    assert shared <= one.scored_tokens < 1.5 * shared


def test_a_row_holds_its_context_once() -> None:
    row = Row([5, 6], [[7, 8, 9], [3], [4, 2]], [0, 1, 2])
    assert row.tokens == [5, 6, 7, 8, 4]
    assert row.positions == [0, 1, 2, 3, 2]
    assert list(row.places()) == [[1, 2, 3], [1], [1, 4]]
    assert row.visible().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_tasks_give_accuracy_and_its_standard_error(
    model: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    choices = [" the river", " a mill", " bread", " nothing"]
    texts = [f"{start} town{end}" for start in ("An old", "A new") for end in (" of", " by", "")]
    labels, rows = [], []
    for number, text in enumerate(texts):
        prompt = tokenizer.encode(f"Question: {text}\nAnswer:", add_special_tokens=False)
        totals = [
            plainly(model, prompt, tokenizer.encode(f" {one.strip()}", add_special_tokens=False))[0]
            for one in choices
        ]
        best = max(range(4), key=totals.__getitem__)
        labels.append(best if number % 3 else (best + 1) % 4)  # two in three are right
        rows.append(
            {
                "question": text,
                "choices": [one.strip() for one in choices],
                "label": labels[-1],
            }
        )
    write_task(tmp_path, "trivia", rows)
    write_task(tmp_path, "cloze", [{"context": "The river rises in", "word": "zebra"}] * 3)
    result = run_tasks(scorer(model, folder), tmp_path)
    assert set(result) == {
        "trivia_accuracy",
        "trivia_accuracy_se",
        "cloze_accuracy",
        "cloze_accuracy_se",
    }
    assert result["trivia_accuracy"] == pytest.approx(4 / 6)
    assert result["trivia_accuracy_se"] == pytest.approx(math.sqrt(4 / 6 * 2 / 6 / 5))
    assert result["cloze_accuracy"] == 0
    assert result["cloze_accuracy_se"] == 0
