"""Run the notebooks of this folder and keep their outputs: python docs/notebooks/run.py [--check] [NAME.ipynb ...].

With `--check`, nothing is written, and the exit code is 1 where outputs differ. Needs nbclient and ipykernel
(`pip install --group site`).
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
SOURCE = FOLDER.parents[1] / "src"
KEPT = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
"""Metadata of a notebook: the kernel's own would change with its version."""
TIMEOUT_S = 300
"""Of a cell; the first one on a machine compiles the kernels."""


def notebooks() -> list[Path]:
    """Return the notebooks in their order."""
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path) -> nbformat.NotebookNode:
    """Return a notebook with the outputs of a run in an empty folder, without answers of earlier searches."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        paths = {"PYTHONPATH": str(SOURCE), "XDG_CACHE_HOME": f"{folder}/.cache"}
        environment = {"NUMBA_CACHE_DIR": cache} | dict(os.environ) | paths
        client = NotebookClient(
            notebook, timeout=TIMEOUT_S, coalesce_streams=True, resources={"metadata": {"path": folder}}
        )
        client.execute(env=environment)
    notebook.metadata = KEPT
    for cell in notebook.cells:
        cell.metadata = {}
    return notebook


def text(notebook: nbformat.NotebookNode) -> str:
    """Return a notebook as the text of its file."""
    return f"{nbformat.writes(notebook).rstrip()}\n"


def main() -> None:
    """Run the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*", type=Path)
    options = parser.parse_args()
    changed = []
    for path in options.names or notebooks():
        new = text(executed(path))
        if new != path.read_text(encoding="utf-8"):
            changed.append(path.name)
            if not options.check:
                path.write_text(new, encoding="utf-8")
    if changed:
        sys.stderr.write(f"{'outputs differ' if options.check else 'wrote'}: {', '.join(changed)}\n")
    sys.exit(bool(changed) and options.check)


if __name__ == "__main__":
    main()
