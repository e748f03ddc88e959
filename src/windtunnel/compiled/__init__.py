"""How compiled loops are cached, and what several of them share: heaps, linked lists and an event calendar.

A kernel is a module of functions that numba compiles: numpy arrays, SI floats and int64, no objects. Kernels import
only kernels. Machine code is cached on disk in a folder keyed by the content of all kernels, because numba does not
notice when a callee in another file changes and would go on running the old machine code. A wheel ships machine code of
the usual forms for any processor of its kind (`windtunnel warm --out`), which is taken where a first run would compile.
"""

import hashlib
import os
import platform
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

KERNELS = (
    "compiled/*.py",
    "network/flow/kernel.py",
    "network/flow/rounds.py",
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

SHIPPED = Path(__file__).resolve().parents[1] / "kernels"
"""Where a wheel has machine code, a folder for each kind of machine; a clone has none."""


def kernel_files() -> list[Path]:
    """The source files of all kernels, sorted."""
    package = Path(__file__).resolve().parents[1]
    return sorted(path for pattern in KERNELS for path in package.glob(pattern))


@cache
def shipped_name() -> str:
    """Name of the folder with machine code of exactly these sources for any processor of this machine's kind."""
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in kernel_files())).hexdigest()[:16]
    return f"{sys.platform}-{platform.machine().lower()}-{digest}"


@cache
def cache_dir() -> Path:
    """Where machine code of exactly these sources, made by this version of numba, is kept."""
    sources = [source.read_bytes() for source in kernel_files()]
    numba = find_spec("numba")
    assert numba is not None
    assert numba.origin is not None
    sources.append(Path(numba.origin).with_name("_version.py").read_bytes())
    digest = hashlib.sha256(b"\0".join(sources)).hexdigest()[:16]
    found = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    home = Path(found) if found else Path.home() / ".cache"
    return home / "windtunnel" / "kernels" / f"{sys.implementation.cache_tag}-{digest}"
