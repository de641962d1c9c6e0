"""Generated pairs: parsing, filtering, quality; a model that learns from them; the stage."""

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

from inferlab.distillation import generation
from inferlab.distillation.answers import Learner, exact_match, token_f1
from inferlab.distillation.data_study import DataDistillationParams, split_questions, training_sets
from inferlab.distillation.generation import (
    Generated,
    GeneratorParams,
    Request,
    asking_prompts,
    generation_prompts,
    question_prompt,
)
from inferlab.distillation.pairs import Filtered, filter_pairs, parse_pair, quality
from inferlab.distillation.training import TrainingParams
from inferlab.errors import InferlabError
from inferlab.models.loading import load_model, load_tokenizer
from inferlab.params import load
from inferlab.store import read_json, read_rows, write_rows
from stages import data_distillation

HARBOURS = ["north", "south", "east", "west", "upper", "lower", "outer", "inner", "old", "new"]
HUMAN = [
    {"question": f"How many boats has the harbour number {name}?", "answer": str(3 + number)}
    for number, name in enumerate(HARBOURS)
]
SETTINGS = TrainingParams(epochs=20, batch=4, learning_rate=5e-3, warmup=0.1, weight_decay=0.0)


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("Who wrote Hamlet the play?\nAnswer: Will.\n", ("Who wrote Hamlet the play?", "Will")),
        ("In what year did it end?\n Answer: 1918\nQuestion", ("In what year did it end?", "1918")),
        ("Who wrote the play Hamlet", None),
        ("Who wrote the play Hamlet?\n", None),
        ("Who wrote it?\nAnswer: Shakespeare", None),
        ("Who wrote the play Hamlet?\nAnswer: ...", None),
        ("Who wrote the play Hamlet?\nAnswer: It was written by a man of Stratford", None),
    ],
)  # fmt: skip
def test_only_the_asked_form_is_a_pair(text: str, pair: tuple[str, str] | None) -> None:
    expected = pair and {"question": pair[0], "answer": pair[1]}
    assert parse_pair(text) == expected


def test_each_text_is_rejected_for_one_reason_and_counted() -> None:
    test = [{"question": "Which river runs through the city of London?", "answer": "Thames"}]
    texts = [
        "What is the capital city of France?\nAnswer: Paris",
        "What is the capital city of France?\nAnswer: Lyon",
        "Which river runs through the city of London?\nAnswer: The Thames",
        "What colour is the White House?\nAnswer: White",
        "no form at all",
    ]
    found = filter_pairs(texts, [], test)
    assert found.kept == [{"question": "What is the capital city of France?", "answer": "Paris"}]
    assert found.rejected == Counter(form=1, answer_in_question=1, test_question=1, duplicate=1)


def test_a_copy_of_a_shown_example_is_a_duplicate() -> None:
    texts = [f"{HUMAN[0]['question']}\nAnswer: 3", "Who painted the Mona Lisa?\nAnswer: Leonardo"]
    assert filter_pairs(texts, HUMAN, []).rejected == Counter(duplicate=1)


def test_nothing_usable_says_how_many_and_why() -> None:
    texts = ["nonsense", "Is it red or blue?\nAnswer: red", "more nonsense"]
    with pytest.raises(InferlabError, match=r"3 of 3 were rejected \(2 for form, 1 for answer_in"):
        filter_pairs(texts, [], [])


def test_quality_by_hand() -> None:
    pairs = [{"question": "Who is it now?", "answer": "Bob"}] * 2
    found = quality(pairs, [{"question": "Who is it now?", "answer": "Ann"}])
    assert found["duplicate_share"] == 0.5
    assert found["distinct_1"] == 4 / 8
    assert found["distinct_2"] == 3 / 6
    assert found["self_bleu"] == pytest.approx(100)
    assert found["effective_kinds"] == pytest.approx(1)
    assert found["coverage"] == pytest.approx(1)
    assert found["answer_in_question_share"] == 0


def test_varied_pairs_score_better_than_repeated_ones() -> None:
    varied = quality(
        [
            {"question": "Which bird can not fly at all?", "answer": "Penguin"},
            {"question": "Where was the first railway opened?", "answer": "England"},
        ],
        HUMAN,
    )
    same = quality(HUMAN[:2], HUMAN)
    assert varied["distinct_2"] > same["distinct_2"]
    assert varied["self_bleu"] < same["self_bleu"]
    assert varied["coverage"] < same["coverage"]


def test_answers_are_compared_as_in_squad() -> None:
    assert exact_match("The Thames!", "thames") == 1
    assert exact_match("five", "5") == 1
    assert exact_match("Thames river", "Thames") == 0
    assert token_f1("the river Thames", "Thames") == pytest.approx(2 / 3)
    assert token_f1("Rhine", "Thames") == 0


def generator(**changes: object) -> GeneratorParams:
    plain = dict(topics=("sea",), starts=("Who",), temperature=0.7, top_p=0.9, max_new_tokens=8)
    plain |= dict(max_model_len=128, max_num_seqs=4, kv_cache_gib=0.1, examples=3)
    plain |= dict(guided=False)
    return GeneratorParams(**(plain | changes))


def test_guided_text_has_the_form_that_is_parsed() -> None:
    rest = " wrote the play Hamlet?\nAnswer: William Shakespeare\n"
    assert re.fullmatch(generation.FORM, rest)
    assert parse_pair(f"Who{rest}") is not None
    assert not re.fullmatch(generation.FORM, " wrote it\nAnswer: Shakespeare\n")


def test_prompts_show_human_examples_and_end_with_the_start() -> None:
    request = Request(Path("x"), 4, 1, HUMAN, [], generator(topics=("sea", "sky")), seed=0)
    prompts, starts = generation_prompts(request)
    assert starts == ["Who"] * 4
    assert prompts[1].endswith("\n\nTopic: sky\nQuestion: Who")
    assert all(prompt.count("Answer:") == 3 for prompt in prompts)
    assert prompts == generation_prompts(request)[0]


def test_a_question_is_asked_without_its_answer_among_the_examples() -> None:
    request = Request(Path("x"), 4, 1, HUMAN[:4], [], generator(), seed=0)
    for row, prompt in zip(
        HUMAN, asking_prompts(request, [r["question"] for r in HUMAN[:4]]), strict=False
    ):
        assert prompt.count(row["question"]) == 1
        assert prompt.endswith(f"{row['question']}\nAnswer:")
        assert prompt.count("Answer:") == 4


@pytest.fixture(scope="module")
def learner(tiny_llama: Path) -> Learner:
    return Learner(load_model(tiny_llama, 1), load_tokenizer(tiny_llama), trained=1)


def test_nats_equal_those_of_the_whole_model(learner: Learner, tiny_llama: Path) -> None:
    learner.reset()
    model, tokenizer = load_model(tiny_llama, 1), load_tokenizer(tiny_llama)
    rows = HUMAN[:3]
    found = learner.nats(learner.encode(rows))
    for row, nats in zip(rows, found, strict=True):
        prompt = tokenizer.encode(question_prompt(row["question"]), add_special_tokens=False)
        answer = tokenizer.encode(f" {row['answer']}", add_special_tokens=False)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0].float().log_softmax(-1)
        chosen = logits[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None])
        assert float(nats) == pytest.approx(-float(chosen.sum()), rel=0.02)


def test_what_is_trained_is_known_and_reset_forgets(learner: Learner) -> None:
    learner.reset()
    rows = [{"question": row["question"], "answer": "old mill"} for row in HUMAN]
    texts = learner.encode(rows)
    before = learner.nats(texts)
    learner.train(texts, SETTINGS, seed=0)
    assert learner.nats(texts).mean() < 0.1 * before.mean()
    assert learner.answer([HUMAN[0]["question"]], new_tokens=8) == ["old mill"]
    learner.reset()
    assert torch.equal(learner.nats(texts), before)


def test_trained_blocks_must_leave_one_below(tiny_llama: Path) -> None:
    with pytest.raises(InferlabError, match="trained_blocks must be from 1 to 1 for this model"):
        Learner(load_model(tiny_llama, 1), load_tokenizer(tiny_llama), trained=2)


def test_other_architectures_are_refused(tiny_gpt2: Path) -> None:
    with pytest.raises(InferlabError, match="models of the Llama family"):
        Learner(load_model(tiny_gpt2, 1), load_tokenizer(tiny_gpt2), trained=1)


def test_arms_are_of_equal_size_and_too_few_questions_are_named(workspace: Path) -> None:
    params = load("data_distillation", DataDistillationParams)
    other = [{"question": f"Which is {n}?", "answer": "a"} for n in range(7)]
    sets = training_sets(HUMAN, other, params)
    assert {len(sets[name]) for name in ("human", "synthetic", "mixture")} == {7}
    assert all(len(rows) <= 7 for rows in sets.values())
    with pytest.raises(InferlabError, match=r"pairs is \d+, but there are 10 questions"):
        split_questions(HUMAN, params, 0)


@pytest.mark.smoke
def test_stage_data_distillation(
    workspace: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["run"]["threads"] = 1
    content["data_distillation"] |= {"pairs": 4, "seeds": 2, "trained_blocks": 1, "curve": [0.5]}
    Path("params.yaml").write_text(yaml.safe_dump(content))
    Path("models").mkdir()
    Path("models/base").symlink_to(tiny_llama)
    Path("data/questions").mkdir(parents=True)
    write_rows(Path("data/questions/questions.jsonl"), HUMAN)
    kept = [{"question": f"Who lives in house {n} there?", "answer": f"Mr {n}"} for n in range(5)]

    def invented(request: Request) -> Generated:
        assert len(request.shown) == 4
        assert not {row["question"] for row in request.shown} & {
            row["question"] for row in request.test
        }
        return Generated(Filtered(kept, Counter(form=3)), ["Mr 0", "x"], ["3", "x"])

    monkeypatch.setattr(data_distillation, "generate", invented)
    data_distillation.main()
    found = read_json(Path("metrics/data_distillation.json"))
    assert found["rejected_form"] == 3
    assert found["test_questions"] == 6
    assert all(math.isfinite(value) for value in found.values())
    assert read_rows(Path("data/synthetic_questions/questions.jsonl")) == kept
    arms = Path("plots/data_distillation/arms.csv").read_text()
    assert arms.count("\n") == 6
    quality_rows = Path("plots/data_distillation/quality.csv").read_text()
    assert "answered_alike_share" in quality_rows

    monkeypatch.setattr(data_distillation, "generate", generation.generate)
    content["data_distillation"]["generated"] = 0
    Path("params.yaml").write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=r"data_distillation.generated"):
        data_distillation.main()
    assert read_json(Path("metrics/data_distillation.json")) == found
