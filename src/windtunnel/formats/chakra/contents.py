"""Summarise the communication of a Chakra trace."""

import re
from collections.abc import Iterator
from pathlib import Path

from windtunnel.formats.chakra.messages import ChakraCollective, ChakraKind, ChakraTrace, value_of
from windtunnel.formats.chakra.read import read_trace
from windtunnel.formats.collective_calls import CollectiveCall, Contents, totals
from windtunnel.formats.recognise import FileContent

TRACE = "Chakra trace"
_START = re.compile(rb"[\x02-\xff]{1,3}?\n[\x05-\x10]\d+\.\d+\.\d+")
"""The length of the metadata, then its first field, the version."""
_COLLECTIVES: dict[int, str] = {member.value: member.name.lower() for member in ChakraCollective}
_KINDS: dict[int, str] = {ChakraKind.SEND: "send", ChakraKind.RECEIVE: "receive"}


def is_trace(file: FileContent) -> bool:
    """Whether a file begins with the metadata of a trace."""
    return _START.match(file.start) is not None


def read_contents(path: Path) -> Contents:
    """Read a trace and sum up its computation and communication."""
    trace = read_trace(path)
    facts = (("version", trace.metadata.version), ("nodes", f"{len(trace.nodes):,}"))
    compute_us = sum(node.duration_us for node in trace.nodes if node.kind == ChakraKind.COMPUTE)
    return Contents(TRACE, facts, tuple(totals(_calls(trace))), compute_us * 1e-6 if compute_us else None)


def _calls(trace: ChakraTrace) -> Iterator[CollectiveCall]:
    for node in trace.nodes:
        raw = value_of(node, "comm_size")
        size = raw if isinstance(raw, int) else None
        if node.kind == ChakraKind.COLLECTIVE:
            raw = value_of(node, "comm_type")
            name = _COLLECTIVES.get(raw, f"collective {raw!r}") if isinstance(raw, int) else "collective"
            yield CollectiveCall(name, str(value_of(node, "pg_name") or ""), None, size)
        elif node.kind in _KINDS:
            yield CollectiveCall(_KINDS[node.kind], "", None, size)
