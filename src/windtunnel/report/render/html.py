"""Reports as pages of one file each, from the templates: they load nothing and read in light and dark.

Tables sort by a click on a header, and curves show their values at the pointer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from windtunnel.report.render import templates
from windtunnel.report.render.plots import Axis, bar_chart
from windtunnel.report.report import Bars, Block, Figures, OnPage, OnTerminal, Report, Text

if TYPE_CHECKING:
    from jinja2 import Template

MOST_BARS = 12
LONGEST_LABEL = 28
"""Characters of a label for which a narrow drawing has room."""


def page(report: Report) -> str:
    """Return a report as one HTML file."""
    return str(template("report.html").render(report=report))


def template(name: str) -> Template:
    """Return a template of a page, by its file's name."""
    templates.environment().filters["blocks"] = lambda blocks: list(_shown(blocks))
    return templates.template(name)


def _shown(blocks: Sequence[Block]) -> Iterator[Any]:
    """Yield the blocks that pages show; the macro that renders a block is called like its class."""
    for block in blocks:
        if isinstance(block, OnPage):
            yield from _shown(block.make())
        elif isinstance(block, str):
            yield Text([block])
        elif isinstance(block, Bars):
            yield from [Figures([(_drawn(block), block.caption)])] if block.shares else []
        elif not isinstance(block, OnTerminal) and not (isinstance(block, Figures) and not block.drawn):
            yield block


def _drawn(bars: Bars) -> str:
    largest = dict(sorted(bars.shares.items(), key=lambda item: -item[1])[:MOST_BARS])
    labels = [name.replace("_", " ") for name in largest]
    width = 440 if max(map(len, labels)) <= LONGEST_LABEL else 560
    return bar_chart(labels, [share * bars.total for share in largest.values()], Axis(bars.axis), width=width)
