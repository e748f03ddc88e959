"""A trace layout of an installed package: one file, and files that several layouts claim."""

from pathlib import Path

import pytest

import windtunnel as wt
from plugin_package import installed_plugin
from windtunnel.errors import InputError
from windtunnel.workload.schema import Trace, TraceColumns
from windtunnel.workload.traces.layouts import LENGTHS
from windtunnel.workload.traces.requests import read_requests

GATEWAY = """
from windtunnel.workload.traces.layouts import Layout

LAYOUT = Layout("https://gateway.example", "toks_in", "toks_out", arrival="sent_ms", arrival_unit="ms")
"""
CHATS = """
from windtunnel.workload.traces.layouts import Layout

LAYOUT = Layout("https://chats.example", "log", "log", texts_of=lambda said: tuple(said.split("|")) if said else None)
"""


def written(folder: Path, text: str, name: str = "requests.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_scenario_replays_a_trace_of_an_installed_layout(tmp_path: Path) -> None:
    path = written(tmp_path, "toks_in,toks_out,sent_ms\n100,3,0\n200,5,250\n")
    scenario = wt.scenario(model="llama-3.1-8b", device="h100_sxm", trace=str(path))
    with pytest.raises(InputError, match=r"the columns of no known trace \(azure, "):
        wt.simulate(scenario)
    with installed_plugin(tmp_path, "windtunnel.traces", "gateway", GATEWAY) as files:
        requests = wt.simulate(scenario).requests
        assert len(files) == 1
    assert requests["arrival_s"].tolist() == [0, 0.25]
    assert requests["input_tokens"].tolist() == [100, 200]
    assert requests["output_tokens"].tolist() == [3, 5]


def test_an_installed_layout_with_the_name_of_a_shipped_one_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "toks_in,toks_out\n1,2\n")
    with (
        installed_plugin(tmp_path, "windtunnel.traces", "azure", GATEWAY),
        pytest.raises(InputError, match="installed trace layout has the name of a shipped one, 'azure'"),
    ):
        read_requests(Trace(path=str(path)), LENGTHS)


def test_an_installed_layout_may_hold_texts(tmp_path: Path) -> None:
    path = written(tmp_path, "log\n12345678|1234\n\n1234|123456\n")
    with installed_plugin(tmp_path, "windtunnel.traces", "chats", CHATS):
        read = read_requests(Trace(path=str(path), characters_per_token=4), LENGTHS)
    assert read.input_tokens is not None
    assert read.output_tokens is not None
    assert (read.input_tokens.tolist(), read.output_tokens.tolist()) == ([2, 1], [1, 2])


def test_a_file_of_two_layouts_is_refused_until_its_columns_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, "toks_in,toks_out,ContextTokens,GeneratedTokens\n1,2,3,4\n")
    with installed_plugin(tmp_path, "windtunnel.traces", "gateway", GATEWAY):
        with pytest.raises(InputError, match="may be a trace of the layouts azure and gateway") as refused:
            read_requests(Trace(path=str(path)), LENGTHS)
        assert "name the columns" in str(refused.value.hint)
        columns = TraceColumns(input_tokens="toks_in", output_tokens="GeneratedTokens")
        read = read_requests(Trace(path=str(path), columns=columns), LENGTHS)
    assert read.input_tokens is not None
    assert read.output_tokens is not None
    assert (read.input_tokens.tolist(), read.output_tokens.tolist()) == ([1], [4])


def test_the_layout_whose_times_are_there_too_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path, "toks_in,toks_out,ContextTokens,GeneratedTokens,sent_ms\n1,2,3,4,500\n")
    with installed_plugin(tmp_path, "windtunnel.traces", "gateway", GATEWAY):
        read = read_requests(Trace(path=str(path)), LENGTHS)
    assert read.input_tokens is not None
    assert read.input_tokens.tolist() == [1]


def test_what_nearly_matches_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    path = written(tmp_path, "ContextTokens,prompt_size,when\n1,2,3\n")
    with pytest.raises(InputError, match="azure lacks GeneratedTokens; splitwise lacks token_size; it has Con"):
        read_requests(Trace(path=str(path)), LENGTHS)


def test_texts_that_are_none_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "log\n12345678|1234\n")
    with (
        installed_plugin(tmp_path, "windtunnel.traces", "chats", CHATS.partition("lambda")[0] + "lambda said: 5)\n"),
        pytest.raises(InputError, match="row 1: texts_of of its layout returned 5, not two texts"),
    ):
        read_requests(Trace(path=str(path), characters_per_token=4), LENGTHS)


def test_a_layout_whose_column_is_no_text_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, "toks_in,toks_out,sent_ms\n1,2,3\n")
    with (
        installed_plugin(tmp_path, "windtunnel.traces", "gateway", GATEWAY.replace('"toks_in"', "5")),
        pytest.warns(UserWarning, match="input_tokens is 5, not the name of a column; it is left out"),
        pytest.raises(InputError, match="the columns of no known trace"),
    ):
        read_requests(Trace(path=str(path)), LENGTHS)


def test_a_layout_of_an_unknown_unit_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, "toks_in,toks_out,sent_ms\n1,2,3\n")
    with (
        installed_plugin(tmp_path, "windtunnel.traces", "gateway", GATEWAY.replace('"ms")', '"minutes")')),
        pytest.warns(UserWarning, match="there is no arrival_unit 'minutes'; it is left out"),
        pytest.raises(InputError, match="the columns of no known trace"),
    ):
        read_requests(Trace(path=str(path)), LENGTHS)
