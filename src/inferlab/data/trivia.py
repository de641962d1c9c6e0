"""Four-way questions: distractors are answers to other questions of the same kind."""

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from inferlab.data.tables import Row
from inferlab.errors import InferlabError

CHOICES = 4
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
DIGITS = {word: str(value) for value, word in enumerate(NUMBERS)}
TENS = "eleven|twelve|(twen|thir|for|four|fif|six|seven|eigh|nine)(ty|teen)"
ANSWER_KINDS: dict[str, re.Pattern[str]] = {
    "year": re.compile(r"^(in )?\d{4}$"),
    "number": re.compile(rf"^(\d[\d,.]*|({'|'.join(NUMBERS)}|{TENS})\b)", re.IGNORECASE),
}
ASKED = r"\b(what|which)\b( \S+){{0,6}}? ({0})\b"
QUESTION_KINDS: dict[str, re.Pattern[str]] = {
    "colour": re.compile(r"\bcolou?rs?\b"),
    "person": re.compile(
        r"^who\b|\bgirl\b|"
        + ASKED.format(
            "author|artist|actor|actress|singer|rapper|pop star|president|astronomer|leader|"
            "designer|celebrity|character|poet|(first|real) name"
        )
    ),
    "country": re.compile(ASKED.format("country|countries|nation")),
    "city": re.compile(ASKED.format("city|town")),
    "state": re.compile(ASKED.format("states?")),
    "title": re.compile(ASKED.format("film|movie|book|plays?|song|show|series")),
    "animal": re.compile(ASKED.format("animals?|mammal|bird|insect|lizard|species|creature|breed")),
    "food": re.compile(ASKED.format("food|fruits?|dish|candy|beans|nuts|ingredient|juices?")),
    "place": re.compile(r"^where\b|" + ASKED.format("continent|ocean|sea|island|planets?|museum")),
}
"""Kinds by the answer's form come first, then by what the question asks for; the first fits."""


def kind_of(question: str, answer: str) -> str:
    """The kind of a question: a name of ANSWER_KINDS or QUESTION_KINDS, else by capitals."""
    for kind, pattern in ANSWER_KINDS.items():
        if pattern.search(answer):
            return kind
    for kind, pattern in QUESTION_KINDS.items():
        if pattern.search(question.lower()):
            return kind
    return "name" if answer.split()[-1][0].isupper() else "thing"


def four_way(questions: Sequence[Row], seed: int) -> list[Row]:
    """Add `choices` and `label` (the place of the answer) to each question, kept in order.

    Three distractors come from answers of the same kind, from any kind when there are too few.
    None equals the answer or another one but for case, articles, punctuation and the spelling of
    numbers, or contains it or stands in the question. Raises InferlabError when three cannot be
    found.
    """
    random = np.random.default_rng(seed)
    by_kind: dict[str, list[str]] = defaultdict(list)
    for row in questions:
        by_kind[kind_of(row["question"], row["answer"])].append(row["answer"])
    everything = [row["answer"] for row in questions]
    return [_with_choices(row, by_kind, everything, random) for row in questions]


def _with_choices(
    row: Row, by_kind: dict[str, list[str]], everything: list[str], random: np.random.Generator
) -> Row:
    kind = kind_of(row["question"], row["answer"])
    choices = [row["answer"]]
    for pool in (by_kind[kind], everything):
        for candidate in random.permutation(np.array(pool, dtype=object)):
            if len(choices) < CHOICES and _differs(candidate, row["question"], choices):
                choices.append(candidate)
    if len(choices) < CHOICES:
        raise InferlabError(
            f"{len(everything)} questions give only {len(choices) - 1} distractors for "
            f"{row['question']!r}; {CHOICES - 1} are needed: give questions with more answers"
        )
    order = random.permutation(CHOICES)
    return {
        "question": row["question"],
        "kind": kind,
        "choices": [choices[place] for place in order],
        "label": int(np.argmin(order)),
    }


def _differs(candidate: str, question: str, choices: list[str]) -> bool:
    """Whether an answer may stand beside the choices: neither holds the other, word by word."""
    words = f" {normalised(candidate)} "
    others = [f" {normalised(choice)} " for choice in choices]
    return words not in f" {normalised(question)} " and not any(
        words in other or other in words for other in others
    )


def normalised(text: str) -> str:
    """Lower case, without punctuation and articles, numbers up to ten as digits."""
    plain = re.sub(r"[^\w\s]", "", text.casefold())
    words = [word for word in plain.split() if word not in ("a", "an", "the")]
    return " ".join(DIGITS.get(word, word) for word in words)
