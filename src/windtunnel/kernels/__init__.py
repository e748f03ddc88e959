"""The compiled floor: numpy arrays and numba loops, SI floats and int64, no objects and nothing of ours above it.

Compiled code is cached on disk in a folder keyed by the content of these files, because numba does not notice when a
callee in another file changes and would go on running the old machine code.
"""

import hashlib
import os
import platform
from pathlib import Path

import numba


def _cache_dir() -> Path:
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    found = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    home = Path(found) if found else Path.home() / ".cache"
    return home / "windtunnel" / "kernels" / f"py{platform.python_version()}-numba{numba.__version__}-{digest}"


CACHE_DIR = _cache_dir()
"""Where machine code of exactly these sources is kept."""

numba.config.CACHE_DIR = str(CACHE_DIR)


def is_compiled() -> bool:
    """Whether a former run left machine code of these sources on disk (or compilation is switched off)."""
    return bool(numba.config.DISABLE_JIT) or (CACHE_DIR.is_dir() and any(CACHE_DIR.rglob("*.nbi")))
