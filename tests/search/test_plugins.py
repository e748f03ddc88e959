"""A strategy of one's own: one file, found by name."""

from pathlib import Path

import pytest

from plugin_package import installed_plugin
from spaces_of_search import space
from windtunnel.errors import InputError
from windtunnel.search.store import Store
from windtunnel.search.study import search

pytestmark = pytest.mark.compiled

STRATEGY = """
from windtunnel.search.evaluation.schema import Question

IS_EXHAUSTIVE = False


def evaluate(asker, workload):
    return asker.ask(workload, [asker.space.num_points - 1], Question())
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
