"""Remove rows that identify the machine or its user from a capture of Nsight Systems."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from windtunnel.errors import WindtunnelError
from windtunnel.files import draft_of
from windtunnel.formats.captures.nsys import read_nsys

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
        The number of removed rows. The file changes completely or not at all.

    Raises:
        InputError: it is no capture of Nsight Systems.
        WindtunnelError: it cannot be written.
    """
    read_nsys(path)
    try:
        with draft_of(path) as draft:
            shutil.copy2(path, draft)
            with closing(sqlite3.connect(draft)) as database:
                tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
                removed = sum(
                    database.execute(f"DELETE FROM {table} WHERE {where}").rowcount
                    for table, where in _PRIVATE_ROWS
                    if table in tables
                )
                database.commit()
                # Deleted rows stay readable in the file until it is written anew.
                database.execute("VACUUM")
    except (OSError, sqlite3.Error) as error:
        raise WindtunnelError(f"{path} cannot be scrubbed: {error}") from None
    return removed
