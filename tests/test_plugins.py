from pathlib import Path

import pytest

from plugin_package import installed_plugin
from windtunnel.errors import InputError
from windtunnel.plugins import Registry

ROUTERS = Registry("windtunnel.test_kind", "windtunnel.compiled", "test kind")


def test_shipped_alternatives_are_the_modules_of_their_folder() -> None:
    assert {"heap", "jit", "records"} <= set(ROUTERS.names())
    assert ROUTERS.get("heap").__name__ == "windtunnel.compiled.heap"


def test_an_installed_package_adds_an_alternative(tmp_path: Path) -> None:
    with installed_plugin(tmp_path, "windtunnel.test_kind", "sticky", "ANSWER = 42\n") as files:
        assert ROUTERS.names()[-1] == "sticky"
        assert "sticky" in ROUTERS
        assert ROUTERS.get("sticky").ANSWER == 42
        assert len(files) == 1
    assert "sticky" not in ROUTERS.names()
    assert "sticky" not in ROUTERS
    assert "heap" in ROUTERS


def test_an_entry_point_may_name_an_object(tmp_path: Path) -> None:
    with installed_plugin(tmp_path, "windtunnel.test_kind", "sticky", "ANSWER = 42\n", "ANSWER"):
        assert ROUTERS.get("sticky") == 42


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InputError, match=r"(?m)^unknown test kind 'heep'$") as error:
        ROUTERS.get("heep")
    assert "heap" in (error.value.hint or "")


def test_a_shipped_name_cannot_be_taken(tmp_path: Path) -> None:
    with (
        installed_plugin(tmp_path, "windtunnel.test_kind", "heap", ""),
        pytest.raises(InputError, match="has the name of a shipped one"),
    ):
        ROUTERS.get("heap")


def test_a_broken_package_is_named(tmp_path: Path) -> None:
    with (
        installed_plugin(tmp_path, "windtunnel.test_kind", "broken", "import no_such_module\n"),
        pytest.raises(InputError, match=r"'broken' \(plugin_broken\) cannot be imported: ModuleNotFoundError"),
    ):
        ROUTERS.get("broken")


def test_folders_alone_may_be_alternatives(tmp_path: Path) -> None:
    """The modules beside the folders of engines are what they share."""
    engines = Registry("windtunnel.test_kind", "windtunnel.serving.engines", "engine", folders=True)
    assert engines.shipped == ("sglang", "trtllm", "vidur", "vllm")
    folder = engines.folder("vllm")
    assert folder is not None
    assert (folder / "defaults.yaml").is_file()
    with installed_plugin(tmp_path, "windtunnel.test_kind", "sticky", "raise ImportError\n"):
        assert engines.folder("sticky") == tmp_path
