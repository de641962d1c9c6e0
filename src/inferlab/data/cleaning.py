"""Wiki mark-up to plain text, with what is no prose taken out."""

import re

import mwparserfromhell
from mwparserfromhell.nodes import Tag, Wikilink

from inferlab.data.corpus import Article

NO_PROSE_TAGS = ("table", "gallery", "timeline", "imagemap")
APPENDICES = re.compile(
    r"^==\s*(see also|references|external links|further reading|notes|footnotes|sources|"
    r"bibliography|citations|notes and references)\s*==\s*$.*?(?=^==[^=]|\Z)",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)
REFERENCES = re.compile(r"<!--.*?-->|<ref\b[^>]*/>|<ref\b[^>]*>.*?</ref>", re.I | re.DOTALL)
TEMPLATES_WITH_PROSE = (
    (re.compile(r"\{\{convert\|([^|{}]+)\|([^|{}]+)[^{}]*\}\}", re.I), r"\1 \2"),
    (re.compile(r"\{\{lang\|[^|{}]+\|([^|{}]+)[^{}]*\}\}", re.I), r"\1"),
)
NOT_PART_OF_TEXT = re.compile(r"^\s*(file|image|category|media|[a-z]{2,3}(-[a-z]+)*):", re.I)
SPACE_BEFORE_STOP = re.compile(r" +(?=[.,;:](\s|$))")
EMPTY_BRACKETS = re.compile(r"\s*\([\s,;:–-]*\)")
AROUND_BREAKS = re.compile(r"[ \t]*\n[ \t]*")
SEVERAL_SPACES = re.compile(r"[ \t\u00a0]+")
SEVERAL_BREAKS = re.compile(r"\n\s*\n+")
NO_LETTERS = re.compile(r"^[\W\d_]*$\n?", re.MULTILINE)


def clean_articles(articles: list[Article], shortest: int) -> list[Article]:
    """Plain text of every article; those with fewer than `shortest` characters are dropped."""
    plain: list[Article] = [
        {"title": article["title"], "text": clean(article), "format": "plain"}
        for article in articles
    ]
    return [article for article in plain if len(article["text"]) >= shortest]


def clean(article: Article) -> str:
    """The article's prose: headings and paragraphs, without tables, references and appendices."""
    if article["format"] == "plain":
        return article["text"].strip()
    markup = REFERENCES.sub("", APPENDICES.sub("", article["text"]))
    for template, prose in TEMPLATES_WITH_PROSE:
        markup = template.sub(prose, markup)
    code = mwparserfromhell.parse(markup)
    code.nodes = [node for node in code.nodes if _is_prose(node)]
    text = code.strip_code(normalize=True, collapse=True)
    text = SEVERAL_SPACES.sub(" ", EMPTY_BRACKETS.sub("", text))
    text = AROUND_BREAKS.sub("\n", SPACE_BEFORE_STOP.sub("", text))
    return SEVERAL_BREAKS.sub("\n\n", NO_LETTERS.sub("\n", text)).strip()


def _is_prose(node: object) -> bool:
    """Whether a node's text belongs to the prose."""
    if isinstance(node, Tag):
        return str(node.tag).lower() not in NO_PROSE_TAGS
    return not (isinstance(node, Wikilink) and NOT_PART_OF_TEXT.match(str(node.title)))
