"""Fixtures of the serving loop's tests."""

from collections.abc import Iterator
from typing import Any

import pytest
from numba import config

from windtunnel.serving import run
from windtunnel.serving.state.tables import PoolTables


@pytest.fixture(scope="module")
def all_features_compiled() -> Iterator[None]:
    """Compile the loop with every engine's scheduler, with windows and with balance, whether a case uses them or not.

    Random cases would otherwise compile up to twelve forms of the loop, 5 s each, for the features that one of their
    pools uses. What a form leaves out is tested where nothing is compiled (`make test-nojit` runs the same cases with
    just those features that they use), and its compilation by the tests that simulate scenarios.
    """
    if config.DISABLE_JIT:
        yield
        return
    pool_tables = run._pool_tables

    def with_all_features(*arguments: Any) -> PoolTables:
        tables = pool_tables(*arguments)
        if tables.batched is None:
            return tables
        return tables._replace(windows=1, vllm_v1=1, sglang=1, balance=1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_pool_tables", with_all_features)
        yield
