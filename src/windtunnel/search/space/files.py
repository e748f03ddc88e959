"""Digest the files that a scenario or job names: answers are kept for the content of files, not for their names."""

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def files_digest(raw: Any) -> bytes:
    """Digest the files that `raw` (builtins of a schema) names, the `folder`s, and the modules of `module:function`."""
    digest = hashlib.sha256()
    for path in _files_of(raw, ""):
        digest.update(f"{path}\0".encode())
        digest.update(path.read_bytes())
    return digest.digest()


def _files_of(raw: Any, name: str) -> Iterator[Path]:
    if isinstance(raw, dict):
        for key, value in raw.items():
            yield from _files_of(value, str(key))
    elif isinstance(raw, list | tuple):
        for value in raw:
            yield from _files_of(value, name)
    elif isinstance(raw, str) and raw:
        path = Path(raw)
        if name == "folder" and path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.is_file())
        elif path.is_file():
            yield path
        elif ":" in raw:
            yield from _module_file(raw.partition(":")[0])


def _module_file(name: str) -> Iterator[Path]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return
    if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
        yield Path(spec.origin)
