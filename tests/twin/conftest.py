"""Twins of a small deployment."""

import pytest

from live_twins import scenario_of
from windtunnel.twin.server import TwinApp
from windtunnel.twin.start import twin_app


@pytest.fixture
def app() -> TwinApp:
    """Return a twin that answers as fast as it can."""
    return twin_app(scenario_of({}), None, names=("llama", "lora-a"), max_requests=512)
