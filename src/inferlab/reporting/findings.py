"""The findings of docs/studies.md, section by section, as HTML."""

import re
from dataclasses import dataclass

from markdown_it import MarkdownIt
from markupsafe import Markup

HEADING = re.compile(r"^## (?P<title>.+?)(?: \((?P<stages>[^()]+)\))?$", re.MULTILINE)
DEEPER = 1
"""By how many levels the headings inside a section go down, to stay below the study's own."""


@dataclass(frozen=True)
class Finding:
    """A section: its title, the stages that its heading names, its text as HTML."""

    title: str
    stages: tuple[str, ...]
    html: Markup


def findings(text: str) -> list[Finding]:
    """The sections of second level whose heading ends in `(stage, stage: what of it)`."""
    places = list(HEADING.finditer(text))
    ends = [place.start() for place in places[1:]] + [len(text)]
    return [
        Finding(place["title"], _names(place["stages"]), to_html(text[place.end() : end]))
        for place, end in zip(places, ends, strict=True)
        if place["stages"]
    ]


def to_html(text: str) -> Markup:
    """Markdown (CommonMark and tables) as HTML; raw HTML inside is shown, not obeyed."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1:]) + DEEPER)}"
        elif token.type == "th_open":
            token.attrSet("scope", "col")
    html = parser.renderer.render(tokens, parser.options, {})
    opened = '<div class="scroll" role="region" aria-label="Table" tabindex="0"><table>'
    return Markup(html.replace("<table>", opened).replace("</table>", "</table></div>"))


def _names(stages: str) -> tuple[str, ...]:
    return tuple(part.split(":")[0].strip() for part in stages.split(","))
