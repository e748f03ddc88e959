"""A first look at a request trace, before a scenario is complete: where it is, and whether it may have images."""

from functools import lru_cache
from pathlib import Path

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.files import opened
from windtunnel.workload.schema import Trace

MEDIA = ("images", "videos", "num_images", "image_width", "image_height", "image_id")
"""Columns of images and videos, which have the same names in every layout."""
BEGINNING_BYTES, END_BYTES = 1 << 24, 1 << 16
"""Parts of a file in which its columns are named: JSON in the first rows, Parquet in the last bytes."""


def find_trace(name: str) -> Path:
    """Return the file at the path `name`, or the trace of the catalog where `name` is a bare word that is no file."""
    path = Path(name)
    is_word = path.suffix == "" and path.name == name
    return catalog.find("traces", name) if is_word and not path.exists() else path


def is_json(path: Path) -> bool:
    """Whether a file is of objects, whose keys may differ."""
    return any(ending in path.name.lower() for ending in (".json", ".ndjson"))


def may_have_media(trace: Trace) -> bool:
    """Whether the columns of images or videos are named in a trace; False where it cannot be read, an error later."""
    if trace.media == "leave_out":
        return False
    try:
        path = find_trace(trace.path)
        known = path.stat()
        names = tuple((getattr(trace.columns, key) or key).rpartition(".")[2] for key in MEDIA[:3])
        return path.is_file() and _names_any(path, names, (known.st_mtime_ns, known.st_size))
    except (InputError, OSError, EOFError):
        return False


@lru_cache(maxsize=64)
def _names_any(path: Path, names: tuple[str, ...], state: tuple[int, int]) -> bool:
    """Look for names in a file, once for each `state` of it, its time of change and its size."""
    if path.suffix.lower() == ".zst":
        return True
    with opened(path, BEGINNING_BYTES) as file:
        text = file.read(BEGINNING_BYTES)
    if ".parquet" in path.name.lower():
        with path.open("rb") as file:
            file.seek(max(state[1] - END_BYTES, 0))
            text = file.read()
    elif ".csv" in path.name.lower():
        text = text.partition(b"\n")[0]
    mark = '"' if is_json(path) else ""
    return any(f"{mark}{name}{mark}".encode() in text for name in names)
