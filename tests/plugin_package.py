"""Install a small package with one entry point into a temporary folder, as a user's plug-in would be."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from windtunnel import plugins
from windtunnel.serving.setup import estimators


@contextmanager
def installed_plugin(folder: Path, group: str, name: str, source: str, attribute: str = "") -> Iterator[list[Path]]:
    """Install a package of one module and yield the files that its author writes, packaging aside.

    Args:
        folder: an empty temporary folder, put on `sys.path` meanwhile.
        group, name: of the entry point.
        source: Python source of the module.
        attribute: what of the module the entry point names; the module itself where empty.
    """
    module = f"plugin_{name}"
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    value = f"{module}:{attribute}" if attribute else module
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    sys.path.insert(0, str(folder))
    _forget_installed()
    try:
        yield sorted(folder.glob("*.py"))
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(module, None)
        _forget_installed()


def _forget_installed() -> None:
    """Look for installed packages again, after one was installed in this process."""
    plugins._has_plugins.cache_clear()
    plugins._installed.cache_clear()
    plugins._works.cache_clear()
    estimators._measured.cache_clear()  # they keep prices, also of kinds that a package brings
