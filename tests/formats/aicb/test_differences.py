"""The page of differences is what its script prints."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


def test_the_page_is_what_the_script_prints() -> None:
    script = REPOSITORY / "benchmarks" / "aicb_differences.py"
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    page = (REPOSITORY / "docs" / "reference" / "aicb-differences.md").read_text()
    assert printed.stdout == page, "python benchmarks/aicb_differences.py > docs/reference/aicb-differences.md"
