"""Tables and numbers on a terminal: plain into a pipe, without colour where NO_COLOR is set, at any width."""

import os
import sys
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from windtunnel.model.precision import Precision
from windtunnel.units import format_seconds

BAR_WIDTH = 24
LABEL_WIDTH = 14
LEAST_TEXT_WIDTH = 12
_WIDE = 10_000


def show(*parts: RenderableType) -> None:
    """Print `parts` to stdout, one below the other; a table whose numbers need more than the terminal's width takes it,
    because rich would else leave columns out.

    Into a pipe or a file nothing is wrapped, so that `grep` finds names whole, unless COLUMNS says how wide it is.
    """
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    given = console.width if console.is_terminal or "COLUMNS" in os.environ else _WIDE
    with console.capture() as printed:
        for part in parts:
            console.width = max(given, _least_width(part))
            console.print(part)
    text = printed.get()
    if not console.is_terminal:
        # rich fills cells up to the width of their column.
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    sys.stdout.write(text)


def _least_width(part: RenderableType) -> int:
    """Return the least width that loses nothing: for tables all numbers and the beginnings of texts."""
    if isinstance(part, Group):
        return max(map(_least_width, part.renderables), default=0)
    if not isinstance(part, Table) or not part.show_header:
        return 0
    console = Console(width=_WIDE)
    total = 0
    for column in part.columns:
        cells = [Measurement.get(console, console.options, cell) for cell in (column.header, *column.cells)]
        longest = max(cell.maximum for cell in cells)
        total += longest if column.no_wrap else min(longest, LEAST_TEXT_WIDTH)
    return total + 2 * len(part.columns) - 1


def title(text: str) -> Text:
    """Return a section's title."""
    return Text(text, style="bold")


def grid(rows: Iterable[tuple[str, str]], label_width: int = LABEL_WIDTH) -> Table:
    """Return (label, text) pairs as a table whose texts wrap beside the labels."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", width=label_width, no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, value)
    return table


def columns(headers: Sequence[str], rows: Iterable[Sequence[str | Text]], left: int = 1, right: int = 0) -> Table:
    """Return a table with a line below its headers; the first `left` and the last `right` columns are texts, the others
    are numbers.

    Where the terminal is too narrow, texts wrap; numbers and short texts do not.
    """
    rows = list(rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", show_edge=False)
    for index, header in enumerate(headers):
        is_text = index < left or index >= len(headers) - right
        longest = max(len(str(cells[index])) for cells in (headers, *rows))
        wraps = is_text and longest > LEAST_TEXT_WIDTH
        table.add_column(header, justify="left" if is_text else "right", no_wrap=not wraps, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def bars(shares: dict[str, float]) -> Table:
    """Return shares as percentages with a bar each."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=LABEL_WIDTH)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, share in shares.items():
        table.add_row(name, percent(share), Text("█" * round(share * BAR_WIDTH), style="cyan"))
    return table


def percent(share: float) -> str:
    """Return a ratio as a percentage with three significant digits at most."""
    return f"{share:.0%}" if share >= 0.9995 else f"{share:.1%}"


def duration(seconds: float) -> str:
    """Return a duration for people: `188 s`, `27.2 min`, `8.08 h`."""
    if seconds >= 3600:
        return f"{number(seconds / 3600)} h"
    return f"{number(seconds / 60)} min" if seconds >= 600 else format_seconds(seconds)


def number(value: float) -> str:
    """Return a count or a rate for people: `3,486`, `55.9`, `0.0312`."""
    return f"{value:,.0f}" if value == 0 or abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")


def formats(precision: Precision) -> str:
    """Return the formats of a deployed model in a few words: `fp8 weights, bf16 KV cache`."""
    words = [f"{precision.weights} weights"]
    if precision.experts_format != precision.weights:
        words.append(f"{precision.experts_format} experts")
    if precision.attention_format != precision.weights:
        words.append(f"{precision.attention_format} attention")
    return ", ".join([*words, f"{precision.kv_cache} KV cache"])


def span_text(low: str, high: str) -> str:
    """Join `43.4 ms` and `101 ms` to `43.4-101 ms`; both units where they differ."""
    number_of, _, unit = low.partition(" ")
    return f"{number_of}\u2013{high}" if unit and unit == high.partition(" ")[2] else f"{low}\u2013{high}"
