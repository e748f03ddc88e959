"""README.md and every other page is true: commands run and print what the page shows, and links lead somewhere.

In a ```console block, lines that start with `$ ` are commands (a trailing backslash continues one) and the lines after
a command are what it prints to stdout; `...` stands for anything. A command without output need only succeed. A comment
before a block changes that: `<!-- not run: reason -->` leaves it out; `<!-- exit code 2 -->` expects a failure, and its
output is stdout and stderr. A block with `title="scenario.yaml"` writes that file. ```python blocks run in one
namespace, as doctests where they have prompts. The blocks of a page run in order, in one new folder.
"""

import doctest
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import transcript
from windtunnel.catalog import names

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]

_BLOCK = re.compile(
    r"(?:^<!-- (?P<comment>[^\n]*?) -->\n+)?"
    r"^(?P<fence>```+)(?P<language>\w+)(?P<options>[^\n]*)\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
_NOT_RUN = re.compile(r"not run: \S")
_EXIT_CODE = re.compile(r"exit code (\d+)")
_TITLE = re.compile(r'title="([^"]+)"')
_LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:|#)(?P<target>[^)#\s]+)")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    comment: str
    language: str
    options: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"

    @property
    def runs(self) -> bool:
        return not _NOT_RUN.match(self.comment)

    @property
    def exit_code(self) -> int:
        match = _EXIT_CODE.fullmatch(self.comment)
        return int(match[1]) if match else 0


def blocks_of(page: Path) -> Iterator[Block]:
    content = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(content):
        line = content.count("\n", 0, match.start("fence")) + 1
        yield Block(page, line, match["comment"] or "", match["language"], match["options"], match["text"])


def commands_of(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block with the output shown below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, output = re.fullmatch(r"((?:[^\n]*\\\n)*[^\n]*)\n?(.*)", part, re.DOTALL).groups()  # type: ignore[union-attr]
        yield command, output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_page_is_true(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in filter(lambda block: block.runs, blocks_of(page)):
        if title := _TITLE.search(block.options):
            (folder / title[1]).write_text(block.text, encoding="utf-8")
        if block.language == "console":
            check_commands(block, folder)
        elif block.language == "python":
            check_python(block, names)


def check_commands(block: Block, folder: Path) -> None:
    for command, expected in commands_of(block.text):
        done = transcript.run(command, folder)
        printed = done.stdout + (done.stderr if block.exit_code else "")
        assert done.returncode == block.exit_code, f"{block.where}: {command}\n{done.stdout}{done.stderr}"
        if expected.strip():
            message = f"{block.where}: {command}\n{transcript.difference(expected, printed)}"
            assert transcript.matches(expected, printed), message


def check_python(block: Block, names: dict[str, Any]) -> None:
    if ">>> " not in block.text:
        exec(compile(block.text, block.where, "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(block.text, names, block.where, str(block.page), block.line)
    runner = doctest.DebugRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, clear_globs=False)
    names.update(test.globs)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [match["target"] for match in _LINK.finditer(page.read_text(encoding="utf-8"))]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_comments_before_blocks_are_understood(page: Path) -> None:
    comments = [block.comment for block in blocks_of(page) if block.comment]
    assert [text for text in comments if not (_NOT_RUN.match(text) or _EXIT_CODE.fullmatch(text))] == []


def mapped_paths() -> Iterator[Path]:
    """The packages and modules that the tree in docs/design.md names; what is in a folder is indented below it."""
    design = (REPOSITORY / "docs" / "design.md").read_text(encoding="utf-8")
    tree = design.partition("    src/windtunnel/\n")[2].partition("\n\n")[0]
    folders = {0: REPOSITORY / "src" / "windtunnel"}
    for line in tree.splitlines():
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        folders = {depth: folder for depth, folder in folders.items() if depth < indent}
        path = folders[max(folders)] / name
        yield path
        if name.endswith("/"):
            folders[indent] = path


def test_the_map_names_what_there_is() -> None:
    assert [path for path in mapped_paths() if not path.exists()] == []


PAGE = """
<!-- not run: it needs the network -->
```console
$ false
```

```yaml title="file.yaml"
seed: 1
```

```console
$ cat \\
    file.yaml
seed: 1
$ printf 'a 12.5 s\\nb\\n'
a ... s
b
$ true
```

<!-- exit code 3 -->
```console
$ echo lost >&2; exit 3
lost
```

```python
number = 6
```

```python
>>> number * 7
42
```
"""


def test_a_true_page_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.REPOSITORY", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    test_page_is_true(page, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("true", "false"),
    [
        ("a ... s", "a ... ms"),
        ("$ true", "$ false"),
        ("exit code 3", "exit code 4"),
        ("42", "43"),
        ("= 6", "= nothing"),
    ],
)
def test_a_false_page_fails(true: str, false: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.REPOSITORY", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace(true, false), encoding="utf-8")
    with pytest.raises((AssertionError, NameError, doctest.DocTestFailure)):
        test_page_is_true(page, tmp_path, monkeypatch)


def test_robustness_names_tests_that_exist() -> None:
    page = (REPOSITORY / "docs/reference/robustness.md").read_text(encoding="utf-8")
    names = re.findall(r"`(tests/[^`]+\.py)::(test_\w+)`", page)
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| failure")]
    assert all("::test_" in row for row in rows)
    assert len(names) > 40
    missing = [f"{file}::{name}" for file, name in names if f"def {name}(" not in (REPOSITORY / file).read_text()]
    assert missing == []


def test_the_readme_counts_what_the_catalog_has() -> None:
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    counts = re.search(r"ships (\d+) checkpoints of models, (\d+) devices and (\d+) kinds of node", page)
    assert counts is not None
    assert [int(count) for count in counts.groups()] == [len(names(kind)) for kind in ("models", "devices", "nodes")]


def test_the_questions_repeat_the_accuracy_of_the_readme() -> None:
    readme, questions = ((REPOSITORY / name).read_text(encoding="utf-8") for name in ("README.md", "docs/faq.md"))
    names = ("uncalibrated", "calibrated, configuration")
    rows = [re.search(rf"^\| {name}[^|]*\| [\d.]+% \| ([\d.]+%)", readme, re.M) for name in names]
    told = re.search(r"is ([\d.]+%) without a calibration and ([\d.]+%) with one", questions)
    assert told is not None
    assert [row[1] for row in rows if row] == list(told.groups())


TABLES = "\n".join((REPOSITORY / f"docs/reference/accuracy-{name}.md").read_text() for name in ("tables", "by-source"))
EXPECTED = {
    "vLLM, SGLang or TensorRT-LLM on H100": "primary, settings recovered, not odd, all 3",
    "the same; some flags": "primary, settings not recorded, all 3",
    "a model that no measured run had": "calibrated, model held out",
    "a GPU whose operators are measured": "calibrated, device held out",
    "a release of the engine": "calibrated, version held out",
    "speculative decoding": "all, configuration held out",
    "separate pools": "all, shipped calibration",
    "NVIDIA GPUs, runs that people published": "all | 398",
    "AMD, TPU and Gaudi": "all | 310",
}
"""Beginning of a row of "Which error to expect" -> beginning of the row of the tables that it repeats."""


@pytest.mark.parametrize("begins", EXPECTED)
def test_the_errors_to_expect_are_those_of_the_tables(begins: str) -> None:
    (row,) = re.findall(rf"^\| {begins}.*$", (REPOSITORY / "docs/accuracy.md").read_text(), re.MULTILINE)
    source = re.findall(rf"^\| {re.escape(EXPECTED[begins])}.*$", TABLES, re.MULTILINE)[0]
    said = [float(number) for cell in row.split("|")[3:6] for number in re.findall(r"[\d.]+", cell)]
    absolute = re.sub(r"\([^)]*\)|[-+][\d.]+%|[\d.]+% inside", "", source)
    numbers = [float(number) for number in re.findall(r"([\d.]+)%", absolute)][:6]
    assert said == pytest.approx(numbers, abs=0.5)
