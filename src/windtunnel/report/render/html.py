"""Reports as pages of one file each, from the templates: they load nothing and read in light and dark.

Tables sort by a click on a header, and curves show their values at the pointer.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from windtunnel.report.render.plots import Axis, bar_chart
from windtunnel.report.render.templates import environment, template
from windtunnel.report.report import Bars, Block, Figures, OnPage, OnTerminal, Report, Text

MOST_BARS = 12


def page(report: Report) -> str:
    """Return a report as one HTML file."""
    return str(template("report.html").render(report=report))


def _shown(blocks: Sequence[Block]) -> Iterator[Any]:
    """Yield the blocks that pages show; each has its kind, which names the macro that renders it."""
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
    return bar_chart(labels, [share * bars.total for share in largest.values()], Axis(bars.axis), width=440)


environment().filters["blocks"] = lambda blocks: list(_shown(blocks))
