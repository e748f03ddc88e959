"""Layouts of request traces: the columns in which a publisher gives times and lengths.

`layouts.yaml` has those that ship. An installed package adds a layout with an entry point in the group
`windtunnel.traces` that names a module with `LAYOUT`, a `Layout`; the entry point's name is the layout's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from windtunnel import catalog
from windtunnel.errors import InputError, check_known, did_you_mean
from windtunnel.files import opened
from windtunnel.plugins import Registry
from windtunnel.schema import read_yaml
from windtunnel.workload.schema import Trace, TraceColumns
from windtunnel.workload.traces.columns import shown

MEDIA = ("images", "videos", "num_images", "image_width", "image_height", "image_id")
"""Columns of images and videos, which have the same names in every layout."""
BEGINNING_BYTES, END_BYTES = 1 << 24, 1 << 16
"""Parts of a file in which its columns are named: JSON in the first rows, Parquet in the last bytes."""


def find_trace(name: str) -> Path:
    """Return the file at the path `name`, or the trace of the catalog where `name` is a bare word that is no file."""
    path = Path(name)
    is_word = path.suffix == "" and path.name == name
    return catalog.find("traces", name) if is_word and not path.exists() else path


def is_json(path: Path) -> bool:
    """Whether a file is of objects, whose keys may differ."""
    return any(ending in path.name.lower() for ending in (".json", ".ndjson"))


def may_have_media(trace: Trace) -> bool:
    """Whether the columns of images or videos are named in a trace; False where it cannot be read, an error later."""
    if trace.media == "leave_out":
        return False
    try:
        path = find_trace(trace.path)
        known = path.stat()
        names = tuple((getattr(trace.columns, key) or key).rpartition(".")[2] for key in MEDIA[:3])
        return path.is_file() and _names_any(path, names, (known.st_mtime_ns, known.st_size))
    except (InputError, OSError, EOFError):
        return False


@lru_cache(maxsize=64)
def _names_any(path: Path, names: tuple[str, ...], state: tuple[int, int]) -> bool:
    """Look for names in a file, once for each `state` of it, its time of change and its size."""
    if path.suffix.lower() == ".zst":
        return True
    with opened(path, BEGINNING_BYTES) as file:
        text = file.read(BEGINNING_BYTES)
    if ".parquet" in path.name.lower():
        with path.open("rb") as file:
            file.seek(max(state[1] - END_BYTES, 0))
            text = file.read()
    elif ".csv" in path.name.lower():
        text = text.partition(b"\n")[0]
    mark = '"' if is_json(path) else ""
    return any(f"{mark}{name}{mark}".encode() in text for name in names)


INSTALLED = Registry("windtunnel.traces", None, "trace layout", "LAYOUT")
DEFAULT = "windtunnel"
"""Layout whose names stand beside those that a user gives."""

UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds of the units of arrival times."""
LENGTHS = ("input_tokens", "output_tokens")
STREAMS = ("arrival", *LENGTHS)
_FURTHER = ("priority", "tenant", "session", "session_parent", "hash_ids", *MEDIA)
"""Columns that are read where a file has them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The column names of one kind of trace; its other columns are ignored."""

    source: str
    """Where the traces are published."""
    input_tokens: str
    output_tokens: str
    arrival: str | None = None
    """None where the traces have no times."""
    arrival_unit: Literal["s", "ms", "us", "ns"] = "s"
    """Unit of times that are numbers; dates need none."""
    priority: str | None = None
    tenant: str | None = None
    session: str | None = None
    session_parent: str | None = None
    """Column with the session id of the request before this one, where `session` names each request by itself."""
    hash_ids: str | None = None
    block_tokens: int | str = 512
    """Tokens in a block of `hash_ids`, or the column that states them."""
    marks: Sequence[str] = ()
    """Columns that tell the layout from others with the same names: a file needs one of them."""
    never: Sequence[str] = ()
    """Columns that only files of other layouts have."""
    rows_with: Mapping[str, str | None] = field(default_factory=dict)
    """Column -> its value (None: none) in the rows that are requests; empty: every row is one."""
    is_sorted: bool = True
    """Whether rows are in order of arrival; otherwise (in order of completion) they are sorted."""
    zero_output_failed: bool = False
    """Whether the publisher says that requests without output failed; they are left out."""
    texts_of: Callable[[Any], tuple[str, str] | None] | None = None
    """Where the column of lengths holds texts: returns the prompt and the answer in a value of it, None for a value to
    leave out. It raises ValueError for a value without texts."""

    def __post_init__(self) -> None:
        """Raise InputError for a unit that there is not, or a column whose name is no text."""
        for name in ("input_tokens", "output_tokens", "arrival", *_FURTHER[:5]):
            if not isinstance(column := getattr(self, name), str | None):
                raise InputError(f"{name} is {column!r:.60}, not the name of a column")
        check_known(self.arrival_unit, UNITS_S, f"there is no arrival_unit {self.arrival_unit!r}")

    def missing(self, header: Sequence[str], given: TraceColumns, streams: Sequence[str]) -> list[str]:
        """Return the columns of `streams`, under the given names where there are any, and marks that a file lacks."""
        names = [getattr(given, stream) or getattr(self, stream) or stream for stream in streams]
        has_mark = not self.marks or any(name in header for name in self.marks)
        return [name for name in dict.fromkeys(names) if name not in header] + ([] if has_mark else [self._marks])

    @property
    def _marks(self) -> str:
        return " or ".join(self.marks)

    def lacks_only_marks(self, header: Sequence[str]) -> bool:
        """Return whether a file has the layout's columns of lengths, but none of its marks."""
        return bool(self.marks) and self.missing(header, TraceColumns(), LENGTHS) == [self._marks]


def first_exchange(conversation: Any) -> tuple[str, str] | None:
    """Return the first two texts of a conversation, the prompt and the answer as in vLLM's benchmark; None if fewer.
    ValueError where a part has no text."""
    texts = []
    for said in conversation or []:
        text = said.get("value", said.get("content")) if isinstance(said, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"a part of conversations has no text: {shown(said)}")
        texts.append(text)
    return (texts[0], texts[1]) if len(texts) >= 2 else None


TEXTS_OF = {"first exchange": first_exchange}
"""Name in `layouts.yaml` -> the function of a layout whose column holds texts."""


@cache
def shipped() -> Mapping[str, Layout]:
    """Return the layouts that ship, by name."""
    raw: Mapping[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("layouts.yaml"))
    return {
        name: Layout(**{**fields, "texts_of": TEXTS_OF.get(fields.get("texts_of", ""))}) for name, fields in raw.items()
    }


def recognise(path: Path, header: Sequence[str], given: TraceColumns, needed: Sequence[str]) -> Layout:
    """Return the layout of a file: the one whose columns of lengths it has, under given names where there are any.

    A layout whose names others have too needs one of its marks. Of several such layouts, one whose column of times the
    file has too is chosen. The default layout is also recognised by the needed columns alone, such as `arrival_s`, and
    stands beside lengths that both have given names. InputError where a given name is no column, or no layout matches,
    or several; says what each lacks.
    """
    named = [getattr(given, stream, None) for stream in (*needed, *_FURTHER)]
    if unknown := [name for name in named if name and name not in header]:
        raise InputError(
            f"{path} has no column {unknown[0]!r}; it has {_listed(header)}", did_you_mean(unknown[0], header)
        )
    if repeated := next((name for name in INSTALLED.names() if name in shipped()), None):
        raise InputError(
            f"an installed trace layout has the name of a shipped one, {repeated!r}",
            f"give its entry point in {INSTALLED.group!r} another name",
        )
    layouts: dict[str, Layout] = {**shipped()}
    layouts |= {name: module.LAYOUT for name, module in INSTALLED.every(Layout).items()}
    if given.input_tokens and given.output_tokens:
        return layouts[DEFAULT]
    matching = [
        name
        for name, layout in layouts.items()
        if not layout.missing(header, given, LENGTHS) and not set(layout.never) & set(header)
    ]
    complete = [name for name in matching if not layouts[name].missing(header, given, STREAMS)]
    match complete or matching:
        case [name]:
            return layouts[name]
        case [] if not layouts[DEFAULT].missing(header, given, needed):
            return layouts[DEFAULT]
        case []:
            raise _unknown(path, header, layouts)
        case several:
            raise InputError(
                f"{path} may be a trace of the layouts {' and '.join(several)}: it has the columns of both",
                "name the columns: workload.trace.columns: {input_tokens: NAME, output_tokens: NAME}",
            )


def find_columns(
    path: Path, header: list[str], layout: Layout, given: TraceColumns, needed: Sequence[str]
) -> dict[str, str]:
    """Return stream -> its column, for every stream in `needed` and for what else of a request the file has. InputError
    where the file has no column for a needed stream, or two of the same name."""
    names = {
        stream: getattr(given, stream, None) or (stream if stream in MEDIA else getattr(layout, stream))
        for stream in (*needed, *_FURTHER)
    }
    columns = {stream: name for stream, name in names.items() if name in header}
    if missing := [stream for stream in (*LENGTHS, "arrival") if stream in needed and stream not in columns]:
        raise _no_stream(path, header, missing[0], layout)
    if repeated := [name for name in columns.values() if header.count(name) > 1]:
        raise InputError(f"{path} has more than one column {repeated[0]!r}")
    return columns


def _no_stream(path: Path, header: Sequence[str], stream: str, layout: Layout) -> InputError:
    """Return the error for a file of a known layout without the column of one stream."""
    name = getattr(layout, stream)
    if name is None:
        return InputError(
            f"{path} has no arrival times: its publisher ({layout.source}) gives none",
            "say how they arrive: --rate or --concurrency, or workload.arrivals in a file",
        )
    near = did_you_mean(name, [column for column in header if column not in _lengths_and_times(layout)])
    if stream == "arrival":
        hint = "give --rate or --concurrency, or name the column of times: workload.trace.columns: {arrival: NAME}"
        return InputError(f"{path} has no arrival times: no column {name!r} beside {_listed(header)}", near or hint)
    hint = f"name it: workload.trace.columns: {{{stream}: NAME}}"
    return InputError(f"{path} has no column {name!r}; it has {_listed(header)}", near or hint)


def _unknown(path: Path, header: Sequence[str], layouts: dict[str, Layout]) -> InputError:
    """Return the error for a file of no known layout, with what the nearest ones lack."""
    if not header:
        return InputError(f"{path} has no requests")
    lacking = {name: layout.missing(header, TraceColumns(), LENGTHS) for name, layout in layouts.items()}
    near = [
        name
        for name, layout in layouts.items()
        if set(_lengths_and_times(layout)) & set(header)
        and (not layout.marks or set(layout.marks) & set(header) or layout.lacks_only_marks(header))
    ]
    considered = "; ".join(f"{name} lacks {' and '.join(lacking[name])}" for name in near)
    considered = f": {considered}" if near else f" ({', '.join(layouts)})"
    words = [word for name in near for word in lacking[name]]
    others = [column for column in header if not any(column in _lengths_and_times(layouts[name]) for name in near)]
    hint = next((meant for word in words if (meant := did_you_mean(word, others))), None)
    if unmarked := next((layout for layout in layouts.values() if layout.lacks_only_marks(header)), None):
        hint = (
            f"name the columns and the unit of the times: workload.trace.columns: {{arrival: {unmarked.arrival}, "
            f"arrival_unit: UNIT, input_tokens: {unmarked.input_tokens}, output_tokens: {unmarked.output_tokens}}}"
        )
    return InputError(
        f"{path} has the columns of no known trace{considered}; it has {_listed(header)}",
        hint
        or "name them: --set 'workload.trace.columns={arrival: NAME, input_tokens: NAME, output_tokens: NAME}', or so "
        "in a file; measured runs are for windtunnel validate",
    )


def _lengths_and_times(layout: Layout) -> tuple[str | None, ...]:
    return layout.arrival, layout.input_tokens, layout.output_tokens


def _listed(header: Sequence[str]) -> str:
    first = ", ".join(shown(name) for name in header[:8])
    return f"{first} and {len(header) - 8} more" if len(header) > 8 else first
