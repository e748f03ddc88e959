import errno
import traceback
from pathlib import Path

import pytest

from windtunnel.errors import (
    InputError,
    MissingExtraError,
    WindtunnelError,
    did_you_mean,
    missing_file,
    unreadable,
    unwritable,
)

MODELS = ["meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-8B"]


def test_the_nearest_word_whatever_the_case() -> None:
    assert did_you_mean("H100-sxm", ["h100_sxm", "t4"]) == "did you mean h100_sxm?"


def test_a_name_without_its_organisation() -> None:
    hint = did_you_mean("qwen3-8b", MODELS)
    assert hint is not None
    assert "Qwen/Qwen3-8B" in hint


def test_several_near_words_are_joined() -> None:
    hint = did_you_mean("meta-llama/Llama-3.1-7B", MODELS)
    assert hint is not None
    assert " or " in hint


def test_nothing_near_gives_the_fallback() -> None:
    assert did_you_mean("zzzz", MODELS) is None
    assert did_you_mean("zzzz", MODELS, "look at the list") == "look at the list"
    assert did_you_mean("zzzz", []) is None


@pytest.mark.parametrize(("error", "code"), [(WindtunnelError("x"), 1), (InputError("x"), 2)])
def test_exit_codes(error: WindtunnelError, code: int) -> None:
    assert error.exit_code == code
    assert (str(error), error.hint) == ("x", None)


def test_a_missing_extra_says_what_to_install() -> None:
    error = MissingExtraError("pandas", "pandas")
    assert error.hint == "pip install 'windtunnel[pandas]'"
    assert isinstance(error, InputError)


def test_a_missing_file_is_told_with_its_folder_or_what_is_near(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").touch()
    assert missing_file(tmp_path / "profil.yaml").hint == "did you mean profile.yaml?"
    assert missing_file(tmp_path / "zzzzzz").hint == f"it was looked for in {tmp_path}"
    assert missing_file(tmp_path / "none" / "a").hint == f"there is no folder {tmp_path / 'none'} either"


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(_: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "iterdir", forbidden)
    assert missing_file(tmp_path / "profil.yaml").hint == f"it was looked for in {tmp_path}"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file"), "there is no file"),
        (IsADirectoryError(errno.EISDIR, "Is a directory"), "is a folder; a file is needed"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "is not a text file"),
        (PermissionError(errno.EACCES, "Permission denied"), "cannot be read: Permission denied"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_in_a_sentence(error: OSError | UnicodeDecodeError, words: str) -> None:
    found = unreadable(Path("some.yaml"), error)
    assert words in found.message
    assert found.hint


def test_a_full_disk_is_the_users_to_mend() -> None:
    found = unwritable(Path("out.html"), OSError(errno.ENOSPC, "No space left on device"))
    assert (found.exit_code, found.hint) == (2, "free some space, or choose another place")


def test_a_longer_name_that_begins_alike_comes_first() -> None:
    assert did_you_mean("rate", ["trace", "router", "rate_per_s"]) == "did you mean rate_per_s, trace or router?"
    assert did_you_mean("H100", ["gh200", "h100_nvl", "h100_sxm"]) == "did you mean h100_nvl, h100_sxm or gh200?"


def test_a_traceback_ends_with_the_hint() -> None:
    printed = "".join(traceback.format_exception(InputError("no such key", "did you mean tp?")))
    assert printed.endswith("InputError: no such key\nhint: did you mean tp?\n")
    assert "hint" not in "".join(traceback.format_exception(InputError("no such key")))
