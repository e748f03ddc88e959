"""Run shell commands as a reader would, and compare what they print with what a page says that they print."""

import doctest
import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 180
"""Of one command; the first one on a machine compiles the kernels."""

_SOURCE = Path(__file__).resolve().parents[1] / "src"
_CHECKER = doctest.OutputChecker()


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The finished `command`, run by bash in `folder` with this interpreter's `windtunnel` first on PATH."""
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


def matches(expected: str, actual: str) -> bool:
    """Whether `actual` is `expected`, where `...` stands for anything and space at the end of a line does not count."""
    return _CHECKER.check_output(_plain(expected), _plain(actual), doctest.ELLIPSIS)


def difference(expected: str, actual: str) -> str:
    """Both texts for a failed test's message."""
    return f"--- expected\n{_plain(expected)}--- printed\n{_plain(actual)}"


def _plain(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())


def _environment(folder: Path) -> dict[str, str]:
    installed = Path(sys.executable).parent
    return os.environ | {
        "PATH": os.pathsep.join([str(installed), str(_commands_from_source(folder)), os.environ["PATH"]]),
        "PYTHONPATH": str(_SOURCE),
        "PYTHONUTF8": "1",
        "COLUMNS": "120",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }


def _commands_from_source(folder: Path) -> Path:
    """A folder beside `folder` with the `windtunnel` command, for an interpreter that does not have it installed."""
    commands = folder.parent / f"{folder.name}-bin"
    commands.mkdir(exist_ok=True)
    command = commands / "windtunnel"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m windtunnel "$@"\n')
    command.chmod(0o755)
    return commands
