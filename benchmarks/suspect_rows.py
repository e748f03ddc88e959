"""Write the page of suspect rows: `python benchmarks/suspect_rows.py docs/reference/suspect-rows.md`."""

import sys
from pathlib import Path

from windtunnel.report.tables import chosen, suspect_counts, suspect_rows

MARK = "<!-- written by benchmarks/suspect_rows.py -->"
"""Everything after it on the page is replaced."""
COLUMNS = ("device", "engine", "version", "table", "left out", "repaired", "kept", "num_rows")
HEAD = "| device | engine | version | table | left out | repaired | kept | of rows |\n|---|---|---|---|--:|--:|--:|--:|"


def main(page: Path) -> int:
    found = suspect_rows(table for table in chosen() if table.source == "aiconfigurator-core")
    counts = suspect_counts(found)
    total = f"{sum(curve.num_rows for curve in found):,} rows in {len(counts)} tables of {counts[0]['source_version']}."
    lines = [f"| {' | '.join(str(row[name]) for name in COLUMNS)} |" for row in counts]
    head, _, _ = page.read_text(encoding="utf-8").partition(MARK)
    page.write_text("\n".join([f"{head}{MARK}", "", total, "", HEAD, *lines, ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
