"""NVIDIA's own `nsys stats`, where it is installed, against what is kept of its output and so against our sums.

It needs no GPU: Debian has it in non-free (`nsight-systems` 2023.4.4 in trixie). Name it with WINDTUNNEL_NSYS, or have
`nsys` on PATH; other versions name and order their columns otherwise.
"""

import csv
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import nsys_report

NSYS = os.environ.get("WINDTUNNEL_NSYS") or shutil.which("nsys")
STATS = Path(__file__).parent / "nsys_stats"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not NSYS, reason="Nsight Systems is not installed")]


@pytest.mark.parametrize("report", sorted(path.stem for path in STATS.glob("*.csv")))
def test_nsys_prints_what_is_kept(tmp_path: Path, reference: Path, report: str) -> None:
    database = tmp_path / "s.sqlite"
    nsys_report.write_report(
        database, (reference / "profiler" / "nsys_schema_2023.4.4.sql").read_text(encoding="utf-8")
    )
    assert NSYS is not None
    command = [NSYS, "stats", "--report", report, "--format", "csv", "--quiet", "--force-export=false", str(database)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    lines = done.stdout.splitlines()
    with (STATS / f"{report}.csv").open(encoding="utf-8", newline="") as file:
        expected = list(csv.reader(file))
    start = next(number for number, line in enumerate(lines) if line.startswith(expected[0][0]))
    assert [row for row in csv.reader(lines[start:]) if row] == expected
