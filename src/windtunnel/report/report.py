"""A report of one subject, which the terminal and a page render: its headline, sections, tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from windtunnel.report.chart import Chart
from windtunnel.report.numbers import percent
from windtunnel.units import format_seconds

LABEL_WIDTH = 14
"""Characters that the labels of facts take on a terminal."""
MAX_BARS = 20
"""Most bars of a page's figure."""


@dataclass(frozen=True)
class Report:
    """The answer to one question."""

    title: str
    """What the report is about: a model, a deployment, a file."""
    lead: Sequence[Block] = ()
    """Lines, or short tables, right below the title."""
    sections: Sequence[Section] = ()
    notes: Sequence[str] = ()
    """Remarks, below everything; a terminal says of each that it is a note."""
    verdict: str = ""
    """The answer, below the title: a page shows its first sentence in large type, and folds the tables."""
    is_good: bool | None = None
    """Whether the answer is a yes (green) or a no (red); None: neither."""


class Remarks(Protocol):
    """What a command line or a file says beside what is predicted."""

    @property
    def remarks(self) -> list[str]:
        """Sentences on it."""

    @property
    def document(self) -> dict[str, Any]:
        """The same for JSON."""


def noted(report: Report, launch: Remarks | None) -> Report:
    """Return a report with the lines on what a command line or a file says and the prediction leaves out; first of all
    that its server would not start.
    """
    if launch is None:
        return report
    return stopped(replace(report, lead=[*report.lead, *launch.remarks]), getattr(launch, "not_starting", ()))


def stopped(report: Report, not_starting: Sequence[str]) -> Report:
    """Return a report that says first why its server would not start; the same where it starts."""
    verdict = " ".join([*(f"{sentence}." for sentence in not_starting), report.verdict]).strip()
    return replace(report, verdict=verdict, is_good=False if not_starting else report.is_good)


@dataclass(frozen=True)
class Section:
    """A heading and what it stands for; without blocks in one medium, the section is left out there."""

    title: str
    """Empty: the blocks need no heading on a terminal."""
    blocks: Sequence[Block]
    heading: str = ""
    """Heading on a page, where it is not the title."""
    is_open: bool = False
    """Whether its tables are not folded on a page that has an answer."""


@dataclass(frozen=True)
class Cell:
    """A table's cell with more than text."""

    text: str
    value: float | None = None
    """Sort key; None: the text."""
    href: str = ""
    """Address of its link."""
    note: str = ""
    """Small text behind it, on a page."""
    title: str = ""
    """Tooltip."""
    bar: float | None = None
    """Bar behind the text, as a fraction of the cell's width."""
    tone: str = ""
    """`alert` where it names something wrong; `better` or `worse` where a difference is."""

    def __str__(self) -> str:
        return self.text


Row = Sequence["str | Cell"]


@dataclass(frozen=True)
class Table:
    """Rows below headers; the first `left` and the last `right` columns are texts, the others numbers."""

    headers: Sequence[str]
    """A line break is one on a terminal, and a space on a page."""
    rows: Sequence[Row]
    left: int = 1
    right: int = 0
    notes: Sequence[str] = ()
    """Lines right below the table."""
    winner: int | None = None
    """Row that a page marks as the best."""

    def is_text(self, index: int) -> bool:
        return index < self.left or index >= len(self.headers) - self.right


@dataclass(frozen=True)
class Facts:
    """(Label, text) pairs."""

    rows: Sequence[tuple[str, str]]
    width: int = LABEL_WIDTH
    """Characters that labels take on a terminal."""


@dataclass(frozen=True)
class Bars:
    """Shares of a whole, as bars: of characters on a terminal, drawn on a page."""

    shares: Mapping[str, float]
    caption: str = ""
    total_s: float | None = None
    """The whole, for a page to show times besides."""

    def largest(self) -> list[tuple[str, float]]:
        """Return the (name, share) pairs that a page has room for, the largest first."""
        return sorted(filter(itemgetter(1), self.shares.items()), key=lambda item: -item[1])[:MAX_BARS]

    def text(self, share: float) -> str:
        """Return what stands behind a bar."""
        return percent(share) if self.total_s is None else f"{format_seconds(share * self.total_s)}, {percent(share)}"


@dataclass(frozen=True)
class Text:
    """Lines of text; a plain string is one line."""

    lines: Sequence[str]


class Card(NamedTuple):
    """A headline figure."""

    value: str
    label: str
    note: str = ""
    """Small text below it."""
    share: float | None = None
    """What it takes of its limit, as a meter; above 1 the limit is broken."""


@dataclass(frozen=True)
class Cards:
    """Headline figures of a page."""

    facts: Sequence[Card]


@dataclass(frozen=True)
class Figures:
    """Figures of a page with their captions, side by side as far as they fit; a drawing is SVG text."""

    drawn: Sequence[tuple[Chart | str, str]]


@dataclass(frozen=True)
class Code:
    """Text of a program or file on a page; with a summary, it is folded below it."""

    text: str
    summary: str = ""


@dataclass(frozen=True)
class Points:
    """A page's figure of many points, whose axes the reader chooses; `assets/figures.js` draws it."""

    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OnPage:
    """Blocks of pages only, made when a page is rendered."""

    make: Callable[[], Sequence[Block]]


@dataclass(frozen=True)
class OnTerminal:
    """Blocks of terminals only, made when they are printed."""

    make: Callable[[], Sequence[Block]]


Block = str | Text | Table | Facts | Bars | Cards | Figures | Code | Points | OnPage | OnTerminal
