"""One self-contained HTML page: a title, sections of text, figures and tables; no network, readable light and dark.

Tables sort by a click on a header.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from windtunnel.report.version import version

_STYLE = """
:root { color-scheme: light dark; --line: #8885; --soft: #8881; --quiet: #777; --link: #0072b2; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1180px; padding: 24px 20px 60px; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p { max-width: 78ch; } .lead { color: var(--quiet); } a { color: var(--link); }
.row { display: flex; flex-wrap: wrap; gap: 18px; } figure { margin: 0; } svg { max-width: 100%; height: auto; }
figcaption { font-size: 13px; color: var(--quiet); max-width: 60ch; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; margin: .4rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: 3px 9px; text-align: right; white-space: nowrap; }
th { cursor: pointer; position: sticky; top: 0; background: Canvas; } tr:hover td { background: var(--soft); }
th.text, td.text { text-align: left; white-space: normal; } footer { margin-top: 3rem; color: var(--quiet); }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 1rem 0; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: 8px 14px; min-width: 120px; }
.card b { display: block; font-size: 1.35rem; } .card span { color: var(--quiet); font-size: 13px; }
"""

_SORT = """
document.querySelectorAll("th").forEach(head => head.addEventListener("click", () => {
  const table = head.closest("table"), at = [...head.parentNode.children].indexOf(head);
  const down = head.dataset.down !== "1"; head.dataset.down = down ? "1" : "0";
  const value = row => { const text = row.children[at].innerText.replace(/[,%+s]/g, "");
    return text !== "" && !isNaN(text) ? Number(text) : row.children[at].innerText; };
  [...table.tBodies[0].rows].sort((a, b) => { const x = value(a), y = value(b);
    const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return down ? -order : order; }).forEach(row => table.tBodies[0].append(row)); }));
"""


@dataclass(frozen=True)
class Section:
    """A heading with what stands below it; `body` is HTML."""

    title: str
    body: str


def page(title: str, lead: str, sections: Sequence[Section], script: str = "") -> str:
    """A whole page; `title` and `lead` are text, `script` is JavaScript."""
    body = "\n".join(f"<section><h2>{escape(one.title)}</h2>\n{one.body}\n</section>" for one in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style></head>\n'
        f'<body><h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n{body}\n'
        f"<footer>windtunnel {escape(version())}</footer>\n<script>{_SORT}{script}</script></body></html>\n"
    )


def paragraph(text: str) -> str:
    """Text as a paragraph."""
    return f"<p>{escape(text)}</p>"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table that sorts by its headers; the first `left` columns are texts, the others numbers."""
    head = "".join(f"<th{_kind(index, left)}>{escape(header)}</th>" for index, header in enumerate(headers))
    body = "\n".join(
        "<tr>" + "".join(f"<td{_kind(index, left)}>{escape(cell)}</td>" for index, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _kind(index: int, left: int) -> str:
    return ' class="text"' if index < left else ""


def figures(drawn: Iterable[tuple[str, str]]) -> str:
    """(SVG, caption) pairs side by side, as many as fit."""
    parts = (f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>" for svg, caption in drawn)
    return f'<div class="row">{"".join(parts)}</div>'


def cards(facts: Iterable[tuple[str, str]]) -> str:
    """(value, what it is) pairs as large numbers."""
    parts = (f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in facts)
    return f'<div class="cards">{"".join(parts)}</div>'
