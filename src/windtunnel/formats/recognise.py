"""Recognise files of other tools by their content.

A package of `formats` that reads files defines `FORMATS`, a `FileFormat` for each kind of file. An installed package
adds kinds with an entry point in the group `windtunnel.formats` that names a module with `FORMATS`.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from windtunnel.errors import InputError, check_known
from windtunnel.files import read_bytes
from windtunnel.plugins import Registry
from windtunnel.schema import read_yaml

TOOLS = Registry("windtunnel.formats", "windtunnel.formats", "file format", "FORMATS")

Use = Literal["workload or trace", "training job", "capture", "client result", "server telemetry"]
"""What a file is read as, which decides what `FileFormat.read` takes and returns:

- workload or trace: `read(path) -> collective_calls.Contents`
- training job: `read(path, job_files.JobLaunch) -> (TrainingJob, arguments that were ignored)`
- capture: `read(path) -> captures.capture.Capture`
- client result: `read(path) -> list of clients.read.ClientResult`
- server telemetry: `read(path) -> telemetry.record.ServerRecord`
"""


class FileContent:
    """The content of a file, unpacked where it is gzipped, read as far as it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def start(self) -> bytes:
        """The first 4 KiB: captures may be larger than the memory."""
        return read_bytes(self.path, limit=4096)

    @cached_property
    def text(self) -> str:
        """The whole text; empty where the file is not text."""
        try:
            return read_bytes(self.path).decode("utf-8")
        except UnicodeDecodeError:
            return ""

    @property
    def first_word(self) -> str:
        """The text up to the first blank."""
        return next(iter(self.text.split(maxsplit=1)), "")

    @property
    def is_json(self) -> bool:
        """Whether the file begins as a JSON object or list."""
        return self.start.lstrip()[:1] in (b"{", b"[")

    @cached_property
    def documents(self) -> list[Any]:
        """The JSON document, or the documents of JSON Lines; empty where the file is neither."""
        return documents_of(self.text)


def documents_of(text: str) -> list[Any]:
    """Return a text's JSON document, or its documents of JSON Lines; none where it is neither."""
    for texts in ([text], filter(str.strip, text.splitlines())):
        try:
            return [json.loads(each) for each in texts]
        except (ValueError, RecursionError):
            continue
    return []


@dataclass(frozen=True)
class FileFormat:
    """One kind of file of a tool."""

    name: str
    """For messages: `SimAI workload`."""
    use: Use
    matches: Callable[[FileContent], bool]
    """Whether a file is of this kind."""
    read: Callable[..., Any]
    """Read a file; see `Use`."""
    changed: Callable[..., tuple[list[str], list[str]]] | None = None
    """For jobs: what to write in such a file, and what to leave out of it, to turn one `TrainingSetup` into another."""
    is_certain: bool = True
    """False where others may look the same: such a kind is taken where no certain one matches."""

    def __post_init__(self) -> None:
        """Raise InputError where nothing reads a file as such."""
        check_known(self.use, get_args(Use), f"{self.name}: there is no use {self.use!r} of a file")


def find_format(path: Path, *uses: Use) -> FileFormat:
    """Return the format of a file for one of `uses`; InputError where missing, empty, unknown or of several."""
    tools = TOOLS.every(FileFormat).values()
    by_tool = (getattr(tool, "FORMATS", ()) for tool in tools)
    lists = (kinds if isinstance(kinds, tuple | list) else (kinds,) for kinds in by_tool)
    formats: list[FileFormat] = [kind for kinds in lists for kind in kinds if kind.use in uses]
    content, hint = FileContent(path), f"known: {', '.join(known.name for known in formats)}"
    if not content.start.strip():
        raise InputError(f"{path} is empty", hint)
    matching = [known for known in formats if known.matches(content)]
    if "training job" in uses and all(known.name == known.use for known in matching):  # our own at most: any YAML
        for other in read_yaml(Path(__file__).with_name("other_tools.yaml")):
            if re.search(other["has"], content.text, re.MULTILINE):
                raise InputError(f"{path} is {other['is']}, which is not read", other["hint"])
    match [known for known in matching if known.is_certain] or matching:
        case [known]:
            return known
        case []:
            is_cut = content.is_json and path.suffix == ".json" and not content.documents
            begins = f"it {'is broken JSON that ' if is_cut else ''}begins with {content.first_word[:40]!r}"
            what = begins if content.text else "it is not text"
            raise InputError(f"{path} is no {uses[0]} that is known: {what}", hint)
        case several:
            names = " and ".join(known.name for known in several)
            raise InputError(f"{path} may be of several formats: {names}", hint)
