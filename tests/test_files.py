"""Text files: written whole, and never in place of a device."""

import os
import threading
from pathlib import Path

import pytest

from windtunnel import files
from windtunnel.errors import InputError
from windtunnel.files import check_writable, write_text


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "page")
    reader.join()
    assert (read, pipe.is_fifo()) == (["page"], True)


def test_a_place_that_takes_no_files_is_known_though_its_rights_allow_them() -> None:
    with pytest.raises(InputError, match="/proc is not a folder that you may write to"):
        check_writable(Path("/proc/page.html"))


def test_a_full_disk_is_one_sentence() -> None:
    with pytest.raises(InputError, match="/dev/full cannot be written: No space left on device"):
        write_text(Path("/dev/full"), "page")
    assert Path("/dev/full").is_char_device()


def test_what_no_file_can_be_called_is_no_file(tmp_path: Path) -> None:
    assert files.is_file(Path(__file__))
    assert not files.is_file(tmp_path / ("x" * 300))
    assert not files.is_file(tmp_path)
