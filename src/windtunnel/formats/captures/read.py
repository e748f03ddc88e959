"""Read a profiler's file of any known kind, told by its content: nsys SQLite, ncu CSV, Kineto JSON."""

import gzip
import shutil
import sqlite3
import tempfile
import zlib
from contextlib import closing
from pathlib import Path

from windtunnel.errors import InputError, WindtunnelError, unreadable
from windtunnel.files import write_bytes
from windtunnel.formats.captures.capture import Capture
from windtunnel.formats.captures.kineto_capture import read_kineto_capture
from windtunnel.formats.captures.ncu import REPORT_HINT as NCU_HINT
from windtunnel.formats.captures.ncu import is_ncu, read_ncu
from windtunnel.formats.captures.nsys import MAGIC, read_nsys
from windtunnel.formats.captures.nsys import REPORT_HINT as NSYS_HINT

FORMATS = "nsys SQLite, ncu CSV and Kineto JSON (also .gz) are read"

_REPORTS = {".nsys-rep": NSYS_HINT, ".qdrep": NSYS_HINT, ".qdstrm": NSYS_HINT, ".ncu-rep": NCU_HINT}


def read_capture(path: Path) -> Capture:
    """What a profiler recorded.

    Raises:
        InputError: the file is missing, broken, not exported, or of another program.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder; a profiler's file is needed", FORMATS)
    if path.suffix in _REPORTS and path.exists():
        raise InputError(
            f"{path} is a report that only its own tool opens", _REPORTS[path.suffix].replace("FILE", path.name)
        )
    start = _start_of(path)
    if not start:
        raise InputError(f"{path} is empty", FORMATS)
    if MAGIC.startswith(start[: len(MAGIC)]):
        return read_nsys(path)
    if start.lstrip()[:1] in (b"{", b"["):
        return read_kineto_capture(path)
    if is_ncu(start.decode("utf-8", "replace")):
        return read_ncu(path)
    raise InputError(f"{path} is no capture that is known", FORMATS)


def _start_of(path: Path) -> bytes:
    """The first bytes of a file, unpacked; captures may be larger than the memory."""
    try:
        with path.open("rb") as file:
            start = file.read(4096)
        if not start.startswith(b"\x1f\x8b"):
            return start
        with gzip.open(path) as packed:
            return packed.read(4096)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is a broken gzip file: {error}", "fetch or compress it again") from None
    except OSError as error:
        raise unreadable(path, error) from None


_PRIVATE_ROWS = (
    ("META_DATA_CAPTURE", "name LIKE '%ENVIRONMENT%' OR name LIKE '%USER_NAME' OR name LIKE '%WORKING_DIR'"),
    ("META_DATA_CAPTURE", "name LIKE 'DEVICE_DISPLAY_NAME'"),
    ("META_DATA_EXPORT", "name LIKE '%HOST' OR name LIKE '%USER' OR name LIKE '%PATH%'"),
    ("EXPORT_META_DATA", "name LIKE '%HOST' OR name LIKE '%USER' OR name LIKE '%PATH%'"),
    ("TARGET_INFO_SYSTEM_ENV", "name LIKE '%Environment%' OR name IN ('Hostname', 'TargetInstallDir')"),
    ("PROCESSES", "1"),
)
"""Table -> rows that tell of the machine or of whoever used it: every process, and the whole environment twice."""


def scrub_nsys(path: Path) -> int:
    """Take environment variables, users, hosts, folders and the list of processes out of an exported capture.

    Returns:
        How many rows were taken out. The file changes whole or not at all.

    Raises:
        InputError: it is no capture of Nsight Systems.
        InputError: it cannot be written.
    """
    read_nsys(path)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
            draft = Path(folder) / "draft"
            shutil.copy2(path, draft)
            with closing(sqlite3.connect(draft)) as database:
                removed = _remove_private(database)
                # Deleted rows stay readable in the file until it is written anew.
                database.execute("VACUUM")
            draft.replace(path)
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


def write_kernels(capture: Capture, path: Path) -> None:
    """Write the kernel table with its texts as Parquet; it appears whole or not at all.

    Raises:
        InputError: it cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = pa.BufferOutputStream()
    pq.write_table(capture.to_arrow(), content)
    write_bytes(path, content.getvalue().to_pybytes())
