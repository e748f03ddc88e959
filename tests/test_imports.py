"""What may import what: the contracts in pyproject.toml, light imports, and no module whose name says nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "src" / "windtunnel"
HEAVY = {"llvmlite", "numba", "pandas", "pyarrow", "scipy", "sklearn", "torch"}
NOT_FOR_HELP = HEAVY | {"numpy"}
NAMES_THAT_SAY_NOTHING = {"base", "common", "core", "helpers", "manager", "types", "utils"}
VERBS = ["simulate", "explain", "catalog"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )


def modules_after(program: str) -> set[str]:
    """The top-level modules that a new interpreter has imported when `program` has run."""
    print_modules = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = run(sys.executable, "-c", f"{program}\n{print_modules}")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.full
def test_contracts_hold() -> None:
    command = shutil.which("lint-imports", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert command, "import-linter is not installed: make venv"
    done = run(command, "--no-cache", "--no-logo")
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_the_package_is_light() -> None:
    assert modules_after("import windtunnel") & HEAVY == set()


def test_the_public_names_are_completed_before_they_are_imported() -> None:
    program = "import windtunnel; assert {'simulate', 'scenario', 'load'} <= set(dir(windtunnel))"
    assert modules_after(program) & HEAVY == set()


def test_every_public_name_can_be_imported() -> None:
    program = (
        "import windtunnel as wt; [getattr(wt, name) for name in wt.__all__]; assert set(wt.__all__) <= set(dir(wt))"
    )
    modules_after(program)


@pytest.mark.parametrize("arguments", [["--help"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_is_light(arguments: list[str]) -> None:
    program = f"""
import sys
from windtunnel.cli import main
sys.argv[1:] = {arguments!r}
try:
    main()
except SystemExit as end:
    assert not end.code
"""
    assert modules_after(program) & NOT_FOR_HELP == set()


def test_names_say_something() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if path.stem in NAMES_THAT_SAY_NOTHING]
    packages = [path for path in PACKAGE.rglob("*/") if path.name in NAMES_THAT_SAY_NOTHING]
    assert modules + packages == []
