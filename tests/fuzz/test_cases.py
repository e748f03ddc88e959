"""Inputs that were answered wrongly once: tests/cases/*.yaml, replayed.

A line of a file has a name, the seed (fuzz/seeds.yaml), its edits, and words that the answer has: in the error, or on
stdout where the input is good.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fuzz import answers, night
from fuzz.inputs import Edit, edited, seeds

FOLDER = Path(__file__).resolve().parents[1] / "cases"
CASES = {
    f"{path.stem}: {case['name']}": case
    for path in sorted(FOLDER.glob("*.yaml"))
    for case in yaml.safe_load(path.read_text("utf-8"))
}


@pytest.mark.interpreted
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_is_answered(case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in night.SURROUNDINGS.items():
        monkeypatch.setenv(name, value)
    edits = [Edit(kind, tuple(place), *value) for kind, place, *value in case["edits"]]
    tree = edited(seeds()[case["seed"]], edits)
    work, results = tmp_path / "work", tmp_path / "results"
    work.mkdir()
    results.mkdir()
    if "http" in tree:
        _, text = answers.ask(night.served(results), tree)
    elif "results" in tree:
        answers.ask_results(tree, work)
        text = case["says"]
    else:
        answer = answers.run_command(tree, work)
        answers.judge(tree, answer)
        text = answer.stderr if answer.code else answer.stdout + answer.stderr
    assert case["says"] in " ".join(text.split())
