"""Every package that windtunnel needs has a licence that its own allows, and CI installs known versions."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / ".ci"
PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|ISC|PSF|0BSD|Zlib|BSL|CC0|CNRI|Unlicense|HPND|MPL|Mozilla Public|Python Software)\b",
    re.IGNORECASE,
)

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="a source distribution has no CI")


def listed(*words: str) -> list[tuple[str, str, str]]:
    command = [sys.executable, str(FOLDER / "licences.py"), *words]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [(line[:32].strip(), line[32:52].strip(), line[52:].strip()) for line in lines]


@pytest.mark.full
def test_every_licence_is_known_and_permissive() -> None:
    packages = listed()
    assert {"numpy", "numba", "click", "hypothesis", "starlette"} <= {name for name, *_ in packages}
    assert [(name, text) for name, _, text in packages if not PERMISSIVE.search(text)] == []


def test_what_every_installation_has_is_locked() -> None:
    lines = (FOLDER / "constraints.txt").read_text(encoding="utf-8").splitlines()
    locked = {name for name, separator, _ in (line.partition("==") for line in lines) if separator}
    assert {name for name, *_ in listed("--runtime")} <= locked
