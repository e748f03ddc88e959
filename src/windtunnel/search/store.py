"""Store of answers between searches: one SQLite file, keyed by a digest of all that decides an answer.

A damaged entry, a damaged file or a full disk costs time and never an answer: what cannot be read is run again, and
where nothing can be written the search goes on without the file. Each gives one warning.
"""

import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from windtunnel.disk_cache import home
from windtunnel.search.evaluation.schema import Evaluation

SCHEMA = """
create table if not exists evaluations (key text primary key, answer blob not null, checksum text not null);
create table if not exists searches (name text primary key, space text not null, is_done integer not null,
    number integer not null);
create table if not exists search_runs (name text not null, began_at text not null, seconds real not null);
"""
KEYS_AT_ONCE = 500
"""Keys of one query: SQLite takes 999 by default."""

Warn = Callable[[str], None]


def default_path() -> Path:
    """Return the default file of answers, in the user's cache folder."""
    return home() / "search.sqlite"


class Store:
    """Evaluations by key. Holds one connection; only the process that drives a search writes.

    Args:
        path: the file, made where it is missing; None keeps answers in memory only.
        warn: called with what could not be read or written.
        is_read_only: the file stays as it is, while a search may be writing it.
    """

    def __init__(self, path: Path | None, warn: Warn, is_read_only: bool = False) -> None:
        self.path = path
        self.warn = warn
        self.is_read_only = is_read_only
        self.known: dict[str, Evaluation] = {}
        self.run: tuple[str, str] | None = None
        """Name of the search that runs, and when it began, in UTC."""
        self.began_s = 0.0
        self.connection = None if path is None else self._opened(path)

    def _opened(self, path: Path) -> sqlite3.Connection | None:
        try:
            if self.is_read_only:
                address = f"{path.absolute().as_uri()}?mode=ro"
                return sqlite3.connect(address, uri=True, timeout=5.0, check_same_thread=False)
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, timeout=30.0, check_same_thread=False)
            connection.executescript(SCHEMA)
        except (sqlite3.Error, OSError) as error:
            self.warn(f"{path} cannot be used ({error}): answers are not kept this time; delete it to begin anew")
            return None
        return connection

    def find(self, keys: Sequence[str]) -> dict[str, Evaluation]:
        """Return the known answers, by key."""
        answers = {key: self.known[key] for key in keys if key in self.known}
        missing = [key for key in keys if key not in answers]
        damaged = 0
        for first in range(0, len(missing), KEYS_AT_ONCE):
            batch = missing[first : first + KEYS_AT_ONCE]
            marks = ",".join("?" * len(batch))
            query = f"select key, answer, checksum from evaluations where key in ({marks})"
            for key, answer, checksum in self._select(query, batch):
                evaluation = _read(answer, checksum)
                if evaluation is None:
                    damaged += 1
                else:
                    answers[key] = self.known[key] = evaluation
        if damaged:
            self.warn(f"{damaged} damaged {'entry' if damaged == 1 else 'entries'} in {self.path}: run again")
        return answers

    def _select(self, query: str, keys: Sequence[str] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query; none without a file, or where it cannot be read."""
        if self.connection is None:
            return []
        try:
            return self.connection.execute(query, keys).fetchall()
        except sqlite3.Error as error:
            self._give_up("read", error)
            return []

    def add(self, answers: Mapping[str, Evaluation]) -> None:
        """Store answers, all or none of them."""
        self.known.update(answers)
        encoded = {key: msgspec.json.encode(evaluation) for key, evaluation in answers.items()}
        rows = [(key, answer, _checksum(answer)) for key, answer in encoded.items()]
        self._write("insert or replace into evaluations values (?, ?, ?)", rows)
        self._note_time()

    def begin(self, name: str, space: str) -> None:
        """Note that a search has begun, so that `unfinished` finds it."""
        number = "(select coalesce(max(number), 0) + 1 from searches)"
        self._write(f"insert or replace into searches values (?, ?, 0, {number})", [(name, space)])
        self.run, self.began_s = (name, datetime.now(UTC).isoformat(" ", "microseconds")), time.monotonic()
        self._write("insert into search_runs values (?, ?, 0)", [self.run])

    def _note_time(self) -> None:
        """Store how long the search has run by now: what is killed has its time up to the last answer."""
        if self.run is not None:
            row = (time.monotonic() - self.began_s, *self.run)
            self._write("update search_runs set seconds = ? where name = ? and began_at = ?", [row])

    def finish(self, name: str) -> None:
        self._note_time()
        self._write("update searches set is_done = 1 where name = ?", [(name,)])

    def drop(self, name: str) -> None:
        """Delete a search that was refused: there is nothing to resume."""
        for table in ("searches", "search_runs"):
            self._write(f"delete from {table} where name = ?", [(name,)])

    def is_finished(self, name: str) -> bool:
        """Whether the same search was done before, so that its answers are likely to be here."""
        return any(is_done for (is_done,) in self._select("select is_done from searches where name = ?", (name,)))

    def unfinished(self) -> str | None:
        """Return the space of the last search that began and is not done."""
        rows = self._select("select space from searches where is_done = 0 order by number desc limit 1")
        return str(rows[0][0]) if rows else None

    def runs_of(self, space: str) -> list[tuple[str, float]]:
        """Return (beginning in UTC, seconds until its last answer) of every run of a space's search, in order."""
        query = "select began_at, seconds from search_runs join searches using (name) where space = ? order by began_at"
        return [(str(began_at), float(seconds)) for began_at, seconds in self._select(query, (space,))]

    def _write(self, statement: str, rows: Iterable[tuple[str | bytes | float, ...]]) -> None:
        if self.connection is None:
            return
        try:
            with self.connection:
                self.connection.executemany(statement, rows)
        except sqlite3.Error as error:
            self._give_up("written", error)

    def _give_up(self, what: str, error: sqlite3.Error) -> None:
        self.warn(f"{self.path} cannot be {what} ({error}): the search goes on, but its answers are not kept")
        self.close()

    def close(self) -> None:
        if self.connection is not None:
            connection, self.connection = self.connection, None
            connection.close()


def _checksum(answer: bytes) -> str:
    return hashlib.sha256(answer).hexdigest()[:16]


def _read(answer: object, checksum: object) -> Evaluation | None:
    """Decode an evaluation; None where the entry is damaged."""
    if not isinstance(answer, bytes) or _checksum(answer) != checksum:
        return None
    try:
        return msgspec.json.decode(answer, type=Evaluation)
    except msgspec.MsgspecError:
        return None
