"""One report on a terminal and on a page: what each shows. A page is one file that escapes what it is given."""

import re
import subprocess
import sys

import pytest

from windtunnel.report.render.html import page
from windtunnel.report.render.terminal import show
from windtunnel.report.report import (
    Bars,
    Card,
    Cards,
    Cell,
    Code,
    Facts,
    Figures,
    OnPage,
    OnTerminal,
    Points,
    Report,
    Section,
    Table,
    Text,
)

CELL = Cell("1", 1.5, href="/<x>", note="<i>")
REPORT = Report(
    "<title>",
    ["a < b", Facts([("<fact>", "x & y")])],
    [
        Section(
            "", [Table(("<name>", "n\nms"), [("x & y", Cell("1", 1.5, href="/<x>", note="<i>"))], notes=["<note>"])]
        ),
        Section("Only on pages", [OnPage(lambda: [Cards([Card("3%", "<error>")]), Code("<text>", "<folded>")])]),
        Section("Only on terminals", [OnTerminal(lambda: [Text(["one", "two"])])]),
        Section("Shares", [Bars({"<half>": 0.5}, "<caption>")], heading="Shares of <all>"),
        Section("Drawn", [Figures([("<svg/>", "")]), Points({"names": ["</script>"]})]),
        Section("Nothing drawn", [Figures([])]),
    ],
    notes=["<done>"],
    verdict="<verdict>",
)


def test_a_page_without_a_title_is_headed_by_its_answer_and_names_its_tables() -> None:
    table = Table(("setting", "gain", "limit", "more"), [("tp 2", "1%", "TPOT", "")])
    text = page(Report("", [], [Section("", [table])], verdict="TP 2 gains 1%. Take it."))
    assert '<p class="answer" role="heading" aria-level="1">TP 2 gains 1%.</p>' in text
    assert 'aria-label="table: setting, gain, limit"' in text
    assert 'aria-level="1"' not in page(REPORT)


def test_a_page_escapes_what_it_is_given_and_loads_nothing() -> None:
    text = page(REPORT)
    for word in ("name", "fact", "note", "error", "text", "folded", "half", "caption", "done", "verdict"):
        assert f"&lt;{word}&gt;" in text
        assert f"<{word}>" not in text
    assert "<title>&lt;title&gt;</title>" in text
    assert "Shares of &lt;all&gt;" in text
    assert "x &amp; y" in text
    assert "\\u003c/script\\u003e" in text
    assert "src=" not in text
    assert [address for address in re.findall(r"https?://[^\s\"']+", text) if "uPlot" not in address] == []
    assert not re.findall(r"<link|<iframe|@import|url\(", text)


def test_a_section_without_blocks_in_a_medium_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    show(REPORT)
    printed, text = capsys.readouterr().out, page(REPORT)
    assert "Only on pages" not in printed
    assert "Drawn" not in printed
    assert "Only on terminals" not in text
    assert "Nothing drawn" not in text
    assert "Only on pages" in text


def test_a_terminal_has_an_empty_line_between_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    show(REPORT)
    assert capsys.readouterr().out == (
        "<title>\n<verdict>\na < b\n<fact>          x & y\n\n         n\n<name>  ms\n──────────\nx & y    1\n<note>\n\n"
        "Only on terminals\none\ntwo\n\nShares\n<half>          50.0%  ████████████\nnote: <done>\n"
    )


def test_a_table_wider_than_the_terminal_stands_in_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part has the first column; texts wrap first, and a long table keeps its columns together."""
    monkeypatch.setenv("COLUMNS", "40")
    headers = ["name", *(f"column {i}" for i in range(8))]

    def printed(num_rows: int, name: str = "x") -> list[str]:
        show(Report("", [], [Section("", [Table(headers, [(name, *"12345678")] * num_rows)])]))
        return capsys.readouterr().out.splitlines()

    lines = printed(1)
    assert max(map(len, lines)) <= 40
    assert [line.split() for line in lines if line.startswith("x")] == [["x", *"123"], ["x", *"456"], ["x", *"78"]]
    assert max(map(len, printed(1, "a name with words that wrap"))) <= 40
    assert [line.split() for line in printed(99) if line.startswith("x")] == [["x", *"12345678"]] * 99


@pytest.mark.full
def test_a_terminal_needs_no_templates() -> None:
    code = (
        "import sys; import windtunnel.report.serving.run, windtunnel.report.training, windtunnel.report.search.study, "
        "windtunnel.report.render.terminal; sys.exit('jinja2' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_page_without_figures_has_no_plotting_library() -> None:
    assert "uPlot" not in page(Report("plain", ["a line"]))


def test_an_answer_leads_and_the_tables_behind_it_are_folded() -> None:
    rows = Table(["name"], [["one"]])
    report = Report("about", [], [Section("Rows", [rows])], verdict="Holds: all. Bound by memory.", is_good=True)
    text = page(report)
    assert text.index("Holds: all.") < text.index("<details>") < text.index("<table>")
    assert '<div class="verdict good"><p class="answer">Holds: all.</p><p>Bound by memory.</p></div>' in text
    assert "<details>" not in page(Report("about", [], [Section("Rows", [rows])]))
    assert "<details>" not in page(Report("about", [], [Section("Rows", [rows], is_open=True)], verdict="Yes."))


def test_a_page_needs_no_title_and_says_that_notes_are_notes_once() -> None:
    text = page(Report("", ["about"], notes=["changed: tp"], verdict="Set --tp 2."))
    assert "<title>Set --tp 2.</title>" in text
    assert "<h1" not in text
    assert "<p>changed: tp</p>" in text


def test_a_page_draws_no_bar_of_nothing() -> None:
    text = page(Report("", [Bars({"memory": 1.0, "communication": 0.0})]))
    assert "memory" in text
    assert "communication" not in text
