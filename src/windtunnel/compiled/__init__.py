"""How compiled loops are cached, and what several of them share: heaps, linked lists and an event calendar.

A kernel is a module of functions that numba compiles: numpy arrays, SI floats and int64, no objects. Kernels import
only kernels. Machine code is cached on disk in a folder keyed by the content of all kernels, because numba does not
notice when a callee in another file changes and would go on running the old machine code.
"""

import hashlib
import os
import platform
from pathlib import Path

import numba

KERNELS = (
    "compiled/*.py",
    "network/flow/kernel.py",
    "network/packet/kernel/*.py",
    "network/routing.py",
    "serving/clients.py",
    "serving/cluster/*.py",
    "serving/codes.py",
    "serving/engines/*/balance.py",
    "serving/engines/*/scheduler.py",
    "serving/kv/*.py",
    "serving/loop/*.py",
    "serving/per_request/*.py",
    "serving/schedulers/*.py",
    "serving/state/*.py",
    "training/pipeline/actions.py",
    "training/pipeline/kernel.py",
)
"""Where kernels are, as patterns below the package; the import contracts name the same places."""


def kernel_files() -> list[Path]:
    """The source files of all kernels, sorted."""
    package = Path(__file__).resolve().parents[1]
    return sorted(path for pattern in KERNELS for path in package.glob(pattern))


def _cache_dir() -> Path:
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in kernel_files())).hexdigest()[:16]
    found = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    home = Path(found) if found else Path.home() / ".cache"
    return home / "windtunnel" / "kernels" / f"py{platform.python_version()}-numba{numba.__version__}-{digest}"


CACHE_DIR = _cache_dir()
"""Where machine code of exactly these sources is kept."""

numba.config.CACHE_DIR = str(CACHE_DIR)


def is_compiled() -> bool:
    """Whether a former run left machine code of these sources on disk (or compilation is switched off)."""
    return bool(numba.config.DISABLE_JIT) or (CACHE_DIR.is_dir() and any(CACHE_DIR.rglob("*.nbi")))
