"""Run shell commands as a reader would, and compare what they print with what a page says that they print.

A plain `windtunnel` command runs in this process, which has the libraries and the compiled loops at hand. bash runs the
others: with pipes, variables, other programs, modules of the reader's, or verbs that start processes.
"""

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest.mock import patch

from windtunnel import cli

TIMEOUT_S = 180
"""Of one command; the first one on a machine compiles the kernels."""

_SOURCE = Path(__file__).resolve().parents[1] / "src"
_CHECKER = doctest.OutputChecker()
_SHELL = re.compile(r"[|&;<>$`*?~#(){}!]")
"""What may mean something to bash, in quotes or not."""
_START_PROCESSES = ("bench", "dashboard", "lab", "profile", "search")


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The finished `command`, run in `folder`: here, or by bash with this interpreter's `windtunnel` first on PATH."""
    words = [] if _SHELL.search(command) else shlex.split(command.replace("\\\n", " "))
    if words == ["pip", "install", "."]:
        _install(folder)
        return subprocess.CompletedProcess(words, 0, "", "")
    if words[:1] == ["windtunnel"] and words[1] not in _START_PROCESSES and not any(folder.glob("*.py")):
        return _run_here(words, folder)
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=_environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=TIMEOUT_S,
        check=False,
    )


def _run_here(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    with (
        patch.dict(os.environ, _look(folder)),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
        code = cli.run(words[1:])
    return subprocess.CompletedProcess(words, code, stdout.getvalue(), stderr.getvalue())


def matches(expected: str, actual: str) -> bool:
    """Whether `actual` is `expected`, where `...` stands for anything and space at the end of a line does not count."""
    return _CHECKER.check_output(_plain(expected), _plain(actual), doctest.ELLIPSIS)


def difference(expected: str, actual: str) -> str:
    """Both texts for a failed test's message."""
    return f"--- expected\n{_plain(expected)}--- printed\n{_plain(actual)}"


def _plain(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())


def _install(folder: Path) -> None:
    """Do what of `pip install .` commands notice: entry points are where Python looks, without another environment."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))


def _environment(folder: Path) -> dict[str, str]:
    installed = Path(sys.executable).parent
    return os.environ | {
        "PATH": os.pathsep.join([str(installed), str(_commands_from_source(folder)), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(_SOURCE), *([str(folder)] if any(folder.glob("*.dist-info")) else [])]),
        "PYTHONUTF8": "1",
        **_look(folder),
    }


def _look(folder: Path) -> dict[str, str]:
    """How commands print, and whose catalog they see: the reader's, which begins empty."""
    return {
        "COLUMNS": "120",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "XDG_DATA_HOME": str(folder.parent / f"{folder.name}-data"),
    }


def _commands_from_source(folder: Path) -> Path:
    """A folder beside `folder` with the `windtunnel` command, for an interpreter that does not have it installed."""
    commands = folder.parent / f"{folder.name}-bin"
    commands.mkdir(exist_ok=True)
    command = commands / "windtunnel"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m windtunnel "$@"\n')
    command.chmod(0o755)
    return commands
