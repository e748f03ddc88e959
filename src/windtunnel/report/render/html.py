"""Reports as pages of one file each, from the templates: they load nothing and read in light and dark.

Tables sort by a click on a header; `assets/figures.js` draws the figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from windtunnel.report.render import templates
from windtunnel.report.report import Block, OnPage, OnTerminal, Report, Text

if TYPE_CHECKING:
    from jinja2 import Template


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
        elif not isinstance(block, OnTerminal) and (getattr(block, "drawn", True) and getattr(block, "shares", True)):
            yield block
