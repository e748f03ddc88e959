"""Text files: written whole, and never in place of a device."""

import os
import threading
from pathlib import Path

import pytest

from windtunnel import files
from windtunnel.errors import InputError
from windtunnel.files import check_writable, new_files, write_text


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


def test_a_new_folder_appears_with_all_of_its_files(tmp_path: Path) -> None:
    """A command that is killed while it writes leaves no folder that looks like a whole one."""
    folder = tmp_path / "deep" / "run"
    with new_files(folder) as draft:
        (draft / "a").write_text("1")
        (draft / "b").write_text("2")
        number = draft.stat().st_ino
    assert folder.stat().st_ino == number
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]
    assert [path.name for path in folder.parent.iterdir()] == ["run"]
    with new_files(folder) as draft:
        (draft / "b").write_text("3")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a": "1", "b": "3"}
