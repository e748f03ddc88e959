"""A strategy and an executor of one's own: one file each, found by name."""

from pathlib import Path

import pytest

from plugin_package import installed_plugin
from spaces_of_search import space
from windtunnel.errors import InputError
from windtunnel.search.store import Store
from windtunnel.search.study import search
from windtunnel.search.workers import Means

pytestmark = pytest.mark.compiled

STRATEGY = """
from windtunnel.search.evaluation.schema import Question

IS_EXHAUSTIVE = False


def evaluate(asker, workload):
    return asker.ask(workload, [asker.space.num_points - 1], Question())
"""

EXECUTOR = """
from contextlib import contextmanager

from windtunnel.search.executors import here

calls = []


@contextmanager
def start(space, means, at_once):
    calls.append(means.num_workers)
    with here.start(space, means, at_once) as run:
        yield run
"""


def store() -> Store:
    return Store(None, pytest.fail)


def test_a_strategy_is_one_file(tmp_path: Path) -> None:
    with installed_plugin(tmp_path, "windtunnel.strategies", "last_only", STRATEGY) as files:
        study = search(space({"tp": [1, 2]}, strategy="last_only", finalist_seeds=1), store())
    assert list(study.outcomes[0].evaluations) == [1]
    assert len(files) == 1
    with pytest.raises(InputError, match=r"\$\.strategy is 'last_only', which is not known"):
        space({"tp": [1, 2]}, strategy="last_only")


def test_an_executor_is_one_file(tmp_path: Path) -> None:
    grid = space({"tp": [1, 2]}, finalist_seeds=1)
    with installed_plugin(tmp_path, "windtunnel.executors", "counted", EXECUTOR) as files:
        study = search(grid, store(), Means("counted", 7))
        import plugin_counted  # type: ignore[import-not-found]

        assert plugin_counted.calls == [7]
    assert study.outcomes[0].evaluations == search(grid, store()).outcomes[0].evaluations
    assert len(files) == 1
