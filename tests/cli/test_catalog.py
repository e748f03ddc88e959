"""`windtunnel catalog`: lists and single entries."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from windtunnel import catalog

if TYPE_CHECKING:
    from cli.conftest import Command

KINDS = ["models", "devices", "nodes", "engines", "traces", "clients", "calibrations"]


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_list_names_everything(windtunnel: Command, kind: str) -> None:
    done = windtunnel("catalog", kind)
    assert done.code == 0
    printed = "".join(done.stdout.split())
    assert [name for name in catalog.names(kind) if name not in printed] == []


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal(
    windtunnel: Command, kind: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert max(map(len, windtunnel("catalog", kind).stdout.splitlines())) <= width


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("models", "llama-3.1-70b", ["meta-llama/Llama-3.1-70B", "70,553,706,496"]),
        ("devices", "h100_sxm", ["NVIDIA H100", "3.35 TB/s", "989 TFLOP/s", "NVIDIA H100 datasheet"]),
        ("nodes", "dgx_h100", ["450 GB/s", "num_devices"]),
        ("engines", "vllm", ["max_num_batched_tokens", "8,192", "arg_utils.py"]),
        ("clients", "socket", ["a bare socket", "200 us", "not measured"]),
        ("traces", "azure2023_code", ["CC-BY-4.0", "Microsoft Azure", "8,819"]),
    ],
)
def test_an_entry_is_shown_in_full_with_its_sources(
    windtunnel: Command, kind: str, name: str, words: list[str]
) -> None:
    printed = windtunnel("catalog", kind, name).stdout
    assert [word for word in words if word not in printed] == []


@pytest.mark.parametrize("kind", KINDS)
def test_json_holds_every_entry(windtunnel: Command, kind: str) -> None:
    documents = json.loads(windtunnel("catalog", kind, "--json").stdout)
    assert len(documents) == len(catalog.names(kind))
    one = json.loads(windtunnel("catalog", kind, catalog.names(kind)[0], "--json").stdout)
    assert one == documents[0]


def test_a_short_context_is_shown_in_tokens(windtunnel: Command) -> None:
    (line,) = [line for line in windtunnel("catalog", "models").stdout.splitlines() if "bge-base-en-v1.5" in line]
    assert line.split()[-2] == "512"


def test_an_unknown_entry_is_refused(windtunnel: Command) -> None:
    done = windtunnel("catalog", "models", "llama-3.1-71b")
    assert done.code == 2
    assert "did you mean" in done.stderr


def test_every_shipped_trace_says_where_it_comes_from(windtunnel: Command) -> None:
    for trace in json.loads(windtunnel("catalog", "traces", "--json").stdout):
        assert {"title", "author", "url", "licence", "changes"} <= set(trace)
