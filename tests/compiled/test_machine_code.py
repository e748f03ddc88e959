"""Machine code that is kept for later processes."""

import pytest
from llvmlite import binding

from windtunnel.compiled import machine_code


def test_code_for_a_named_processor_serves_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    own = machine_code.target.__wrapped__()
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "")
    named = machine_code.target.__wrapped__()
    assert binding.get_host_cpu_features().flatten() in own
    assert binding.get_host_cpu_features().flatten() not in named
