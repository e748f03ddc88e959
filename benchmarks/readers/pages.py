"""Tables that a benchmark writes into a page, between two marks."""

from __future__ import annotations

import sys
from pathlib import Path


def write_table(page: Path, name: str, script: str, table: str) -> None:
    """Replace what stands between the marks of `name` in a Markdown page; end the program where it has none."""
    begin, end = f"<!-- {name}, written by benchmarks/{script} -->", f"<!-- end of {name} -->"
    head, mark, rest = page.read_text(encoding="utf-8").partition(begin)
    if not mark or end not in rest:
        sys.exit(f"error: {page} has no marks for {name}\nhint: {begin} ... {end}")
    page.write_text(f"{head}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")
