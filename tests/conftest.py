"""Fixtures that every test may ask for, how much hypothesis tries, and how test processes share the cores."""

import gc
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, is_hypothesis_test, seed, settings

from effort import FAST
from plain_records import read_by_name
from reference import REFERENCE

REPOSITORY = Path(__file__).resolve().parents[1]

# Every core has a test process of its own. Threads of scikit-learn and torch that wait for one another in a busy loop
# took 50 CPU seconds for fits of 0.2.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Models that somebody added to the catalog of this machine's user are not those of the tests.
os.environ["XDG_DATA_HOME"] = str(Path(tempfile.gettempdir()) / "windtunnel-tests-without-data")

# Compiling a loop makes a million objects that stay: looking through them for garbage took 6 to 10% of it.
gc.set_threshold(100_000, 20, 100)

read_by_name()

# A failing example must be the same on every machine, and the first example pays for compilation. Explaining a failure
# traces every line of the oracles: on a scenario of thousands of steps it took longer than the whole test run.
PHASES = tuple(phase for phase in Phase if phase is not Phase.explain)
SLOW = [HealthCheck.too_slow]
settings.register_profile("ci", derandomize=True, deadline=None, phases=PHASES, suppress_health_check=SLOW)
settings.register_profile("dev", deadline=None, phases=PHASES, suppress_health_check=SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="one case of every test that is not slow; few random examples")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fast"):
        os.environ[FAST] = "1"


@pytest.hookimpl(trylast=True)  # halves are those of the tests that -m leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--fast`, keep the first case of each quick function; else reorder.

    What is tried compiled and interpreted draws other cases in each, unless the profile `dev` draws others each time.
    """
    if os.environ.get("NUMBA_DISABLE_JIT") == "1" and os.environ.get("HYPOTHESIS_PROFILE", "ci") == "ci":
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                seed(1)(item.obj)
    if not config.getoption("--fast"):
        items[:] = longest_first(items)
        return
    first: dict[str, pytest.Item] = {}
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("engine", "full", "slow")):
            first.setdefault(item.nodeid.partition("[")[0], item)
    kept = {item.nodeid for item in first.values()}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = first.values()


def longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Order tests so that each half of them, with which one of two workers begins, starts with tests that compile long.

    Random cases of pools share forms of the loop, which the other worker must not compile at the same time.
    """
    long = [item for item in items if item.get_closest_marker("loops")]
    if not long:
        return items
    rest = [item for item in items if not item.get_closest_marker("loops")]
    left = [item for item in long if "pools" in item.get_closest_marker("loops").args]
    right = [item for item in long if item not in left]
    middle = max(len(items) // 2 - len(left), 0)
    return [*left, *rest[:middle], *right, *rest[middle:]]


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of recorded reference data (measurements and other outputs); it is not part of the package."""
    if not REFERENCE.is_dir():
        pytest.skip(f"no recorded reference data at {REFERENCE}; name its folder with WINDTUNNEL_REFERENCE")
    return REFERENCE
