"""The frame of every page of the dashboard, and the types of its answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote, urlencode

from windtunnel.report.render.html import Section, body_of
from windtunnel.report.version import version

PAGES = {"": "Runs", "compare": "Compare", "try": "Try", "search": "Search", "catalog": "Catalog"}
"""First part of a page's address -> its name in the menu."""


@dataclass(frozen=True)
class View:
    """A page: its heading, what stands below it as HTML, and what it needs."""

    title: str
    sections: Sequence[Section] = ()
    lead: str = ""
    """HTML, below the heading."""
    scripts: tuple[str, ...] = ()
    """Names in `assets/`."""
    is_live: bool = False
    """Whether the browser reloads the page while it is open."""


@dataclass(frozen=True)
class Download:
    """A file to download."""

    name: str
    kind: str
    body: bytes


Query = Mapping[str, Sequence[str]]
"""Fields of an address or a form."""


def link(*parts: str, **query: str) -> str:
    """Return an address within the dashboard: `link("run", "70b/tp4", page="2")` is `/run/70b/tp4?page=2`."""
    path = "/" + "/".join(quote(part, safe="/") for part in parts)
    return f"{path}?{urlencode(query)}" if query else path


def framed(view: View, address: str, folder: Path) -> str:
    """Return the whole page.

    Args:
        view: what it shows.
        address: its own path, as `/run/a`.
        folder: whose results are shown.
    """
    here = address.strip("/").partition("/")[0]
    here = here if here in PAGES else "try" if here in ("trial", "sweep", "save") else ""
    tabs = "".join(f'<a href="/{name}"{_current(name == here)}>{escape(label)}</a>' for name, label in PAGES.items())
    scripts = "".join(
        f'<script src="/assets/{name}" defer></script>' for name in ("page.js", "dashboard.js", *view.scripts)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(view.title)} - Windtunnel</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="/assets/icon.svg"><link rel="stylesheet" href="/assets/page.css">'
        f'<link rel="stylesheet" href="/assets/dashboard.css">{scripts}</head>\n<body>'
        '<a class="skip" href="#main">skip to the page</a>'
        f'<header><a class="name" href="/">Windtunnel</a><nav>{tabs}</nav>'
        f'<span class="folder" title="{escape(str(folder))}">{escape(folder.name)}/</span>'
        '<button id="theme" type="button" title="light, dark, or as the system says">theme</button></header>\n'
        f'<main id="main"{" data-live" if view.is_live else ""}><h1>{escape(view.title)}</h1>\n{view.lead}\n'
        f"{body_of(view.sections)}</main>\n<footer>windtunnel {escape(version())}</footer></body></html>\n"
    )


def tabs(addresses: Mapping[str, str], here: str) -> str:
    """Return links to pages that belong together; `addresses` is label -> address, and `here` the label of this one."""
    links = (
        f'<a href="{escape(address)}"{_current(label == here)}>{escape(label)}</a>'
        for label, address in addresses.items()
    )
    return f'<nav class="tabs">{"".join(links)}</nav>'


def _current(is_here: bool) -> str:
    return ' aria-current="page"' if is_here else ""


def first(query: Mapping[str, Sequence[str]], name: str, default: str = "") -> str:
    """Return the first value of a field of an address."""
    return query[name][0] if query.get(name) else default


def lines(*texts: str) -> str:
    """Return texts as a block of quiet lines."""
    return '<p class="lead">' + "<br>".join(escape(text) for text in texts if text) + "</p>"


def problem(message: str, hint: str | None) -> str:
    """Return one sentence on what is wrong, and what to do about it."""
    said = f"<p>{escape(hint)}</p>" if hint else ""
    return f'<div class="problem" role="alert"><p><b>{escape(message)}</b></p>{said}</div>'
