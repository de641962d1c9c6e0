"""Question-answer pairs: parsed from generated text, filtered, and measured beside human ones."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from inferlab.data.tables import Row
from inferlab.data.trivia import kind_of, normalised
from inferlab.errors import InferlabError

PAIR = re.compile(r"^\s*(?P<question>[^\n]+\?)\s*\n\s*Answer: *(?P<answer>[^\n]+?)\.?\s*(\n|$)")
SHORTEST_QUESTION = 4
LONGEST_ANSWER = 6
SAME = 0.8
"""Share of words in common (Jaccard) from which two questions count as the same one."""


@dataclass(frozen=True)
class Filtered:
    """The pairs that are kept, and how many were rejected for which reason."""

    kept: list[Row]
    rejected: Counter[str] = field(default_factory=Counter)


def parse_pair(text: str) -> Row | None:
    """The pair at the head of a text, `question? newline Answer: answer`; None in other forms."""
    match = PAIR.match(text)
    if not match:
        return None
    question, answer = match["question"].strip(), match["answer"].strip()
    words = normalised(answer).split()
    fits = len(question.split()) >= SHORTEST_QUESTION and 0 < len(words) <= LONGEST_ANSWER
    return {"question": question, "answer": answer} if fits else None


def filter_pairs(texts: Sequence[str], shown: Sequence[Row], test: Sequence[Row]) -> Filtered:
    """Keep the well-formed and new ones, in order; each text is rejected for one reason at most.

    `shown` are the examples that the generator saw, whose copies are duplicates; questions of
    `test` are dropped and counted apart. Raises InferlabError when nothing is left.
    """
    known = [_words(row["question"]) for row in shown]
    held_out = [_words(row["question"]) for row in test]
    found = Filtered([])
    for text in texts:
        pair = parse_pair(text)
        if pair is None:
            found.rejected["form"] += 1
            continue
        words = _words(pair["question"])
        if _leaks(pair):
            found.rejected["answer_in_question"] += 1
        elif _is_near(words, held_out):
            found.rejected["test_question"] += 1
        elif _is_near(words, known):
            found.rejected["duplicate"] += 1
        else:
            known.append(words)
            found.kept.append(pair)
    if not found.kept:
        reasons = ", ".join(f"{count} for {reason}" for reason, count in found.rejected.items())
        raise InferlabError(
            f"the generator gave no usable pair: {len(texts)} of {len(texts)} were rejected "
            f"({reasons or 'there were none'}); raise data_distillation.generated or take a "
            "larger model"
        )
    return found


def quality(pairs: Sequence[Row], heldout: Sequence[Row]) -> dict[str, float]:
    """Measures of a set of pairs; shares are of 1, `coverage` is of the held-out questions."""
    questions = [row["question"] for row in pairs]
    words = [normalised(question).split() for question in questions]
    kinds = Counter(kind_of(row["question"], row["answer"]) for row in pairs)
    shares = np.array(list(kinds.values())) / len(pairs)
    distinct = len({" ".join(one) for one in words})
    return {
        "duplicate_share": 1 - distinct / len(pairs),
        "distinct_1": _distinct(words, 1),
        "distinct_2": _distinct(words, 2),
        "self_bleu": _self_bleu(questions),
        "question_words": float(np.mean([len(one) for one in words])),
        "answer_words": float(np.mean([len(row["answer"].split()) for row in pairs])),
        "answer_in_question_share": float(np.mean([_leaks(row) for row in pairs])),
        "effective_kinds": math.exp(-float((shares * np.log(shares)).sum())),
        "coverage": _coverage(questions, [row["question"] for row in heldout]),
    }


def _words(text: str) -> frozenset[str]:
    return frozenset(normalised(text).split())


def _is_near(words: frozenset[str], others: Sequence[frozenset[str]]) -> bool:
    return any(len(words & one) >= SAME * len(words | one) for one in others)


def _leaks(pair: Row) -> bool:
    """Whether the answer stands in the question, word by word."""
    return f" {normalised(pair['answer'])} " in f" {normalised(pair['question'])} "


def _distinct(words: Sequence[Sequence[str]], size: int) -> float:
    """Share of different n-grams among all (Li et al. 2016)."""
    grams = [tuple(one[i : i + size]) for one in words for i in range(len(one) - size + 1)]
    return len(set(grams)) / max(1, len(grams))


def _self_bleu(questions: Sequence[str]) -> float:
    """Mean BLEU of each question against all others, 0 to 100: high when they are alike."""
    from sacrebleu import BLEU

    scorer = BLEU(effective_order=True)
    others = list(questions)
    scores = [
        scorer.sentence_score(one, others[:place] + others[place + 1 :]).score
        for place, one in enumerate(questions)
        if len(questions) > 1
    ]
    return float(np.mean(scores)) if scores else 0.0


def _coverage(questions: Sequence[str], heldout: Sequence[str]) -> float:
    """Mean TF-IDF cosine of each held-out question to its nearest one of the set."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(sublinear_tf=True).fit([*questions, *heldout])
    similar = vectorizer.transform(heldout) @ vectorizer.transform(questions).T
    return float(similar.max(axis=1).toarray().mean())
