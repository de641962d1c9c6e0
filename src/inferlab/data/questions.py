"""Questions with one short answer each."""

import re
from pathlib import Path

import yaml

from inferlab.data.tables import Row, column, read_tables
from inferlab.errors import InferlabError
from inferlab.store import write_rows

FULL_STOP = re.compile(r"(?<=\w{4})\.$")


def write_questions(source: Path, folder: Path) -> str:
    """Write questions.jsonl with `question` and `answer`; returns how many.

    `source` is a table with these columns (or `correct_answer`), a folder of such tables, or a
    YAML file of conversations. Raises InferlabError when it holds no question.
    """
    if source.suffix in (".yml", ".yaml"):
        rows = [_from_conversation(turns, source) for turns in _conversations(source)]
    else:
        rows = [
            {
                "question": column(row, ("question",), source),
                "answer": column(row, ("answer", "correct_answer"), source),
            }
            for row in read_tables(source)
        ]
    kept = {row["question"]: row for row in rows if row["question"] and row["answer"]}
    if not kept:
        raise InferlabError(f"{source} holds no questions with answers")
    write_rows(folder / "questions.jsonl", kept.values())
    return f"{len(kept)} questions"


def _conversations(file: Path) -> list[object]:
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]
    except (yaml.YAMLError, KeyError, TypeError):
        raise InferlabError(f"{file} is no YAML with a list `conversations`") from None


def _from_conversation(turns: object, file: Path) -> Row:
    """A conversation is [question, answer]; a lost dash makes it one string `question - 'answer'`.

    The first of these is what the format asks for, the second a slip that YAML accepts.
    """
    if isinstance(turns, str) and " - " in turns:
        turns = turns.rsplit(" - ", 1)
    if not isinstance(turns, list) or len(turns) < 2:
        raise InferlabError(f"{file}: not a question and its answer: {turns!r}")
    question, answer = (str(turn).strip() for turn in turns[:2])
    return {"question": question, "answer": FULL_STOP.sub("", answer.strip("'\""))}
