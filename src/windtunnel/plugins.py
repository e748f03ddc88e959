"""Find alternatives by name: routers, attention kinds, collectives, trace layouts and so on.

An alternative is a module. The shipped ones are the modules of a folder; an installed package adds its own with an
entry point, for example `[project.entry-points."windtunnel.routers"]` with `sticky = "my_package.sticky"`. Both have
the same contract, which the docstring of the folder states.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback
import warnings
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.errors import InputError, check_known

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.metadata import EntryPoint


class Registry:
    """The alternatives of one kind, imported on first use.

    Args:
        group: entry point group of installed alternatives, such as `windtunnel.routers`.
        package: folder of the shipped ones, as a dotted name; None where none ships as a module.
        what: the field's word for one alternative, for messages.
        needs: names that each alternative defines.
        folders: whether each shipped one is a folder; the modules beside them are none.
        taken: names of shipped ones that are no module.
    """

    def __init__(
        self, group: str, package: str | None, what: str, *needs: str, folders: bool = False, taken: Sequence[str] = ()
    ) -> None:
        self.group, self.package, self.what, self.needs, self.folders = group, package, what, needs, folders
        self.taken = taken

    @property
    def shipped(self) -> tuple[str, ...]:
        """Names of the shipped ones, in alphabetical order."""
        return _modules(self.package, self.folders)

    def names(self) -> tuple[str, ...]:
        """Return all names: the shipped ones in alphabetical order, then the installed ones."""
        return (*self.shipped, *sorted(name for name in _installed(self.group) if name not in self.shipped))

    def folder(self, name: str) -> Path | None:
        """Return the folder of an alternative's module, which is not imported; None where there is no such module."""
        module = f"{self.package}.{name}" if name in self.shipped else _installed(self.group)[name][0].module
        try:
            spec = find_spec(module)
        except ImportError:
            spec = None
        return None if spec is None or spec.origin is None else Path(spec.origin).parent

    def __contains__(self, name: str) -> bool:
        """Whether there is an alternative of that name, without importing it."""
        return name in self.shipped or name in _installed(self.group)

    def get(self, name: str) -> Any:
        """Import the alternative of that name. InputError where there is none, an installed one has the name of a
        shipped one or of another one, cannot be imported, or is no such alternative."""
        shipped, installed = self.shipped, _installed(self.group)
        values = [point.value for point in installed.get(name, ())]
        if values and (name in shipped or name in self.taken):
            problem = f"the {self.what} {name!r} of {values[0]!r} has the name of a shipped one"
            raise InputError(problem, f"give its entry point in {self.group!r} another name")
        if len(values) > 1:
            problem = f"the {self.what} {name!r} is of several installed packages: {' and '.join(values)}"
            raise InputError(problem, f"uninstall one, or give its entry point in {self.group!r} another name")
        if name in shipped:
            return importlib.import_module(f"{self.package}.{name}")
        known = self.names()
        check_known(name, known, f"unknown {self.what} {name!r}", f"known: {', '.join(known) or 'none'}")
        try:
            alternative = installed[name][0].load()
        except Exception as error:
            raise self._broken(name, f"cannot be imported: {type(error).__name__}: {error}") from error
        for needed in self.needs:
            if not hasattr(alternative, needed):
                raise self._broken(name, f"defines no {needed}")
        return alternative

    def call(self, name: str, function: str, kind: Any, *arguments: Any) -> Any:
        """Call a function of the alternative of that name, whose answer is a `kind`. InputError as `get` and the
        function; or an installed one has no such function, does not take these arguments or answers something else."""
        if name in self.shipped:
            return getattr(self.get(name), function)(*arguments)
        called = getattr(self.get(name), function, None)
        if not callable(called):
            raise self._broken(name, f"defines no function {function}")
        try:
            answer = called(*arguments)
        except TypeError as error:
            if error.__traceback__ and error.__traceback__.tb_next:
                raise  # inside the function
            raise self._broken(name, f"cannot be called: {error}") from error
        if not isinstance(answer, kind):
            raise self._broken(name, f"returned {answer!r:.60} from {function}, not a {kind.__name__}")
        return answer

    def _broken(self, name: str, problem: str) -> InputError:
        which = f"the {self.what} {name!r} ({_installed(self.group)[name][0].value})"
        return InputError(f"{which} {problem}", "repair or uninstall the package that provides it")

    def every(self, kind: type = object) -> dict[str, Any]:
        """Import all alternatives, by name; installed ones that are broken are left out, with a warning each.

        Args:
            kind: class of what each defines under the first name of `needs`, or of every entry where that is a tuple
                or a list; or a class above it.
        """
        shipped = {name: importlib.import_module(f"{self.package}.{name}") for name in self.shipped}
        return shipped | {name: self.get(name) for name in sorted(_installed(self.group)) if _works(self, name, kind)}


def plugin_modules() -> set[str]:
    """Return the modules of all installed alternatives."""
    from importlib.metadata import distributions

    points = (point for package in distributions() for point in package.entry_points)
    return {point.module for point in points if point.group.startswith("windtunnel.")}


def failed_plugin(error: BaseException) -> str | None:
    """Return the module of an installed alternative that an error went through, with the line; None where in none."""
    modules = plugin_modules()
    frames = [(frame.f_globals.get("__name__"), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((f"{module}, line {line}" for module, line in reversed(frames) if module in modules), None)


@cache
def _works(registry: Registry, name: str, kind: type) -> bool:
    """Whether an installed alternative can be had and is of its kind; warn where not."""
    try:
        alternative = registry.get(name)
        value = getattr(alternative, registry.needs[0]) if registry.needs else alternative
    except InputError as error:
        problem = error.message
    else:
        values = value if isinstance(value, tuple | list) else [value]
        if all(isinstance(each, kind) or (isinstance(each, type) and issubclass(each, kind)) for each in values):
            return True
        problem = f"{registry.needs[0]} of the {registry.what} {name!r} is no {kind.__name__}"
    warnings.warn(f"{problem}; it is left out", stacklevel=3)
    return False


@cache
def _modules(package: str | None, folders: bool) -> tuple[str, ...]:
    """Return the names of the modules in a package's folder, or of its folders alone, without importing them."""
    if package is None:
        return ()
    spec = find_spec(package)
    assert spec is not None
    modules = pkgutil.iter_modules(spec.submodule_search_locations)
    return tuple(
        sorted(module.name for module in modules if not module.name.startswith("_") and module.ispkg >= folders)
    )


@cache
def _installed(group: str) -> dict[str, list[EntryPoint]]:
    """Return name -> the entry points of that name; several where they are different ones."""
    if not _has_plugins():
        return {}
    # Imported late: it loads the parser of mails, which takes longer than the catalog.
    from importlib.metadata import entry_points

    found: dict[str, dict[str, EntryPoint]] = {}
    for point in entry_points(group=group):
        found.setdefault(point.name, {})[point.value] = point
    return {name: list(points.values()) for name, points in found.items()}


@cache
def _has_plugins() -> bool:
    """Whether an installed package may have an entry point of ours, by the files that `importlib.metadata` reads."""
    folders = [Path(folder or ".") for folder in sys.path]
    if any(folder.is_file() or folder.suffix == ".egg" for folder in folders):
        return True
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        return True
    lists = (path for folder in folders for path in folder.glob("*-info/entry_points.txt"))
    return any(b"[windtunnel." in path.read_bytes() for path in lists)
