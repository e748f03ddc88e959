"""Bring into the documentation site what is no page of docs/: the README, the project's pages, examples, notebooks.

mkdocs calls the functions `on_*`. Links between pages are written for readers of the repository; here those that leave
docs/ are pointed at the copies.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
COPIES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "LICENSE": "LICENSE.txt",
    "NOTICE": "NOTICE.txt",
    "examples": "examples/index.md",
}
"""Path in the repository -> path in the site."""
LINK = re.compile(r"(?P<before>\]\()(?!https?:|mailto:|#)(?P<target>[^)#\s]+)")
LANGUAGES = {".py": "python", ".yaml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the copies, and a page for each example and notebook."""
    for source, uri in COPIES.items():
        if (ROOT / source).is_file():
            files.append(File.generated(config, uri, content=(ROOT / source).read_text(encoding="utf-8")))
    for notebook in sorted((DOCS / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=notebook_page(notebook)))
    rows = []
    for example in examples():
        title, content = example_page(example)
        rows.append(f"| [{example.name}]({example.stem}.md) | {title} |")
        files.append(File.generated(config, f"examples/{example.stem}.md", content=content))
    head = "# Examples\n\nEach example runs as it stands, and the tests check that it prints what its page shows.\n\n"
    table = "\n".join(["| file | contents |", "|---|---|", *rows])
    files.append(File.generated(config, "examples/index.md", content=f"{head}{table}\n"))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links that leave docs/ at the copies."""
    uri = page.file.src_uri
    source = next((ROOT / path for path, copy in COPIES.items() if copy == uri), DOCS / uri)

    def replaced(match: re.Match[str]) -> str:
        target = uri_of((source.parent / match["target"]).resolve())
        return (
            match[0] if target is None else match["before"] + posixpath.relpath(target, posixpath.dirname(uri) or ".")
        )

    return LINK.sub(replaced, markdown)


def uri_of(path: Path) -> str | None:
    """Return the path in the site of a file of the repository; None where the site does not have it."""
    if path.parent == EXAMPLES and path.suffix in LANGUAGES:
        return f"examples/{path.stem}.md"
    if path.is_relative_to(DOCS) and path.suffix == ".ipynb":
        return path.relative_to(DOCS).with_suffix(".md").as_posix()
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return COPIES.get(path.relative_to(ROOT).as_posix()) if path.is_relative_to(ROOT) else None


def examples() -> Iterator[Path]:
    """Yield the examples in their order."""
    yield from sorted(path for path in EXAMPLES.iterdir() if path.suffix in LANGUAGES)


def example_page(example: Path) -> tuple[str, str]:
    """Return the title of an example, which is its first line, and its page."""
    text = example.read_text(encoding="utf-8")
    title = text.splitlines()[0].strip('#" ').rstrip(".")
    program = "python" if example.suffix == ".py" else "windtunnel simulate"
    output = example.with_suffix(".out").read_text(encoding="utf-8")
    return title, (
        f"# {title}\n\n"
        f'```{LANGUAGES[example.suffix]} title="{example.name}"\n{text}```\n\n'
        f"`{program} {example.name}` prints:\n\n```text\n{output}```\n"
    )


def notebook_page(path: Path) -> str:
    """Return the page of a notebook with the outputs that its file holds."""
    parts: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts += [f"```python\n{source}\n```", *map(output_block, cell["outputs"])]
    return "\n\n".join([*parts, f'<a href="{path.name}" download>Download this notebook</a>']) + "\n"


def output_block(output: dict[str, Any]) -> str:
    """Return an output of a cell: its HTML in one line, so that no line of it is read as Markdown, or its text."""
    data = output.get("data", {})
    if "text/html" in data:
        return f"<div>{' '.join(''.join(data['text/html']).split())}</div>"
    return f"```text\n{''.join(output.get('text') or data['text/plain']).rstrip()}\n```"
