"""Searches seen from outside, while they run or later: the answers that their store holds."""

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from windtunnel.errors import InputError
from windtunnel.search.asker import Count
from windtunnel.search.evaluation.evaluate import Evaluator
from windtunnel.search.evaluation.schema import Evaluation, Question
from windtunnel.search.space.space import Space, workload_names
from windtunnel.search.store import Store
from windtunnel.search.study import SearchOutcome, Study, best_first
from windtunnel.units import format_count

MOST_POINTS = 20_000
"""Largest space that is watched; a key takes a fraction of a millisecond."""


@dataclass(frozen=True)
class Kept:
    """A search as its store records it."""

    name: str
    """Digest of the space."""
    space: Space
    is_done: bool
    number: int
    """Position among the searches of the store in the order in which they began, from 1."""


def kept_searches(path: Path) -> list[Kept]:
    """Read the searches of a store, the last that began first; InputError where it is none, or cannot be read."""
    try:
        with sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0) as connection:
            query = "select name, space, is_done, number from searches order by number desc"
            rows = connection.execute(query).fetchall()
        connection.close()
    except sqlite3.Error as error:
        raise InputError(f"{path.name} is no store of searches ({error})") from None
    searches = []
    for name, text, is_done, number in rows:
        try:
            searches.append(Kept(str(name), msgspec.json.decode(text, type=Space), bool(is_done), int(number)))
        except msgspec.MsgspecError:
            continue  # written by another version of windtunnel; this one cannot resume it either
    return searches


class Watched:
    """A space with its answers' keys, to read a store repeatedly; InputError for more than `MOST_POINTS` points."""

    def __init__(self, space: Space) -> None:
        if space.num_points > MOST_POINTS:
            raise InputError(f"the space has {format_count(space.num_points, 'point')}; {MOST_POINTS:,} can be watched")
        self.space = space
        self.refused: dict[str | None, dict[int, Evaluation]] = {}
        self.keys: dict[str | None, dict[int, list[str]]] = {}
        """Workload -> point -> keys of its answers, the one that counts first: with lengthened streams."""
        evaluator = Evaluator(space)
        for workload in workload_names(space):
            refused, keys = self.refused.setdefault(workload, {}), self.keys.setdefault(workload, {})
            for index in range(space.num_points):
                try:
                    questions = Question(lengthens=True), Question()
                    keys[index] = [evaluator.key(index, workload, question) for question in questions]
                except InputError as error:
                    refused[index] = Evaluation(refused=error.message)

    def study(self, path: Path) -> Study:
        """Read the answers that the store at `path` has by now, without the finalists' further streams."""
        store = Store(path, lambda _: None, is_read_only=True)
        try:
            wanted = (key for keys in self.keys.values() for both in keys.values() for key in both)
            return self.study_of(store.find(list(dict.fromkeys(wanted))))
        finally:
            store.close()

    def study_of(self, known: Mapping[str, Evaluation]) -> Study:
        """Return the study of the answers that are known by now, by key."""
        outcomes = []
        for workload, keys in self.keys.items():
            best = {index: next((key for key in both if key in known), None) for index, both in keys.items()}
            answers = self.refused[workload] | {index: known[key] for index, key in best.items() if key is not None}
            outcomes.append(SearchOutcome(workload, answers, {}, best_first(answers, self.space.objective)))
        return Study(self.space, outcomes, Count())
