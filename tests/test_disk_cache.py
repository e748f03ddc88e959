"""Files of the user's cache folder."""

from pathlib import Path

import pytest

from windtunnel import schema
from windtunnel.disk_cache import keep, recall


def test_a_damaged_file_counts_as_missing(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    assert recall(path) is None
    keep(path, b"some content")
    assert recall(path) == b"some content"
    content = path.read_bytes()
    for damaged in (b"", content[:3], content[:-1], content[:-5] + content[-4:], b"S" + content[1:]):
        path.write_bytes(damaged)
        assert recall(path) is None


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep(tmp_path / "file" / "below", b"content")
    assert recall(tmp_path / "file" / "below") is None


def test_a_shipped_file_is_parsed_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(schema, "_PACKAGE", tmp_path)
    path, parsed = tmp_path / "values.yaml", []
    parse = schema.parse_yaml
    monkeypatch.setattr(schema, "parse_yaml", lambda text: (parsed.append(text), parse(text))[1])
    for text in ("a: [1, 2.5, x, null, true]", "a: [1, 2.5, x, null, true]", "a: .nan", "a: {1: b}", "a: {1: c}"):
        path.write_text(text, encoding="utf-8")
        assert str(schema.read_yaml(path)) == str(parse(text))
    assert parsed == ["a: [1, 2.5, x, null, true]", "a: .nan", "a: {1: b}", "a: {1: c}"]
