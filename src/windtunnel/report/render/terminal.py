"""Reports on a terminal: plain into a pipe, without colour where NO_COLOR is set, at any width."""

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text as Styled

from windtunnel.report.numbers import percent
from windtunnel.report.report import LABEL_WIDTH, Bars, Block, Cell, Facts, OnTerminal, Report, Table, Text

BAR_WIDTH = 24
TEXT_WIDTHS = 12, 8
"""Characters that texts which wrap have at least, and where a table needs more than the terminal's width."""
MOST_ROWS_IN_PARTS = 50
"""Rows up to which a wide table is printed in parts, a choice: the parts of a longer one are too far apart to read."""
_WIDE = 10_000


def show(report: Report) -> None:
    """Print a report to stdout; a table whose numbers need more than the terminal's width is printed in parts; a long
    one takes the width, because rich would else leave columns out.

    Into a pipe or a file nothing is wrapped, so that `grep` finds names whole, unless COLUMNS says how wide it is.
    """
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    given = console.width if console.is_terminal or "COLUMNS" in os.environ else _WIDE
    with console.capture() as printed:
        for part in parts_of(report, given):
            parts = part.renderables if isinstance(part, Group) else (part,)
            console.width = max(
                given, max((each.min_width or 0 for each in parts if isinstance(each, Grid)), default=0)
            )
            console.print(part)
    text = printed.get()
    if not console.is_terminal:
        # rich fills cells up to the width of their column.
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    sys.stdout.write(text)


def parts_of(report: Report, width: int = _WIDE) -> list[RenderableType]:
    """Return what a terminal of a width prints, one part below the other: blocks have an empty line between them."""
    parts: list[RenderableType] = [Styled(report.title, style="bold")] if report.title else []
    parts += [Styled(report.verdict, style="bold")] if report.verdict else []
    parts += _rendered(report.lead, width)
    for section in report.sections:
        heading = section.title
        for part in _rendered(section.blocks, width):
            parts += [""] if parts else []
            parts += [Styled(heading, style="bold")] if heading else []
            parts.append(part)
            heading = ""
    return [*parts, *(f"note: {note}" for note in report.notes)]


def _rendered(blocks: Sequence[Block], width: int) -> Iterator[RenderableType]:
    """Render blocks, without those that only pages show."""
    for block in blocks:
        if isinstance(block, OnTerminal):
            yield from _rendered(block.make(), width)
        elif isinstance(block, str):
            yield block
        elif isinstance(block, Text):
            yield Group(*block.lines)
        elif isinstance(block, Facts):
            yield _facts(block)
        elif isinstance(block, Bars):
            grid = Grid.grid(padding=(0, 2, 0, 0))
            grid.add_column(no_wrap=True, min_width=LABEL_WIDTH)
            grid.add_column(justify="right", no_wrap=True)
            grid.add_column(no_wrap=True)
            for name, share in block.shares.items():
                grid.add_row(name, percent(share), Styled("█" * round(share * BAR_WIDTH), style="cyan"))
            yield grid
        elif isinstance(block, Table):
            *grids, last = _grids(block, width)
            yield from grids
            yield Group(last, *block.notes) if block.notes else last


def _facts(facts: Facts) -> Grid:
    """Render pairs as a grid whose texts wrap beside the labels."""
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", width=facts.width, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in facts.rows:
        grid.add_row(label, value)
    return grid


def _grids(table: Table, width: int) -> Iterator[Grid]:
    """Render a table; where the terminal is too narrow, long texts wrap, and the columns of a table that is still too
    wide stand in several grids, each with the first one, unless it is long."""
    columns = range(len(table.headers))
    lines = [[line for cells in (table.headers, *table.rows) for line in str(cells[i]).split("\n")] for i in columns]
    longest = [max(map(cell_len, column)) for column in lines]
    for text_width in TEXT_WIDTHS:
        needed = [min(longest[i], text_width) if table.is_text(i) else longest[i] for i in columns]
        if sum(needed) + 2 * (len(needed) - 1) <= width:
            break
    groups, room = [[0]], width - needed[0]
    for i in columns[1:]:
        room -= 2 + needed[i]
        if room < 0 and len(groups[-1]) > 1 and len(table.rows) <= MOST_ROWS_IN_PARTS:
            groups.append([0])
            room = width - needed[0] - 2 - needed[i]
        groups[-1].append(i)
    for group in groups:
        grid = Grid(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", show_edge=False)
        grid.min_width = sum(needed[i] for i in group) + 2 * (len(group) - 1)
        for i in group:
            justify: Literal["left", "right"] = "left" if table.is_text(i) else "right"
            grid.add_column(table.headers[i], justify=justify, no_wrap=needed[i] == longest[i], overflow="fold")
        for row in table.rows:
            grid.add_row(*(_cell(row[i]) for i in group))
        yield grid


def _cell(cell: str | Cell) -> str | Styled:
    return cell if isinstance(cell, str) else Styled(cell.text, style="red" if cell.tone == "alert" else "")
