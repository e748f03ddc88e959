"""The templates of pages and drawings; only who uses them imports jinja2."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from windtunnel.report.chart import as_json
from windtunnel.report.render.json import version

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from markupsafe import Markup

PACKAGE = Path(__file__).parents[2]
ASSETS = PACKAGE / "report" / "assets"


@lru_cache
def template(name: str) -> Template:
    """Return a template of reports or of the dashboard, by its file's name."""
    return environment().get_template(name)


@lru_cache
def environment() -> Environment:
    """Return the environment of all templates: what they show is escaped unless it is a drawing."""
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
    made.filters["kind"] = lambda block: type(block).__name__.lower()
    return made


@lru_cache
def _asset(name: str) -> Markup:
    """Return the text of a style or script to put into a page."""
    from markupsafe import Markup

    return Markup((ASSETS / name).read_text(encoding="utf-8"))
