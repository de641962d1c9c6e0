"""Articles, labelled text and questions from the formats they come in, and their cleaning."""

import bz2
from pathlib import Path

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferlab.data.cleaning import clean, clean_articles
from inferlab.data.corpus import PIECE, write_corpus
from inferlab.data.labelled import write_labelled_text
from inferlab.data.questions import write_questions
from inferlab.data.splits import split_articles
from inferlab.errors import InferlabError
from inferlab.store import read_rows

DUMP = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">
<page><title>Ant</title><ns>0</ns><revision><text>An '''ant'''.</text></revision></page>
<page><title>A</title><ns>0</ns><redirect title="Ant"/><revision><text>R</text></revision></page>
<page><title>Talk:Ant</title><ns>1</ns><revision><text>Chat.</text></revision></page>
</mediawiki>"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def articles_of(source: Path, target: Path) -> list[tuple[str, str]]:
    write_corpus(source, target)
    return [(row["title"], row["text"]) for row in read_rows(target / "articles.jsonl")]


def test_dump_gives_articles_without_redirects_and_talk(tmp_path: Path, target: Path) -> None:
    file = tmp_path / "pages.xml-p1.bz2"
    file.write_bytes(bz2.compress(DUMP.encode()))
    assert articles_of(file, target) == [("Ant", "An '''ant'''.")]


def test_folder_of_text_files_gives_one_article_each(tmp_path: Path, target: Path) -> None:
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("first")
    (tmp_path / "texts" / "deep" / "b.txt").write_text("second")
    assert articles_of(tmp_path / "texts", target) == [("a", "first"), ("deep/b", "second")]


def test_one_text_file_is_cut_at_ends_of_lines(tmp_path: Path, target: Path) -> None:
    lines = [f"line {number} of a long text\n" for number in range(2000)]
    (tmp_path / "book.txt").write_text("".join(lines))
    pieces = articles_of(tmp_path / "book.txt", target)
    assert "".join(text for _, text in pieces) == "".join(lines)
    assert len({title for title, _ in pieces}) == len(pieces) == 3
    assert all(text.endswith("\n") for _, text in pieces)
    assert all(len(text) < PIECE + 40 for _, text in pieces)


def test_wikitext_rows_are_joined_into_articles(tmp_path: Path, target: Path) -> None:
    rows = ["", " = Ant = \n", " = = Nest = = \n", " It digs . \n", " = Bee = \n", " It flies . \n"]
    pandas.DataFrame({"text": rows}).to_parquet(tmp_path / "train.parquet")
    assert articles_of(tmp_path, target) == [
        ("Ant", " = Ant = \n = = Nest = = \n It digs . \n"),
        ("Bee", " = Bee = \n It flies . \n"),
    ]


def test_empty_corpus_and_wrong_formats_are_refused(tmp_path: Path, target: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InferlabError, match=r"empty.txt holds no text; give .txt files"):
        write_corpus(tmp_path / "empty.txt", target)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InferlabError, match=r"latin.txt is not UTF-8 text"):
        write_corpus(tmp_path / "latin.txt", target)
    (tmp_path / "book.pdf").write_bytes(b"%PDF")
    with pytest.raises(InferlabError, match=r"unknown format of book.pdf: '.pdf'; known: .csv"):
        write_corpus(tmp_path / "book.pdf", target)


MARKUP = """{{Infobox|x=1}}
[[File:ant.jpg|thumb|An ant at work]]
An '''[[Ant|ant]]''' ({{pron|ant}}) weighs {{convert|5|mg|oz}}.<ref name="a/b">See it.</ref>
It is {{lang|fr|petite}}<ref name="http://x/y" /> .<!-- hidden -->
{| class="wikitable"
| cell
|}

== Nest ==
It digs.

== References ==
* A book.

== Life ==
It works.
[[Category:Ants]]
[[fr:Fourmi]]"""


def test_mark_up_becomes_prose() -> None:
    text = clean({"title": "Ant", "text": MARKUP, "format": "wiki"})
    assert text.split("\n") == [
        "An ant weighs 5 mg.",
        "It is petite.",
        "",
        "Nest",
        "It digs.",
        "",
        "Life",
        "It works.",
    ]


def test_stubs_are_dropped_and_plain_text_is_left_alone() -> None:
    long = {"title": "a", "text": " [[kept]] " * 3, "format": "plain"}
    short = {"title": "b", "text": "stub", "format": "plain"}
    assert [row["text"] for row in clean_articles([long, short], 5)] == [long["text"].strip()]


@given(
    lengths=st.lists(st.integers(1, 300), min_size=3, max_size=30),
    calibration=st.floats(0.05, 0.45),
    heldout=st.floats(0.05, 0.45),
    seed=st.integers(0, 5),
)
def test_every_article_is_on_exactly_one_side(
    lengths: list[int], calibration: float, heldout: float, seed: int
) -> None:
    articles = [
        {"title": f"{place}", "text": "x" * length, "format": "plain"}
        for place, length in enumerate(lengths)
    ]
    splits = split_articles(articles, calibration, heldout, seed)
    titles = [article["title"] for split in splits.values() for article in split]
    assert sorted(titles) == sorted(article["title"] for article in articles)
    assert all(splits.values())
    assert splits == split_articles(articles, calibration, heldout, seed)


def test_shares_are_of_characters_and_the_seed_matters() -> None:
    articles = [{"title": f"{n}", "text": "x" * 100, "format": "plain"} for n in range(100)]
    splits = split_articles(articles, 0.3, 0.15, seed=0)
    assert {name: len(split) for name, split in splits.items()} == {
        "calibration": 30,
        "heldout": 15,
        "training": 55,
    }
    assert splits["heldout"] != split_articles(articles, 0.3, 0.15, seed=1)["heldout"]


def test_same_title_twice_is_one_article() -> None:
    article = {"title": "a", "text": "x", "format": "plain"}
    with pytest.raises(InferlabError, match=r"has 1 articles that are long enough; at least 3"):
        split_articles([article] * 5, 0.3, 0.3, seed=0)


def test_labelled_text_from_tab_and_from_tables(tmp_path: Path, target: Path) -> None:
    header = "Category\tText\nd\tstring\nclass\t\n"
    (tmp_path / "news-train.tab").write_text(f'{header}sci\ta "quoted word\nrec\ttwo\nrec\t\n')
    (tmp_path / "news-test.tab").write_text(f"{header}rec\tNA\n")
    assert write_labelled_text(tmp_path, target) == "2 train and 1 test texts, 2 labels"
    assert read_rows(target / "train.jsonl") == [
        {"label": "sci", "text": 'a "quoted word'},
        {"label": "rec", "text": "two"},
    ]
    assert read_rows(target / "test.jsonl") == [{"label": "rec", "text": "NA"}]


def test_labelled_text_that_cannot_be_used(tmp_path: Path, target: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"label": "a", "text": "x"}\n')
    with pytest.raises(InferlabError, match=r"holds no table with 'test' in its name"):
        write_labelled_text(tmp_path, target)
    (tmp_path / "test.jsonl").write_text('{"label": "b", "text": "y"}\n')
    with pytest.raises(InferlabError, match="the test has labels unseen in train: b"):
        write_labelled_text(tmp_path, target)
    (tmp_path / "test.jsonl").write_text('{"topic": "a", "text": "y"}\n')
    with pytest.raises(InferlabError, match=r"none of the columns label_text, .*it has topic, te"):
        write_labelled_text(tmp_path, target)
    (tmp_path / "test.jsonl").write_text('{"label": "a", "text": "y"}\nbroken\n')
    with pytest.raises(InferlabError, match=r"test.jsonl:2 is not JSON"):
        write_labelled_text(tmp_path, target)


def test_questions_from_conversations_with_a_lost_dash(tmp_path: Path, target: Path) -> None:
    file = tmp_path / "trivia.yml"
    file.write_text(
        "conversations:\n- - What spins?\n  - A gyroscope.\n- - Which chain?\n  - Kroger Co.\n"
        "- Which number is it?\n  - '22'\n"
    )
    assert write_questions(file, target) == "3 questions"
    assert read_rows(target / "questions.jsonl") == [
        {"question": "What spins?", "answer": "A gyroscope"},
        {"question": "Which chain?", "answer": "Kroger Co."},
        {"question": "Which number is it?", "answer": "22"},
    ]


def test_questions_from_tables_and_none_at_all(tmp_path: Path, target: Path) -> None:
    pandas.DataFrame({"question": ["Why?"], "correct_answer": ["So"]}).to_csv(tmp_path / "q.csv")
    write_questions(tmp_path, target)
    assert read_rows(target / "questions.jsonl") == [{"question": "Why?", "answer": "So"}]
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InferlabError, match=r"empty.jsonl holds no questions with answers"):
        write_questions(tmp_path / "empty.jsonl", target)
    (tmp_path / "other.yml").write_text("a: 1\n")
    with pytest.raises(InferlabError, match="is no YAML with a list `conversations`"):
        write_questions(tmp_path / "other.yml", target)
