"""The templates of pages and drawings."""

from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from windtunnel.report.version import version

PACKAGE = Path(__file__).parents[2]
ASSETS = PACKAGE / "report" / "assets"


@lru_cache
def template(name: str) -> Template:
    """Return a template of reports or of the dashboard, by its file's name."""
    return environment().get_template(name)


@lru_cache
def environment() -> Environment:
    """Return the environment of all templates: what they show is escaped unless it is a drawing."""
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
    return made


@lru_cache
def _asset(name: str) -> Markup:
    """Return the text of a style or script to put into a page."""
    return Markup((ASSETS / name).read_text(encoding="utf-8"))
