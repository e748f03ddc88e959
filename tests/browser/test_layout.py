"""How pages are laid out in a real Chromium: on a phone, on paper, by the keyboard; and figures of many points."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browser.test_pages import Tab, pixels
from windtunnel.report.chart import Axis, Chart, Series
from windtunnel.report.render.html import page
from windtunnel.report.report import Card, Cards, Cell, Figures, Points, Report, Section, Table

if TYPE_CHECKING:
    from browser.conftest import Browse

pytestmark = [pytest.mark.compiled, pytest.mark.full]

WIDE = Table(["run", *(f"figure {number}" for number in range(11))], [["a run", *["1,234.56 ms"] * 11]] * 2)
TIMES = Table(["run", "time"], [["a", "54.9 ms"], ["b", "2.54 s"], ["c", "900 us"], ["d", "1,000 ms"]])
NOTED = Table(["run", "time"], [["a", Cell("1 s", 1.0, note="-12.0% better, 0.9–1.2 s")]])
LONG = "A heading of many words that takes more than one line on the narrow screen of a phone"
POINTS: dict[str, Any] = {
    "figures": ["requests/$", "TTFT p90"], "units": ["", "s"], "more": [True, False],
    "x": "TTFT p90", "y": "requests/$",
    "names": ["deployment", "tp"], "choices": [[f"h100_sxm {number}", str(number % 2)] for number in range(12)],
    "values": [[100.0 - number, 0.1 + 0.05 * number] for number in range(12)], "margins": [[None, None]] * 12,
    "limits": {"TTFT p90": 0.8}, "title": "Points that meet the limits", "best": 0,
}  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Writes the page of sections and returns its address."""

    def write(*sections: Section, name: str = "page") -> str:
        path = tmp_path / f"{name}.html"
        path.write_text(page(Report("about", [], sections, verdict="Holds.", is_good=True)), encoding="utf-8")
        return path.as_uri()

    return write


def test_the_name_of_a_row_stays_in_view(browse: Browse[Any], written: Any) -> None:
    def left_of(browser: Any) -> tuple[float, float]:
        with Tab(browser, written(Section("Runs", [WIDE], is_open=True)), 390) as tab:
            box = tab.page.locator(".wide")
            box.evaluate("one => one.scrollLeft = 400")
            return box.evaluate("one => one.scrollLeft"), tab.page.locator("td").first.bounding_box()["x"]

    scrolled, left = browse(left_of)
    assert scrolled == 400
    assert 0 <= left < 60


def test_notes_of_cells_stand_below_them_on_a_phone(browse: Browse[Any], written: Any) -> None:
    def tops(browser: Any) -> list[tuple[float, float]]:
        found = []
        for width in (1440, 390):
            with Tab(browser, written(Section("Runs", [NOTED], is_open=True)), width) as tab:
                cell, note = (tab.page.locator(name).bounding_box() for name in ("td:has(small)", "td small"))
                found.append((note["y"] - cell["y"], note["height"]))
        return found

    wide, narrow = browse(tops)
    assert narrow[0] > wide[0] + 10


def test_long_notes_of_cells_do_not_push_a_column_off_a_phone(browse: Browse[Any], written: Any) -> None:
    note = Cell("2.40 s", 2.4, note="+87.6% worse, 1.48–5.94 s, measured outside")
    table = Table(["", "a run", "another"], [["a figure's name", note, note]])

    def widths(browser: Any) -> list[int]:
        with Tab(browser, written(Section("Figures", [table], is_open=True)), 390) as tab:
            return tab.page.locator(".wide").evaluate("one => [one.scrollWidth, one.clientWidth]")

    scrolled, shown = browse(widths)
    assert scrolled <= shown


def test_the_mark_of_a_folded_heading_is_on_its_line(browse: Browse[Any], written: Any) -> None:
    def offset(browser: Any) -> float:
        with Tab(browser, written(Section(LONG, [TIMES])), 390) as tab:
            summary, heading = (tab.page.locator(name).bounding_box() for name in ("summary", "summary h2"))
            return float(heading["y"] - summary["y"])

    assert browse(offset) < 10


def test_times_of_different_units_sort_by_length(browse: Browse[Any], written: Any) -> None:
    def order(browser: Any) -> list[str]:
        with Tab(browser, written(Section("Runs", [TIMES], is_open=True))) as tab:
            tab.page.get_by_text("time", exact=True).press("Enter")
            return list(tab.page.locator("tbody td:first-child").all_inner_texts())

    assert browse(order) == ["b", "d", "a", "c"]


def test_paper_shows_everything_in_light(browse: Browse[Any], written: Any) -> None:
    chart = Chart(Axis("time", "s"), Axis("requests"), [Series("present", [0, 1], [1, 2], "line")])
    sections = [
        Section("Runs", [Cards([Card("1 s", "TTFT p99")]), WIDE]),
        Section("", [Figures([(chart, "Requests")])]),
    ]

    def check(browser: Any) -> tuple[bool, int, str, str]:
        with Tab(browser, written(*sections), 700, "dark") as tab:
            assert not tab.page.locator("table").is_visible()
            dark = pixels(tab.page.locator("figure"))
            tab.page.emulate_media(media="print")
            tab.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            assert pixels(tab.page.locator("figure")) != dark
            wide = tab.page.evaluate("() => document.querySelector('.wide').scrollWidth - document.body.clientWidth")
            paper, kept = (
                tab.page.locator("figure").evaluate(f"one => getComputedStyle(one).{name}")
                for name in ("colorScheme", "breakInside")
            )
            return tab.page.locator("table").is_visible(), wide, paper, kept

    is_visible, wide, scheme, kept = browse(check)
    assert is_visible
    assert wide <= 0
    assert (scheme, kept) == ("light", "avoid")


def test_points_have_no_more_colours_than_can_be_told_apart(browse: Browse[Any], written: Any) -> None:
    def legends(browser: Any) -> tuple[list[str], list[str]]:
        with Tab(browser, written(Section("Points", [Points(POINTS)]))) as tab:
            first = tab.page.locator(".legend button").all_inner_texts()
            tab.page.locator("label", has_text="colour").locator("select").select_option("deployment")
            assert tab.problems == []
            return first, tab.page.locator(".legend button").all_inner_texts()

    first, chosen = browse(legends)
    assert first == ["0", "1"]
    assert chosen == [*(f"h100_sxm {number}" for number in range(7)), "5 others"]


def test_a_figure_of_points_shows_the_limits(browse: Browse[Any], written: Any) -> None:
    def drawn(browser: Any) -> list[str]:
        found = []
        for name, limits in (("with", POINTS["limits"]), ("without", {})):
            with Tab(browser, written(Section("Points", [Points({**POINTS, "limits": limits})]), name=name)) as tab:
                found.append(pixels(tab.page.locator("figure")))
        return found

    with_limit, without = browse(drawn)
    assert with_limit != without


def test_more_lines_than_colours_are_drawn_as_panels(browse: Browse[Any], written: Any) -> None:
    lines = [Series(f"line {number}", [0, 1], [number, 2 * number], "line") for number in range(9)]

    def panels(browser: Any) -> list[str]:
        with Tab(browser, written(Section("", [Figures([(Chart(Axis("x"), Axis("y"), lines), "Many")])]))) as tab:
            return list(tab.page.locator(".panel").all_inner_texts())

    assert browse(panels) == [f"line {number}" for number in range(9)]


def test_settings_that_span_much_are_drawn_on_a_logarithmic_axis(browse: Browse[Any], written: Any) -> None:
    def drawn(browser: Any, most: int, is_log: bool | None) -> str:
        line = Series("", [1, 4, most], [1, 2, 3], "marked")
        chart = Chart(Axis("max_num_seqs", is_log=is_log), Axis("TTFT"), [line])
        with Tab(browser, written(Section("", [Figures([(chart, "TTFT")])]))) as tab:
            return pixels(tab.page.locator("figure"))

    for most, is_log in ((64, True), (8, False)):
        assert browse(lambda each, most=most: drawn(each, most, None)) == browse(
            lambda each, most=most, is_log=is_log: drawn(each, most, is_log)
        )


def test_a_live_page_keeps_what_is_opened_and_the_keyboards_place(browse: Browse[Any], dashboard: str) -> None:
    def check(browser: Any) -> tuple[bool, str]:
        with Tab(browser, f"{dashboard}/") as tab:
            tab.page.evaluate("""() => {
                const text = document.documentElement.outerHTML.replace("</main>",
                    "<details><summary>Table</summary>rows</details><button>stop</button></main>");
                replaceMain(text);
                document.querySelector("main summary").click();
                document.querySelector("main > button:last-of-type").focus();
                replaceMain(text);
            }""")
            opened = tab.page.locator("main details").evaluate("one => one.open")
            return opened, tab.page.evaluate("() => document.activeElement.textContent")

    assert browse(check) == (True, "stop")
