"""Every page in a real Chromium: nothing fails, nothing overflows, everybody can read it, and its figures work."""

from __future__ import annotations

import csv
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from windtunnel.report.chart import Series, equality_chart
from windtunnel.report.render.html import page as page_of
from windtunnel.report.report import Figures, Report

if TYPE_CHECKING:
    from browser.conftest import Browse

pytestmark = [pytest.mark.compiled, pytest.mark.full]

WIDTHS, SCHEMES, HEIGHT = (1440, 390), ("light", "dark"), 900
ANSWERS = {
    "holds": ("good", "Holds the SLO"), "breaks": ("bad", "Breaks the SLO"), "capacity": ("good", "Sustains"),
    "explain": ("", "A step takes"), "grid": ("", "of 27 points meet the limits"), "train": ("good", "A step takes"),
    "does_not_fit": ("bad", "Does not fit"), "search": ("good", "Best: "),
    "nothing_found": ("bad", "Nothing tried keeps the limits"),
    "validate": ("", "Median error"), "validate_steps": ("", "Median error: decode steps"),
    "kernels": ("", "Most of the device's time"), "compare": ("", "TTFT 10.0% longer"), "bench": ("", "Measured: "),
}  # fmt: skip
"""Page -> the class of its answer, and words of it."""

SETTLED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
OVERFLOW = "() => document.documentElement.scrollWidth - innerWidth"
# Whether something is drawn, for each canvas.
CANVASES = """() => [...document.querySelectorAll("canvas")].map(canvas => {
  const copy = Object.assign(document.createElement("canvas"), {width: 300, height: 150});
  const pen = copy.getContext("2d", {willReadFrequently: true});
  pen.drawImage(canvas, 0, 0, 300, 150);
  return new Set(new Uint32Array(pen.getImageData(0, 0, 300, 150).data.buffer)).size > 3;
})"""
# The first rows of a table stand for all others.
VIOLATIONS = """async (options) => (await axe.run(
    {include: [["html"]], exclude: [["tbody tr:nth-child(n+4)"], ["option"]]},
    {resultTypes: ["violations"], ...options})).violations
  .filter(one => ["serious", "critical"].includes(one.impact))
  .map(one => `${one.id}: ${one.nodes.length} x ${one.nodes[0].html.slice(0, 120)}`)"""
# Only colours differ by scheme.
CHECKED = {(1440, "light"): {"runOnly": ["wcag2a", "wcag2aa"]}, (390, "dark"): {"runOnly": ["color-contrast"]}}


class Tab:
    """A page that is open, and what it complained of."""

    def __init__(self, browser: Any, address: str, width: int = 1440, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
        self.page.set_default_timeout(10_000)
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("console", self._said)
        self.page.on("requestfailed", self._failed)
        self.page.goto(address)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    def _failed(self, request: Any) -> None:
        # A live page asks again and again, also when it is closed.
        if request.resource_type != "fetch":
            self.problems.append(f"not loaded: {request.url}")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.page.close()


def problems_of(browser: Any, address: str, axe: str, num_figures: int | None = None, ready: str = "main") -> list[str]:
    """What is wrong with a page at any width and in any scheme; `ready` selects what it must have first."""
    with Tab(browser, address) as tab:
        tab.page.wait_for_selector(ready)
        tab.page.evaluate(axe)
        for width in WIDTHS:
            for scheme in SCHEMES:
                where = f"{width} {scheme}"
                tab.page.set_viewport_size({"width": width, "height": HEIGHT})
                tab.page.emulate_media(color_scheme=scheme)
                tab.page.evaluate(SETTLED)
                if (wide := tab.page.evaluate(OVERFLOW)) > 0:
                    tab.problems.append(f"{where}: {wide} pixels too wide")
                drawn = tab.page.evaluate(CANVASES)
                if not all(drawn) or (num_figures is not None and len(drawn) < num_figures):
                    tab.problems.append(f"{where}: figures drawn: {drawn}")
                if options := CHECKED.get((width, scheme)):
                    tab.problems += [f"{where}: {found}" for found in tab.page.evaluate(VIOLATIONS, options)]
        return [f"{address.rpartition('/')[2]}: {problem}" for problem in tab.problems]


def test_every_report_reads_at_both_widths_in_light_and_dark(
    browse: Browse[list[str]], reports: dict[str, Path], axe: str
) -> None:
    figures = {"holds": 9, "breaks": 9, "grid": 6, "train": 1, "search": 1, "validate": 4, "compare": 4}
    addresses = {name: path.as_uri() for name, path in reports.items()}
    found = [
        browse(lambda browser, name=name, address=address: problems_of(browser, address, axe, figures.get(name, 0)))
        for name, address in addresses.items()
    ]
    assert [problem for each in found for problem in each] == []


def test_the_answer_leads_every_report(browse: Browse[Any], reports: dict[str, Path]) -> None:
    def answers(browser: Any) -> dict[str, tuple[str, str, float, float]]:
        texts = {}
        for name in ANSWERS:
            with Tab(browser, reports[name].as_uri(), 390) as tab:
                answer = tab.page.locator(".answer")
                bottom = answer.bounding_box()["y"] + answer.bounding_box()["height"]
                size = float(answer.evaluate("one => parseFloat(getComputedStyle(one).fontSize)"))
                texts[name] = (tab.page.locator(".verdict").get_attribute("class"), answer.inner_text(), bottom, size)
        return texts

    for name, (tone, text, bottom, size) in browse(answers).items():
        assert (tone, ANSWERS[name][1] in text) == (f"verdict {ANSWERS[name][0]}".strip(), True), (name, tone, text)
        assert bottom < HEIGHT / 2, name
        assert size >= 19, name


def test_every_page_of_the_dashboard_reads_at_both_widths_in_light_and_dark(
    browse: Browse[list[str]], dashboard: str, folder: Path, axe: str
) -> None:
    with sqlite3.connect(folder / "kept.sqlite") as connection:
        (search,) = connection.execute("select name from searches").fetchone()
    pages = {
        "/": 0, "/run/served/slow": 9, "/run/real": 5, "/run/found": 1, "/run/capacity.json": 0, "/run/grid.json": 6,
        "/run/step.json": 0, "/run/step_of_training.json": 0, "/timeline/served/fast": 1, "/requests/served/slow": 0,
        "/step/served/slow?batch=4&context=60": 0, "/scenario/served/slow": 0, "/compare": 0,
        "/compare?run=served/slow&run=served/fast": 3, "/catalog": 0, "/catalog/devices/h100_sxm": 0, "/search": 0,
        f"/search?store=kept.sqlite&search={search[:12]}": 1,
    }  # fmt: skip
    found = [
        browse(lambda browser, page=page, number=number: problems_of(browser, dashboard + page, axe, number))
        for page, number in pages.items()
    ]
    found.append(browse(lambda browser: problems_of(browser, f"{dashboard}/try", axe, 3, "#result canvas")))
    assert [problem for each in found for problem in each] == []


def pixels(figure: Any) -> str:
    return str(figure.locator("canvas").evaluate("one => one.toDataURL()"))


def test_a_figure_zooms_hovers_hides_series_and_is_saved(
    browse: Browse[None], reports: dict[str, Path], tmp_path: Path
) -> None:
    def check(browser: Any) -> None:
        with Tab(browser, reports["holds"].as_uri()) as tab:
            figure = tab.page.locator("figure", has_text="Requests in the system")
            figure.scroll_into_view_if_needed()
            first, over = pixels(figure), figure.locator(".u-over").bounding_box()
            middle = (over["x"] + over["width"] / 2, over["y"] + over["height"] / 2)
            tab.page.mouse.move(*middle)
            assert "present" in figure.locator(".tip").inner_text()
            tab.page.mouse.down()
            tab.page.mouse.move(middle[0] + 90, middle[1] + 60, steps=4)
            tab.page.mouse.up()
            assert figure.get_by_text("reset").is_visible()
            assert pixels(figure) != first
            figure.get_by_text("reset").click()
            assert pixels(figure) == first
            figure.get_by_text("zoom").click()
            figure.locator(".u-over").dblclick()
            assert pixels(figure) == first
            queue = figure.get_by_role("button", name="queue")
            queue.click()
            assert queue.get_attribute("aria-pressed") == "false"
            assert pixels(figure) != first
            queue.click()
            assert pixels(figure) == first
            figure.get_by_text("raw").click()
            assert pixels(figure) != first
            for kind in ("PNG", "CSV"):
                with tab.page.expect_download() as started:
                    figure.get_by_text(kind).click()
                started.value.save_as(tmp_path / f"figure.{kind}")
                assert started.value.suggested_filename == f"requests-in-the-system.{kind.lower()}"
            assert tab.problems == []

    browse(check)
    assert (tmp_path / "figure.PNG").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "figure.CSV").open() as file:
        head, *rows = csv.reader(file)
    assert head == ["time (s)", "present", "queue"]
    assert len(rows) > 50
    assert all(float(row[1]) >= 0 for row in rows)


def test_numbers_of_a_setting_are_in_their_order(browse: Browse[list[str]], reports: dict[str, Path]) -> None:
    def order(browser: Any) -> list[str]:
        with Tab(browser, reports["search"].as_uri()) as tab:
            select = tab.page.locator(".controls label", has_text="max_num_seqs").last.locator("select")
            texts: list[str] = select.locator("option").all_inner_texts()
            return texts

    known, *numbers = browse(order)
    assert known == "any"
    assert numbers == sorted(numbers, key=int)
    assert len(numbers) > 1


def test_series_without_a_colour_are_named_together(browse: Browse[Any], tmp_path: Path) -> None:
    series = [Series(f"run {number}", [1.0, 2.0 + number], [1.1, 2.0 + number]) for number in range(12)]
    path = tmp_path / "many.html"
    drawn = Figures([(equality_chart(series, "measured", "predicted"), "runs")])
    path.write_text(page_of(Report("many", [drawn], [])), encoding="utf-8")

    def check(browser: Any) -> tuple[list[str], bool]:
        with Tab(browser, path.as_uri()) as tab:
            names = tab.page.locator(".legend button").all_inner_texts()
            before = tab.page.locator("canvas").evaluate("one => one.toDataURL()")
            tab.page.get_by_role("button", name="5 others").click()
            return names, before != tab.page.locator("canvas").evaluate("one => one.toDataURL()")

    assert browse(check) == ([*(f"run {number}" for number in range(7)), "5 others"], True)


def test_an_axis_of_counts_has_whole_numbers(browse: Browse[list[str]], reports: dict[str, Path]) -> None:
    record = """window.drawn = [];
        CanvasRenderingContext2D.prototype.fillText = function (text) { window.drawn.push(text); };"""

    def drawn(browser: Any) -> list[str]:
        with Tab(browser, reports["validate"].as_uri()) as tab:
            figure = tab.page.locator("figure", has_text="runs by error").first
            figure.scroll_into_view_if_needed()
            tab.page.evaluate(record)
            figure.get_by_text("zoom").click()
            figure.get_by_text("reset").click()
            tab.page.wait_for_function("window.drawn.includes('runs')")
            texts: list[str] = tab.page.evaluate("window.drawn")
            return texts

    texts = browse(drawn)
    assert "1" in texts
    assert not [text for text in texts if "." in str(text)]


def test_bars_are_saved_as_a_picture_and_as_their_shares(
    browse: Browse[None], reports: dict[str, Path], tmp_path: Path
) -> None:
    def check(browser: Any) -> None:
        with Tab(browser, reports["explain"].as_uri()) as tab:
            figure = tab.page.locator("figure", has_text="By what bounds it")
            for kind in ("PNG", "CSV"):
                with tab.page.expect_download() as started:
                    figure.get_by_text(kind).click()
                started.value.save_as(tmp_path / f"bars.{kind}")
                assert started.value.suggested_filename == f"by-what-bounds-it.{kind.lower()}"
            assert tab.problems == []

    browse(check)
    assert (tmp_path / "bars.PNG").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "bars.CSV").open() as file:
        head, *rows = csv.reader(file)
    assert head == ["name", "share", "shown"]
    assert sum(float(share) for _, share, _ in rows) == pytest.approx(1.0, abs=1e-4)


def test_a_reader_chooses_what_the_points_of_a_search_show(browse: Browse[None], reports: dict[str, Path]) -> None:
    def check(browser: Any) -> None:
        with Tab(browser, reports["search"].as_uri()) as tab:
            figure = tab.page.locator("figure", has_text="across")
            first = pixels(figure)
            figure.locator("label", has_text="across").locator("select").select_option("TTFT p90")
            assert pixels(figure) != first
            figure.locator("label").last.locator("select").select_option("16")
            with tab.page.expect_download() as started:
                figure.get_by_text("CSV").click()
            assert "max_num_seqs" in Path(started.value.path()).read_text()
            assert tab.page.locator("tr.first").inner_text().startswith("tp 1")
            assert tab.problems == []

    browse(check)


def test_tables_open_and_sort(browse: Browse[None], reports: dict[str, Path]) -> None:
    def check(browser: Any) -> None:
        with Tab(browser, reports["holds"].as_uri()) as tab:
            table = tab.page.locator("table", has_text="latency").first
            assert not table.is_visible()
            tab.page.locator("summary").first.click()
            assert table.is_visible()
            table.get_by_text("p99").click()
            assert table.locator("th[aria-sort=descending]").inner_text().startswith("p99")

    browse(check)


def test_the_dashboards_policy_lets_figures_work(browse: Browse[None], dashboard: str) -> None:
    def check(browser: Any) -> None:
        with Tab(browser, f"{dashboard}/run/served/slow") as tab:
            figure = tab.page.locator("figure", has_text="TTFT: share of requests")
            light = pixels(figure)
            for _ in range(2):  # light, then dark
                tab.page.locator("#theme").click()
            assert pixels(figure) != light
            for kind in ("PNG", "CSV"):
                with tab.page.expect_download() as started:
                    figure.get_by_text(kind).click()
                assert Path(started.value.path()).stat().st_size > 100
            assert tab.problems == []

    browse(check)


def test_the_answer_leads_a_trial_on_a_phone(browse: Browse[None], dashboard: str) -> None:
    def check(browser: Any) -> None:
        with Tab(browser, f"{dashboard}/try", 390) as tab:
            tab.page.wait_for_selector("#result canvas")
            assert tab.page.locator(".answer").count() == 1
            assert tab.page.locator(".answer").bounding_box()["y"] < HEIGHT / 3
            assert tab.problems == []

    browse(check)


def test_a_recommendation_is_started_watched_and_answered(
    browse: Browse[None], dashboard: str, axe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fields = {"devices": "l40s", "input_tokens": "64", "output_tokens": "8", "num_requests": "40", "max_devices": "1"}

    def check(browser: Any) -> None:
        with Tab(browser, f"{dashboard}/recommend") as tab:
            for name, value in fields.items():
                tab.page.fill(f"input[name={name}]", value)
            tab.page.get_by_role("button", name="recommend").click()
            expect = pytest.importorskip("playwright.sync_api").expect
            expect(tab.page.locator(".progress")).to_contain_text("done: ", timeout=120_000)
            expect(tab.page.locator(".answer")).to_contain_text("Serve it on 1 x NVIDIA L40S")
            assert tab.page.get_by_role("button", name="stop").count() == 0
            assert tab.problems == []

    browse(check)
    for page in ("/recommend", "/recommend/1"):
        assert browse(lambda browser, page=page: problems_of(browser, dashboard + page, axe, 0)) == []


def test_the_timeline_zooms_by_the_keyboard(browse: Browse[None], dashboard: str) -> None:
    def check(browser: Any) -> None:
        with Tab(browser, f"{dashboard}/timeline/served/fast") as tab:
            # Not `wait_for_function`, which evaluates text: the dashboard's policy for scripts forbids that.
            expect = pytest.importorskip("playwright.sync_api").expect
            stretch = tab.page.locator("#stretch")
            expect(stretch).not_to_be_empty()
            before = stretch.inner_text()
            tab.page.locator("#timeline").press("+")
            expect(stretch).not_to_have_text(before)
            assert tab.problems == []

    browse(check)
