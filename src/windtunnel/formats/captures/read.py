"""Read a profiler's file of any known kind, told by its content: nsys SQLite, ncu CSV, Kineto JSON."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from windtunnel.errors import InputError, WindtunnelError
from windtunnel.files import draft_of, read_bytes
from windtunnel.formats.captures.capture import Capture
from windtunnel.formats.captures.kineto_capture import read_kineto_capture
from windtunnel.formats.captures.ncu import REPORT_HINT as NCU_HINT
from windtunnel.formats.captures.ncu import is_ncu, read_ncu
from windtunnel.formats.captures.nsys import MAGIC, read_nsys
from windtunnel.formats.captures.nsys import REPORT_HINT as NSYS_HINT

FORMATS = "nsys SQLite, ncu CSV and Kineto JSON (also .gz) are read"

_REPORTS = {".nsys-rep": NSYS_HINT, ".qdrep": NSYS_HINT, ".qdstrm": NSYS_HINT, ".ncu-rep": NCU_HINT}


def read_capture(path: Path) -> Capture:
    """Read a profiler's file as a capture.

    Raises:
        InputError: the file is missing, broken, not exported, or of another program.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder; a profiler's file is needed", FORMATS)
    if path.suffix in _REPORTS and path.exists():
        raise InputError(
            f"{path} is a report that only its own tool opens", _REPORTS[path.suffix].replace("FILE", path.name)
        )
    start = read_bytes(path, limit=4096)  # captures may be larger than the memory
    if not start:
        raise InputError(f"{path} is empty", FORMATS)
    if MAGIC.startswith(start[: len(MAGIC)]):
        return read_nsys(path)
    if start.lstrip()[:1] in (b"{", b"["):
        return read_kineto_capture(path)
    if is_ncu(start.decode("utf-8", "replace")):
        return read_ncu(path)
    raise InputError(f"{path} is no capture that is known", FORMATS)


_PRIVATE_ROWS = (
    ("META_DATA_CAPTURE", "name LIKE '%ENVIRONMENT%' OR name LIKE '%USER_NAME' OR name LIKE '%WORKING_DIR'"),
    ("META_DATA_CAPTURE", "name LIKE 'DEVICE_DISPLAY_NAME'"),
    ("META_DATA_EXPORT", "name LIKE '%HOST' OR name LIKE '%USER' OR name LIKE '%PATH%'"),
    ("EXPORT_META_DATA", "name LIKE '%HOST' OR name LIKE '%USER' OR name LIKE '%PATH%'"),
    ("TARGET_INFO_SYSTEM_ENV", "name LIKE '%Environment%' OR name IN ('Hostname', 'TargetInstallDir')"),
    ("PROCESSES", "1"),
)
"""Table -> rows that identify the machine or its user: every process, and the whole environment twice."""


def scrub_nsys(path: Path) -> int:
    """Remove environment variables, users, hosts, folders and the list of processes from an exported capture.

    Returns:
        The number of removed rows. The file changes whole or not at all.

    Raises:
        InputError: it is no capture of Nsight Systems.
        WindtunnelError: it cannot be written.
    """
    read_nsys(path)
    try:
        with draft_of(path) as draft:
            shutil.copy2(path, draft)
            with closing(sqlite3.connect(draft)) as database:
                removed = _remove_private(database)
                # Deleted rows stay readable in the file until it is written anew.
                database.execute("VACUUM")
    except (OSError, sqlite3.Error) as error:
        raise WindtunnelError(f"{path} cannot be scrubbed: {error}") from None
    return removed


def _remove_private(database: sqlite3.Connection) -> int:
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    removed = 0
    for table, where in _PRIVATE_ROWS:
        if table in tables:
            removed += database.execute(f"DELETE FROM {table} WHERE {where}").rowcount
    database.commit()
    return removed
