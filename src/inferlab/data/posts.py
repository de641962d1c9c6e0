"""Newsgroup posts without what gives their group away: headers, quoted lines and footers.

The rules are those of scikit-learn's `fetch_20newsgroups(remove=("headers", "footers", "quotes"))`.
Text that was flattened to one line, as the embedded default is, has lost the line breaks that they
need; of its quotes only the attribution ("in article … writes", with names and hosts) can be told.
"""

import re

HEADER = re.compile(r"^[A-Za-z][\w-]*: .*(\n(.+\n)*?)\n")
QUOTED = re.compile(r"^(>|\|)|(writes in|writes:|wrote:|says:|said:|^In article|^Quoted from)")
RULE = re.compile(r"^[-\s]*$")
FLAT_ATTRIBUTION = re.compile(r"\bin article\b(?: \w+){1,16}? (?:writes|wrote|says)\b")


def strip_post(text: str) -> str:
    """The body of a post, stripped; empty when nothing else is left."""
    if "\n" not in text:
        return FLAT_ATTRIBUTION.sub(" ", text).strip()
    return _without_footer(_without_quotes(HEADER.sub("", text, count=1))).strip()


def _without_quotes(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if not QUOTED.search(line))


def _without_footer(text: str) -> str:
    """Drop what follows the last blank line or row of dashes, when anything stands before it."""
    lines = text.strip().split("\n")
    rules = [number for number, line in enumerate(lines) if RULE.match(line)]
    return "\n".join(lines[: rules[-1]] if rules and rules[-1] > 0 else lines)
