"""Read a profiler's file of any known kind, told by its content."""

from pathlib import Path

from windtunnel.formats.captures.capture import Capture
from windtunnel.formats.recognise import find_format


def read_capture(path: Path) -> Capture:
    """Read a profiler's file as a capture.

    Raises:
        InputError: the file is missing, broken, not exported, or of another program.
    """
    capture: Capture = find_format(path, "capture").read(path)
    return capture
