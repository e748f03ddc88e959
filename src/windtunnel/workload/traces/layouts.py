"""Layouts of request traces: column names that common traces have, and names that a user gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from windtunnel.errors import InputError, did_you_mean
from windtunnel.workload.schema import TraceColumns
from windtunnel.workload.traces.columns import shown

LENGTHS = ("input_tokens", "output_tokens")
STREAMS = ("arrival", *LENGTHS)


@dataclass(frozen=True, slots=True)
class Layout:
    """The column names of one kind of trace."""

    name: str
    arrival: str
    input_tokens: str
    output_tokens: str
    source: str
    arrival_unit: str = "s"
    priority: str | None = None
    tenant: str | None = None
    session: str | None = None
    hash_ids: str | None = None
    zero_output_failed: bool = False
    """Whether the publisher says that requests without output failed; they are left out."""

    @property
    def columns(self) -> tuple[str, str, str]:
        """The names of the streams' columns."""
        return self.arrival, self.input_tokens, self.output_tokens


KNOWN_LAYOUTS = (
    Layout(
        *("windtunnel", "arrival_s", *LENGTHS, "this project"),
        priority="priority",
        tenant="tenant",
        session="session",
        hash_ids="hash_ids",
    ),
    Layout(
        *("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        "https://github.com/Azure/AzurePublicDataset (LLM inference 2023 and 2024)",
    ),
    Layout("vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens", "https://github.com/microsoft/vidur"),
    Layout(
        *("burstgpt", "Timestamp", "Request tokens", "Response tokens", "https://github.com/HPMLL/BurstGPT"),
        session="Session ID",
        zero_output_failed=True,
    ),
    Layout(
        *("mooncake", "timestamp", "input_length", "output_length", "https://github.com/kvcache-ai/Mooncake"),
        arrival_unit="ms",
        hash_ids="hash_ids",
    ),
    Layout(
        *("splitwise", "arrival_timestamp", "prompt_size", "token_size"),
        "https://github.com/Mutinifni/splitwise-sim",
    ),
    Layout(
        *("llmservingsim", "arrival_ns", "input_toks", "output_toks"),
        "https://github.com/casys-kaist/LLMServingSim",
        arrival_unit="ns",
    ),
)
"""Layouts, recognised by the columns of both lengths; times may be absent, as in Vidur's ShareGPT and arXiv files."""


CONVERSATIONS = "conversations"
"""Column of ShareGPT's JSON: what people and the model said, in turn. As in vLLM's benchmark, the first text is the
prompt and the second the output, and conversations of fewer than two texts are left out."""


def recognise(header: list[str], given: TraceColumns, needed: Sequence[str]) -> Layout | None:
    """Return the first layout whose lengths the file has, under the given names where there are any.

    Windtunnel's layout is also recognised by the needed columns alone, such as `arrival_s`.
    """
    for layout in KNOWN_LAYOUTS:
        lengths = (given.input_tokens or layout.input_tokens, given.output_tokens or layout.output_tokens)
        if all(name in header for name in lengths):
            return layout
    ours = KNOWN_LAYOUTS[0]
    return ours if all((getattr(given, stream) or getattr(ours, stream)) in header for stream in needed) else None


def find_columns(
    path: Path, header: list[str], layout: Layout | None, given: TraceColumns, needed: Sequence[str]
) -> dict[str, str]:
    """Return stream -> name of its column, for every stream in `needed` and for what else of a request the file has."""
    streams = (*needed, "priority", "tenant", "session", "hash_ids")
    named = {stream: getattr(given, stream) for stream in streams if getattr(given, stream)}
    if unknown := [name for name in named.values() if name not in header]:
        raise InputError(
            f"{path} has no column {unknown[0]!r}; it has {_listed(header)}", did_you_mean(unknown[0], header)
        )
    known = {stream: getattr(layout, stream) for stream in streams} if layout else {}
    columns = {stream: name for stream, name in (known | named).items() if name is not None and name in header}
    if not set(needed) <= set(columns):
        raise _no_stream(path, header, [stream for stream in needed if stream not in named], layout)
    if repeated := [name for name in columns.values() if header.count(name) > 1]:
        raise InputError(f"{path} has more than one column {repeated[0]!r}")
    return columns


def _no_stream(path: Path, header: list[str], streams: Sequence[str], layout: Layout | None) -> InputError:
    """Return the error for a file without some of `streams`, none of which was given a name."""
    if CONVERSATIONS in header:
        return InputError(
            f"{path} is of ShareGPT's kind, which has no arrival times", "say how they arrive: a rate or a concurrency"
        )
    expected = layout or max(KNOWN_LAYOUTS, key=lambda it: sum(name in header for name in it.columns))
    missing = [it for it in (*LENGTHS, "arrival") if it in streams and getattr(expected, it) not in header]
    if not missing or not set(expected.columns) & set(header):
        hint = "name them: workload.trace.columns: {arrival: NAME, input_tokens: NAME, output_tokens: NAME}"
        near = did_you_mean(streams[0], header)
        return InputError(f"{path} has no columns of a known trace; it has {_listed(header)}", near or hint)
    name = getattr(expected, missing[0])
    near = did_you_mean(name, [column for column in header if column not in expected.columns])
    if missing[0] == "arrival":
        hint = "give workload.arrivals, or name the column of times: workload.trace.columns: {arrival: NAME}"
        return InputError(f"{path} has no arrival times: no column {name!r} beside {_listed(header)}", near or hint)
    hint = f"name it: workload.trace.columns: {{{missing[0]}: NAME}}"
    return InputError(f"{path} has no column {name!r}; it has {_listed(header)}", near or hint)


def _listed(header: list[str]) -> str:
    first = ", ".join(shown(name) for name in header[:8])
    return f"{first} and {len(header) - 8} more" if len(header) > 8 else first
