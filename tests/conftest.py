"""Fixtures that every test may ask for, and how much hypothesis tries."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from effort import FAST
from recorded import REFERENCE

REPOSITORY = Path(__file__).resolve().parents[1]

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--fast`, keep the first case of each quick function."""
    if not config.getoption("--fast"):
        return
    first: dict[str, pytest.Item] = {}
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("engine", "full", "slow")):
            first.setdefault(item.nodeid.partition("[")[0], item)
    kept = {item.nodeid for item in first.values()}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = first.values()


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of recorded reference data (measurements and other outputs); it is not part of the package."""
    if not REFERENCE.is_dir():
        pytest.skip(f"no recorded reference data at {REFERENCE}; name its folder with WINDTUNNEL_REFERENCE")
    return REFERENCE
