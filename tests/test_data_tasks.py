"""The local tasks: four-way questions, last words, and how lm-eval gets to see them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from inferlab.data.cloze import ClozeParams, cloze
from inferlab.data.corpus import Article
from inferlab.data.trivia import four_way, kind_of
from inferlab.errors import InferlabError
from inferlab.evaluation.tasks import load_tasks, write_task
from inferlab.store import load_tensors, open_checkpoint, read_json, read_rows, write_rows
from stages import prepare

QUESTIONS = [
    {"question": "What year did it start?", "answer": "1914"},
    {"question": "When did it end?", "answer": "1918"},
    {"question": "In what year was it sold?", "answer": "1867"},
    {"question": "When was it found?", "answer": "1492"},
    {"question": "How many boroughs has it?", "answer": "5"},
    {"question": "How many eyes has a bee?", "answer": "Five"},
    {"question": "How many dwarfs are happy?", "answer": "Five: all but two"},
    {"question": "How many ribs are there?", "answer": "Twenty-four"},
    {"question": "How many signs are there?", "answer": "12"},
    {"question": "How many hearts has it?", "answer": "Three"},
    {"question": "Who wrote it?", "answer": "Ann Smith"},
    {"question": "Which singer sang it?", "answer": "The Singer"},
    {"question": "Who sang it first?", "answer": "singer"},
    {"question": "Who met Ann Smith in Paris?", "answer": "Bob"},
    {"question": "Who was the first President of the United States?", "answer": "Washington"},
]


@pytest.mark.parametrize(
    ("question", "answer", "kind"),
    [
        ("When did the Cold War end?", "1989", "year"),
        ("How many ribs are in a human body?", "Twenty-four", "number"),
        ("Who was the 37th President of the United States?", "Richard Nixon", "person"),
        ("Port-au-Prince is the capital of which country?", "Haiti", "country"),
        ("What is the name of Jordan's capital city?", "Amman", "city"),
        ("What color is Absinthe?", "Green", "colour"),
        ("What object of his did Jim put in a jelly on the show?", "Stapler", "name"),
        ("What is rubbed on the bow of a violin?", "resin", "thing"),
    ],
)
def test_kind_follows_the_answer_and_what_is_asked(question: str, answer: str, kind: str) -> None:
    assert kind_of(question, answer) == kind


def choices_of(question: str, seed: int) -> set[str]:
    return next(
        set(row["choices"]) for row in four_way(QUESTIONS, seed) if row["question"] == question
    )


def test_label_points_at_the_answer_among_four_that_differ() -> None:
    for seed in range(10):
        for row, given in zip(four_way(QUESTIONS, seed), QUESTIONS, strict=True):
            assert row["choices"][row["label"]] == given["answer"]
            assert len({choice.casefold() for choice in row["choices"]}) == 4


def test_distractors_are_of_the_same_kind() -> None:
    assert choices_of("When was it found?", 0) == {"1914", "1918", "1867", "1492"}
    assert choices_of("How many signs are there?", 0) <= {
        "5", "Five", "Five: all but two", "Twenty-four", "12", "Three"
    }  # fmt: skip


def test_no_distractor_would_also_be_right_or_is_given_away() -> None:
    for seed in range(20):
        assert not choices_of("How many boroughs has it?", seed) & {"Five", "Five: all but two"}
        singers = choices_of("Who was the first President of the United States?", seed)
        assert not {"The Singer", "singer"} <= singers
        assert "Ann Smith" not in choices_of("Who met Ann Smith in Paris?", seed)


def test_seed_decides_and_labels_are_spread() -> None:
    assert four_way(QUESTIONS, 3) == four_way(QUESTIONS, 3)
    assert four_way(QUESTIONS, 3) != four_way(QUESTIONS, 4)
    labels = [row["label"] for seed in range(40) for row in four_way(QUESTIONS, seed)]
    assert all(0.2 < labels.count(place) / len(labels) < 0.3 for place in range(4))


def test_too_few_questions() -> None:
    with pytest.raises(InferlabError, match=r"3 questions give only 2 distractors for 'What year"):
        four_way(QUESTIONS[:3], 0)


TEXT = """Heading

The old cat sat on the mat. Dr. Smith saw it on the 5 May 1990. It slept.
In the end it went back to its house! Then the dog, i.e. Rex, ran off (at last).
The same cat came home again to eat."""


def article(text: str) -> Article:
    return {"title": "Cat", "text": text, "format": "plain"}


def test_cloze_takes_sentences_that_end_in_a_plain_word() -> None:
    config = ClozeParams(sentences=2, shortest_words=5, longest_words=10, context_sentences=0)
    assert cloze([article(TEXT)], config, seed=0) == [
        {"context": "The old cat sat on the", "word": "mat", "title": "Cat"},
        {"context": "The same cat came home again to", "word": "eat", "title": "Cat"},
    ]


def test_cloze_context_is_of_the_same_paragraph() -> None:
    config = ClozeParams(sentences=2, shortest_words=3, longest_words=10, context_sentences=1)
    rows = cloze([article("He ate here. She ate there now.\nThey left. It was over.")], config, 0)
    assert [row["context"] for row in rows] == ["He ate here. She ate there", "They left. It was"]


def test_cloze_draws_by_seed_without_repetition() -> None:
    text = "\n".join(f"The number that came was {n} to the end." for n in range(50))
    config = ClozeParams(sentences=20, shortest_words=5, longest_words=12, context_sentences=0)
    rows = cloze([article(text)], config, seed=1)
    assert len({row["context"] for row in rows}) == 20
    assert rows == cloze([article(text)], config, seed=1)
    assert rows != cloze([article(text)], config, seed=2)


def test_cloze_with_too_little_text() -> None:
    config = ClozeParams(sentences=9, shortest_words=5, longest_words=10, context_sentences=0)
    with pytest.raises(InferlabError, match="too short: 2 cloze sentences found, 9 needed"):
        cloze([article(TEXT)], config, seed=0)


def test_tasks_find_their_data_wherever_the_folder_is(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    write_task(tmp_path / "made", "trivia", four_way(QUESTIONS, 0))
    assert str(tmp_path) not in (tmp_path / "made" / "trivia.yaml").read_text()
    shutil.move(tmp_path / "made", tmp_path / "moved")
    (task,) = load_tasks(tmp_path / "moved")
    data = Path(task["dataset_kwargs"]["data_files"]["test"])
    assert data.is_absolute()
    assert len(read_rows(data)) == len(QUESTIONS)
    data.unlink()
    with pytest.raises(InferlabError, match=r"task trivia: .*trivia.jsonl is missing; run prepare"):
        load_tasks(tmp_path / "moved")
    with pytest.raises(InferlabError, match="holds no task"):
        load_tasks(tmp_path)


def write_project(tiny_llama: Path, bos: str = "none") -> None:
    """A project folder with a model, a corpus, questions and parameters."""
    for folder in ("models", "data/corpus", "data/questions"):
        Path(folder).mkdir(parents=True)
    shutil.copytree(tiny_llama, "models/base")
    paragraph = " ".join(f"The {word} went down to the sea." for word in ("cat", "dog", "old man"))
    articles = [article(f"{paragraph}\nNumber {n} came back to the house.") for n in range(30)]
    rows = [{**one, "title": f"{place}"} for place, one in enumerate(articles)]
    write_rows(Path("data/corpus/articles.jsonl"), rows)
    write_rows(Path("data/questions/questions.jsonl"), QUESTIONS)
    section = {
        "window_length": 16,
        "calibration_windows": 4,
        "heldout_windows": 4,
        "training_tokens": 100,
        "calibration_share": 0.3,
        "heldout_share": 0.3,
        "shortest_article": 10,
        "bos": bos,
        "cloze": {"sentences": 4, "shortest_words": 4, "longest_words": 12, "context_sentences": 0},
    }
    sections = {"run": {"seed": 0, "threads": 1}, "prepare": section}
    Path("params.yaml").write_text(yaml.safe_dump(sections))


@pytest.mark.smoke
def test_stage_prepare_and_lm_eval_on_what_it_makes(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tiny_llama)
    prepare.main()
    heldout = load_tensors(Path("data/windows/heldout.safetensors"))
    assert heldout["input_ids"].shape == (4, 16)
    assert heldout["words"].shape == heldout["bytes"].shape == (4,)
    assert load_tensors(Path("data/windows/training.safetensors"))["input_ids"].shape == (100,)
    titles = read_json(Path("data/windows/manifest.json"))["titles"]
    assert len({title for split in titles.values() for title in split}) == 30
    metrics = json.loads(Path("metrics/prepare.json").read_text())
    assert metrics["trivia_questions"] == len(QUESTIONS)
    assert Path("plots/prepare/articles.csv").read_text().count("\n") == 31
    assert_lm_eval_runs(Path("models/base"), Path("data/tasks"))


def assert_lm_eval_runs(model: Path, tasks: Path) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    harness = HFLM(pretrained=str(model), device="cpu", batch_size=8)
    found = lm_eval.simple_evaluate(harness, tasks=load_tasks(tasks), bootstrap_iters=0)
    assert found is not None
    sizes = {name: result["sample_len"] for name, result in found["results"].items()}
    assert sizes == {"cloze": 4, "trivia": len(QUESTIONS)}
    assert 0 <= found["results"]["trivia"]["acc,none"] <= 1


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda: Path("data/corpus/articles.jsonl").write_text(""), "has 0 articles that are long"),
        (lambda: Path("models/base/config.json").unlink(), "is no checkpoint: it has no config"),
    ],
)
def test_stage_prepare_publishes_nothing_on_bad_input(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[], object],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tiny_llama)
    assert open_checkpoint(Path("models/base")).names
    spoil()
    with pytest.raises(SystemExit, match=message):
        prepare.main()
    assert not Path("data/windows").exists()
    assert not Path("metrics").exists()
