"""The newcomer's tasks stay short, and their commands answer."""

import os
from pathlib import Path

import pytest

import newcomer


def test_each_task_takes_few_commands() -> None:
    assert len(newcomer.TASKS) == 10
    assert all(1 <= len(task.commands) <= newcomer.MOST_COMMANDS for task in newcomer.TASKS.values())


@pytest.mark.full
@pytest.mark.compiled
@pytest.mark.parametrize("name", ["check", "trace", "config"])
def test_a_task_is_answered_in_time(name: str) -> None:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    assert newcomer.seconds_of(newcomer.TASKS[name], home)[0] < newcomer.MOST_S


def test_a_missing_answer_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 2"):
        newcomer.seconds_of(newcomer.Task("", ["windtunnel simulate --rat 1"], ""), tmp_path)
    with pytest.raises(RuntimeError, match="'nowhere' is not in the answer"):
        newcomer.seconds_of(newcomer.Task("", ["windtunnel --version"], "nowhere"), tmp_path)
