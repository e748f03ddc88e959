"""A search seen from outside shows what its store has answered, and leaves the store as it is."""

import sqlite3
from pathlib import Path

import msgspec
import pytest

from spaces_of_search import space
from windtunnel.errors import InputError
from windtunnel.search.store import Store
from windtunnel.search.study import Watched, kept_searches, search

SMALL = {"tp": [1, 3], "max_num_seqs": [16, 256]}


@pytest.mark.full
def test_half_a_search_is_half_the_answers(tmp_path: Path) -> None:
    path = tmp_path / "kept.sqlite"
    searched = space(SMALL, finalist_seeds=1)
    complete = search(searched, Store(path, print)).outcomes[0]
    (kept,) = kept_searches(path)
    assert (kept.space, kept.is_done) == (searched, True)
    watched = Watched(searched)
    outcome = watched.study(path).outcomes[0]
    assert (outcome.evaluations, outcome.ranking) == (complete.evaluations, complete.ranking)
    with sqlite3.connect(path) as connection:
        keys = [(key,) for key in watched.keys[None][complete.ranking[0]]]
        connection.executemany("delete from evaluations where key = ?", keys)
    connection.close()
    before = path.read_bytes()
    outcome = watched.study(path).outcomes[0]
    assert outcome.ranking == complete.ranking[1:]
    assert set(outcome.refusals) == set(complete.refusals)
    assert path.read_bytes() == before


def test_an_unfinished_search_is_listed_as_one(tmp_path: Path) -> None:
    store = Store(tmp_path / "kept.sqlite", print)
    store.begin("digest", msgspec.json.encode(space(SMALL)).decode())
    store.close()
    (kept,) = kept_searches(tmp_path / "kept.sqlite")
    assert (kept.name, kept.is_done, kept.number) == ("digest", False, 1)
    outcome = Watched(kept.space).study(tmp_path / "kept.sqlite").outcomes[0]
    assert outcome.ranking == []


@pytest.mark.parametrize("content", [None, b"", b"not a database at all"])
def test_what_is_no_store_is_said_and_not_made(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "other.sqlite"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match="no store of searches"):
        kept_searches(path)
    assert path.exists() == (content is not None)


def test_a_space_too_large_to_watch_is_said() -> None:
    with pytest.raises(InputError, match="can be watched"):
        Watched(space({"max_num_seqs": list(range(1, 20_002))}))
