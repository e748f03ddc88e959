"""Reports as pages of one file each, from the templates: they load nothing and read in light and dark.

Tables sort by a click on a header; `assets/figures.js` draws the figures. Only who renders a template imports jinja2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.report.chart import as_json
from windtunnel.report.render.json import version
from windtunnel.report.report import Block, OnPage, OnTerminal, Report, Text

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from markupsafe import Markup

PACKAGE = Path(__file__).parents[2]
ASSETS = PACKAGE / "report" / "assets"


def page(report: Report) -> str:
    """Return a report as one HTML file."""
    return str(template("report.html").render(report=report))


@lru_cache
def template(name: str) -> Template:
    """Return a template of reports, drawings or the dashboard, by its file's name.

    What a template shows is escaped unless it is a drawing.
    """
    return _environment().get_template(name)


@lru_cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folders = [PACKAGE / "report" / "templates", PACKAGE / "dashboard" / "templates"]
    made = Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"version": version(), "asset": _asset}
    made.filters["px"] = lambda value: f"{value:.1f}"
    made.tests["detail"] = lambda block: type(block).__name__ in ("Table", "Facts")
    made.filters["json"] = as_json
    made.filters["prose"] = _prose
    made.filters["kind"] = lambda block: type(block).__name__.lower()
    made.filters["blocks"] = lambda blocks: list(_shown(blocks))
    return made


def _prose(text: str) -> Markup:
    """Return a text in which no line ends within an option such as `--max-num-seqs`."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"(?<![\w-])--[a-z][\w-]*", r'<span class="flag">\g<0></span>', str(escape(text))))


@lru_cache
def _asset(name: str) -> Markup:
    from markupsafe import Markup

    return Markup((ASSETS / name).read_text(encoding="utf-8"))


def _shown(blocks: Sequence[Block]) -> Iterator[Any]:
    """Yield the blocks that pages show; the macro that renders a block is called like its class."""
    for block in blocks:
        if isinstance(block, OnPage):
            yield from _shown(block.make())
        elif isinstance(block, str):
            yield Text([block])
        elif not isinstance(block, OnTerminal) and (getattr(block, "drawn", True) and getattr(block, "shares", True)):
            yield block
