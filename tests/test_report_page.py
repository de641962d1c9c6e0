"""The page itself: whole without a network, in order for a screen reader, the same in a browser."""

import itertools
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import report_project
import yaml
from browser import Browser, find_chromium

from inferlab.reporting.chart import charts
from inferlab.reporting.decision import Case, decide
from inferlab.reporting.findings import findings, to_html
from inferlab.reporting.page import number
from inferlab.reporting.requirements import Candidate, Requirements, Traffic
from inferlab.reporting.studies import CAPTIONS, GROUPS, STUDIES, caption
from stages import report

ROOT = Path(__file__).parent.parent
STYLE = (ROOT / "src/inferlab/reporting/templates/report.css").read_text()
VOID = {"meta", "link", "img", "br", "hr", "rect", "path", "circle", "line", "polyline"}


class Page(HTMLParser):
    """Tags with their attributes, the levels of headings, and whether tags close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        self.levels = [int(tag[1]) for tag, _ in self.tags if re.fullmatch("h[1-6]", tag)]
        self.ids = [found["id"] for _, found in self.tags if "id" in found]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open[-1] in ("li", "p", "dt", "dd") and self.open[-1] != tag:
            self.open.pop()
        assert self.open.pop() == tag, tag


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of the hand-made run, with a question that must not become a tag."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("project"))
        content = yaml.safe_load((ROOT / "params.yaml").read_text())
        content["report"]["question"] = "Which <b>variant</b> & why?"
        Path("params.yaml").write_text(yaml.safe_dump(content))
        report_project.write_run()
        report.main()
        yield Path("reports/index.html").read_text()


pytestmark = pytest.mark.smoke


def test_everything_is_inside(html: str) -> None:
    page = Page(html)
    assert page.open == []
    for tag, found in page.tags:
        for key in ("src", "href", "srcset", "poster", "action", "data"):
            assert found.get(key, "#").startswith(("#", "data:")), (tag, found[key])
        assert not any(key.startswith("on") for key in found), found
    assert "@import" not in html and "url(" not in html
    policy = next(found for _, found in page.tags if "http-equiv" in found)
    assert policy["content"].startswith("default-src 'none'; img-src data:;")


def test_text_of_others_does_not_become_markup(html: str) -> None:
    assert "Which &lt;b&gt;variant&lt;/b&gt; &amp; why?" in html
    assert "&lt;script&gt;" in html and '<script>alert("raw")' not in html
    assert [tag for tag, _ in Page(html).tags].count("script") == 1


def test_headings_go_down_one_level_at_a_time(html: str) -> None:
    levels = Page(html).levels
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert 4 in levels  # the sections inside a finding


def test_links_lead_somewhere_and_names_are_unique(html: str) -> None:
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    targets = {found["href"] for tag, found in page.tags if tag == "a"}
    assert {target.removeprefix("#") for target in targets} <= set(page.ids)
    first = next(found for tag, found in page.tags if tag == "a")
    assert (first["class"], first["href"]) == ("skip", "#answer")
    labelled = [found for _, found in page.tags if "aria-labelledby" in found]
    assert labelled and all(found["aria-labelledby"] in page.ids for found in labelled)


def test_pictures_and_charts_have_words(html: str) -> None:
    page = Page(html)
    pictures = [found for tag, found in page.tags if tag == "img"]
    assert len(pictures) == 1
    assert pictures[0]["alt"].startswith("Histograms of rounding errors in INT8 and INT4")
    assert (pictures[0]["width"], pictures[0]["height"]) == ("4", "3")
    points = [found for _, found in page.tags if found.get("class", "").startswith("point")]
    spoken = [found["aria-label"] for found in points if found.get("role") == "img"]
    assert len(spoken) == 2 * (9 + 2 + 2)
    assert any(
        text.startswith("int8 on vLLM, 8 requests at once; first token 950 ms;") for text in spoken
    )
    assert page.tags[0] == ("html", {"lang": "en"})
    scopes = [found.get("scope") for tag, found in page.tags if tag == "th"]
    assert set(scopes) == {"col", "row"}


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.2)."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def schemes() -> list[dict[str, str]]:
    """The variables of the light and the dark scheme."""
    blocks = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in blocks]


def test_contrast_by_hand() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", schemes(), ids=["light", "dark"])
def test_text_and_marks_stand_out(scheme: dict[str, str]) -> None:
    for ground in ("paper", "card", "tint", "warn-tint"):
        for ink in ("ink", "soft"):
            assert contrast(scheme[ink], scheme[ground]) >= 4.5, (ink, ground)
    for ground in ("paper", "card", "tint"):
        for ink in ("accent", "warn"):
            assert contrast(scheme[ink], scheme[ground]) >= 4.5, (ink, ground)
    series = [colour for name, colour in scheme.items() if name.startswith("series-")]
    assert len(series) == 10
    assert all(contrast(colour, scheme["paper"]) >= 3 for colour in series)


def test_findings_are_cut_by_stage() -> None:
    found = findings(report_project.NOTES)
    assert [one.stages for one in found] == [("quantize", "evaluate"), ("quantization_basics",)]
    assert found[0].title == "The variants"
    assert "<strong>weight</strong>" in found[0].html and "<h4>Deeper</h4>" in found[0].html
    assert "Steps" not in found[0].html
    table = to_html("| a |\n| --- |\n| 1 |")
    assert table.startswith('<div class="scroll"') and '<th scope="col">a</th>' in table


def test_every_heading_of_the_notes_names_stages_of_the_list() -> None:
    known = set(STUDIES) | {"quantize", "prune"}
    for one in findings((ROOT / "docs/studies.md").read_text()):
        assert known & set(one.stages), one.title


def test_studies_are_named_once_and_captions_belong_to_them() -> None:
    assert sum(len(group) for group in GROUPS.values()) == len(STUDIES)
    assert {name.split("/")[0] for name in CAPTIONS} <= set(STUDIES)
    assert caption("distill", "new_picture").startswith("New picture, of the study “33.6")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234567, "1,234,567"), (12.0, "12"), (0.00912345, "0.009123"), (4321.6, "4,322")],
)
def test_figures_are_readable(value: float, text: str) -> None:
    assert number(value) == text


def test_chart_places_points_by_hand() -> None:
    """On logarithmic axes the point in the middle by ratio lies in the middle by pixels."""
    loads = ((1, 100.0, 1.0), (2, 1000.0, 10.0), (4, 10000.0, 100.0))
    candidates = [
        Candidate("base", "vLLM", count, time, 10.0, rate, rate, rate, 1.0, 0.0)
        for count, time, rate in loads
    ]
    case = Case(candidates, Traffic(1000, 1.0, 1.0), 0.1)
    wanted = Requirements(1000.0, 100.0, 1.0, None)
    first, second = charts(case, wanted, decide(case, wanted))
    low, middle, high = first.series[0].points
    assert middle.x == pytest.approx((low.x + high.x) / 2, abs=0.2)
    assert middle.y == pytest.approx((low.y + high.y) / 2, abs=0.2)
    assert first.limit == middle.y and low.y > high.y and low.x > high.x
    assert [point.chosen for point in first.series[0].points] == [False, True, False]
    assert [tick.text for tick in first.y_ticks][:1] == ["100"]
    assert second.series[0].points[0].y == second.series[0].points[2].y


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(html: str, width: int, scheme: str) -> None:
    """No console message, no request but the page itself, all pictures, nothing beside the page."""
    program = find_chromium()
    if program is None:
        pytest.skip("needs Chromium (apt-get install chromium); found none on the path")
    with Browser(program) as browser:
        browser.open(Path("reports/index.html"), width, 800, scheme)
        broken = "[...document.images].filter(one => !one.complete || !one.naturalWidth).length"
        assert browser.evaluate("document.images.length") == 1
        assert browser.evaluate(broken) == 0
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground))) > 380) == (scheme == "light")
        chart_by_keyboard(browser)
        browser.press("Tab")
        urls = [
            event["params"]["request"]["url"]
            for event in browser.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        assert all(url.startswith(("file:", "data:")) for url in urls), urls
        assert sum(url.startswith("file:") for url in urls) == 1
        said = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        assert [event for event in browser.events if event.get("method") in said] == []


def chart_by_keyboard(browser: Browser) -> None:
    """The skip link comes first; a point is read out, and the arrow keys move on along cost."""
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.className") == "skip"
    browser.press("Enter")
    assert browser.evaluate("document.activeElement.id") == "answer"
    shown = "[...document.querySelectorAll('[data-chart]')].filter(one => !one.hidden).length"
    assert browser.evaluate(shown) == 1
    browser.evaluate("document.querySelector('.point.chosen').focus()")
    read = "document.querySelector('[data-readout]').textContent"
    assert browser.evaluate(read).startswith("int8 on vLLM, 8 requests at once")
    browser.press("ArrowRight")
    assert not browser.evaluate(read).startswith("int8 on vLLM, 8 requests at once")
    browser.evaluate("document.querySelectorAll('.tabs button')[1].click()")
    assert browser.evaluate(shown) == 1
    browser.evaluate("document.querySelector('[data-legend] button').click()")
    assert browser.evaluate("document.querySelectorAll('.dimmed').length") > 0
