"""Count what makes code hard to enter: lines, long functions, long argument lists, crowded folders, prefix families.

python tests/census.py            the figures
python tests/census.py --over     and every place above a limit
python tests/census.py FOLDER     of one folder below src/windtunnel
"""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "windtunnel"

MOST_LINES = 69_000
MOST_FUNCTION_LINES = {False: 60, True: 120}
"""By whether the function is in a compiled loop."""
MOST_PARAMETERS = {False: 8, True: 10}
MOST_P99_LINES = 45
MOST_MODULES = 15
MOST_WITH_ONE_PREFIX = 2


@dataclass(frozen=True)
class Function:
    """A function or method, by its lines and parameters; `self` and `cls` do not count."""

    path: str
    name: str
    num_lines: int
    num_parameters: int
    is_compiled: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.name}  {self.num_lines} lines, {self.num_parameters} parameters"


def kernels() -> set[Path]:
    """The files of compiled loops."""
    sys.path.insert(0, str(PACKAGE.parent))
    from windtunnel.compiled import kernel_files

    return set(kernel_files())


def sources(folder: Path = PACKAGE) -> list[Path]:
    """The Python files below a folder."""
    return sorted(folder.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file, which several tests look at."""
    return ast.parse(path.read_text())


def functions(paths: list[Path]) -> Iterator[Function]:
    """Every function in the files."""
    compiled = kernels()
    for path in paths:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [argument.arg for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
                count = len(names) + (node.args.vararg is not None) + (node.args.kwarg is not None)
                count -= names[:1] in (["self"], ["cls"])
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                where = str(path.relative_to(PACKAGE))
                yield Function(where, node.name, num_lines, count, path in compiled)


def p99(lengths: list[int]) -> int:
    """The length that 99% of functions do not exceed."""
    return sorted(lengths)[int(len(lengths) * 0.99)] if lengths else 0


def crowded_folders() -> dict[str, int]:
    """Folder -> modules in it, for folders with too many; `__init__.py` does not count."""
    counts = Counter(path.parent for path in sources() if path.stem != "__init__")
    return {str(folder.relative_to(PACKAGE)): count for folder, count in counts.items() if count > MOST_MODULES}


def prefix_families() -> dict[str, list[str]]:
    """Folder/prefix -> modules whose names begin with it up to an underscore, where there are three or more."""
    families: dict[str, list[str]] = {}
    for path in sources():
        if path.stem != "__init__":
            prefix = f"{path.parent.relative_to(PACKAGE)}/{path.stem.partition('_')[0]}"
            families.setdefault(prefix, []).append(path.stem)
    return {prefix: names for prefix, names in families.items() if len(names) > MOST_WITH_ONE_PREFIX}


def too_long(found: list[Function]) -> list[Function]:
    """Functions with too many lines, longest first."""
    over = [one for one in found if one.num_lines > MOST_FUNCTION_LINES[one.is_compiled]]
    return sorted(over, key=lambda one: -one.num_lines)


def too_wide(found: list[Function]) -> list[Function]:
    """Functions with too many parameters, widest first."""
    over = [one for one in found if one.num_parameters > MOST_PARAMETERS[one.is_compiled]]
    return sorted(over, key=lambda one: -one.num_parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="", help="below src/windtunnel")
    parser.add_argument("--over", action="store_true", help="list every place above a limit")
    arguments = parser.parse_args()
    paths = sources(PACKAGE / arguments.folder)
    found = list(functions(paths))
    num_lines = sum(len(path.read_text().splitlines()) for path in paths)
    print(f"{num_lines:,} lines in {len(paths)} files; at most {MOST_LINES:,} in all")
    print(f"{len(found):,} functions, 99% of at most {p99([one.num_lines for one in found])} lines ({MOST_P99_LINES})")
    for title, over in (("too long", too_long(found)), ("too many parameters", too_wide(found))):
        print(f"{len(over)} {title}")
        for one in over if arguments.over else ():
            print(f"  {one}")
    print(f"crowded folders: {crowded_folders() or 'none'}")
    print(f"three modules with one prefix: {prefix_families() or 'none'}")


if __name__ == "__main__":
    main()
