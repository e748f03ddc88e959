"""What keeps the code easy to enter: sizes, imports, words, and pages that name what exists."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import census
from windtunnel import catalog
from windtunnel.serving import codes

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = census.PACKAGE

MOST_LINES_TODAY = 99_674
"""Above the budget of `census.MOST_LINES`: only a new capability raises it."""

HEAVY = {
    "flash_attn", "flashinfer", "google", "httpx", "jinja2", "llvmlite", "markupsafe", "numpy", "nvtx", "optuna",
    "pandas", "pyarrow", "ray", "scipy", "sklearn", "torch", "transformers", "vllm", "yaml",
}  # fmt: skip
"""Libraries that a function may import because starting would take longer, or because they are extras."""

LATE = {
    ("compiled/jit.py", "windtunnel.compiled.compiler"),
    ("lab/profile/run.py", "windtunnel"),
    ("serving/setup/estimators.py", "windtunnel.network.cluster"),
}
"""Modules of our own that a function imports: they load numba, or kernels, which most callers do not need."""

FORMER_NAMES = re.compile(
    r"\b(lanes?|walked|walking|cohorts?|remed(?:y|ies)|alike|hand(?:ed|s|ing)? over|handovers?|journeys?|nouns?)\b",
    re.IGNORECASE,
)
"""Words of an older vocabulary; CONTRIBUTING.md lists each beside the field's word."""
MAY_SAY_FORMER_NAMES = {"CONTRIBUTING.md", "tests/test_structure.py"}


def functions() -> list[census.Function]:
    return list(census.functions(census.sources()))


@pytest.mark.full
def test_functions_and_argument_lists_are_short() -> None:
    every = functions()
    assert [str(function) for function in census.too_long(every)] == []
    assert [str(function) for function in census.too_wide(every)] == []
    assert census.p99([function.num_lines for function in every]) <= census.MOST_P99_LINES


def test_no_folder_is_crowded_and_no_prefix_stands_for_a_package() -> None:
    assert census.crowded_folders() == {}
    assert census.prefix_families() == {}


def test_the_source_does_not_grow() -> None:
    assert sum(len(path.read_text().splitlines()) for path in census.sources()) <= MOST_LINES_TODAY


def late_imports(path: Path) -> Iterator[str]:
    """The modules that functions of a file import."""
    for function in ast.walk(census.parsed(path)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom):
                    yield str(node.module)
                elif isinstance(node, ast.Import):
                    yield from (name.name for name in node.names)


@pytest.mark.parametrize("package", sorted(path.name for path in PACKAGE.iterdir() if path.is_dir()))
def test_functions_import_only_heavy_libraries(package: str) -> None:
    """The verbs of `cli` import what they call, so that `--help` is quick."""
    if package == "cli":
        return
    for path in census.sources(PACKAGE / package):
        place = str(path.relative_to(PACKAGE))
        for module in late_imports(path):
            top = module.partition(".")[0]
            is_known = top in HEAVY or top in sys.stdlib_module_names or (place, module) in LATE
            assert is_known, f"{place} imports {module} inside a function"


MAY_COMPARE_ENGINES = ("serving/engines/", "formats/vidur/")
"""Folders that may: the engines themselves, and the reader of a program whose own words some of the names are."""


def names_in(node: ast.expr, constants: dict[str, ast.expr], names: set[str]) -> set[str]:
    """The names of engines and schedulers that an operand is or holds, by way of a constant of the module too."""
    if isinstance(node, ast.Name) and node.id in constants:
        node = constants[node.id]
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return {str(part.value) for part in parts if isinstance(part, ast.Constant)} & names


def compared_names(path: Path, names: set[str]) -> Iterator[str]:
    """Every comparison of a file with one of the names; kernels of an operator may be called like an engine."""
    tree = census.parsed(path)
    constants: dict[str, ast.expr] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and (value := getattr(node, "value", None)) is not None:
                constants[target.id] = value
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "endswith"):
            operands = node.args
        else:
            continue
        is_of_engine = any(names_in(operand, constants, names) for operand in operands)
        if is_of_engine and not any("backend" in ast.unparse(operand) for operand in operands):
            yield f"{path.name}:{operands[0].lineno}: {ast.unparse(node)}"


@pytest.mark.full
def test_no_engine_is_compared_by_name() -> None:
    """What differs by engine is a field or function of its folder, so that a new engine is one folder."""
    names = {*catalog.ENGINES.shipped, *codes.SCHEDULERS, *codes.PER_REQUEST_SCHEDULERS} - {"user"}
    assert {"vllm", "vllm_v1", "sarathi"} < names
    compared = [
        f"{path.parent.relative_to(PACKAGE)}/{comparison}"
        for path in census.sources()
        if not str(path.relative_to(PACKAGE)).startswith(MAY_COMPARE_ENGINES)
        for comparison in compared_names(path, names)
    ]
    assert compared == []


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("is_old = engine.name == 'vllm'", 1),
        ("is_old = scheduler in ('trtllm', 'sglang')", 1),
        ("FIRST = 'sglang'\nis_first = name != FIRST", 1),
        ("waits = scheduler.startswith('trtllm')", 1),
        ("match name:\n    case 'vllm':\n        pass", 1),
        ("is_fast = moe_backend == 'trtllm'", 0),
        ("since = {'vllm': '0.11'}.get(name)", 0),
    ],
)
def test_comparisons_with_engines_are_seen(line: str, number: int, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert len(list(compared_names(tmp_path / "module.py", {"vllm", "sglang", "trtllm"}))) == number


def pages() -> list[Path]:
    """Every page of documentation."""
    return [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


@pytest.mark.parametrize("root", ["src", "tests", "benchmarks", "examples", "docs", "README.md", "CONTRIBUTING.md"])
def test_former_names_are_gone(root: str) -> None:
    top = REPOSITORY / root
    files = [top] if top.is_file() else [path for path in top.rglob("*") if path.suffix in {".py", ".md", ".js"}]
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {match.group()}"
        for path in files
        if str(path.relative_to(REPOSITORY)) not in MAY_SAY_FORMER_NAMES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in FORMER_NAMES.finditer(line)
    ]
    assert found == []


PATH = re.compile(r"`((?:src|tests|benchmarks|examples|docs)/[\w./-]*\w/?)`")
MODULE = re.compile(r"`(windtunnel(?:\.\w+)+)`")


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_paths_and_symbols_that_pages_name_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [path for path in PATH.findall(text) if not (REPOSITORY / path).exists()] == []
    assert [name for name in MODULE.findall(text) if not is_there(name)] == []


@cache
def entry_point_groups() -> set[str]:
    group = re.compile(r'Registry\(\s*"(windtunnel\.\w+)"')
    return {name for path in PACKAGE.rglob("*.py") for name in group.findall(path.read_text(encoding="utf-8"))}


def is_there(name: str) -> bool:
    """Whether a dotted name is a package, a module, a name in one, or a group of entry points."""
    if name in entry_point_groups():
        return True
    parts = name.split(".")[1:]
    place = PACKAGE
    for position, part in enumerate(parts):
        if (place / part).is_dir():
            place = place / part
            continue
        if (place / f"{part}.py").is_file():
            rest = parts[position + 1 :]
            return not rest or re.search(rf"\b{rest[0]}\b", (place / f"{part}.py").read_text()) is not None
        return re.search(rf"\b{part}\b", (place / "__init__.py").read_text()) is not None
    return True


INVARIANT = re.compile(r"^\| (\d+) \|", re.MULTILINE)


def test_a_version_of_the_changelog_has_each_kind_of_change_once() -> None:
    heads: list[str] = []
    for line in (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8").splitlines():
        version = line if line.startswith("## ") else heads[-1].partition(": ")[0] if heads else ""
        if line.startswith("#"):
            heads.append(f"{version}: {line}")
    assert len(heads) == len(set(heads))


def test_every_invariant_is_cited_by_a_test() -> None:
    """Tests cite an invariant as `Invariant N`."""
    numbers = set(INVARIANT.findall((REPOSITORY / "docs" / "reference" / "invariants.md").read_text(encoding="utf-8")))
    cited = {
        number
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        for number in re.findall(r"[Ii]nvariants? (\d+)", path.read_text(encoding="utf-8"))
    }
    assert numbers
    assert numbers - cited == set()
