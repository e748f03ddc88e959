"""No edit of a good input gets a traceback, a hang, a half-written file or a number that cannot be.

`make fuzz N=100000` runs as many cases as wanted; these are the first ones, the same everywhere.
"""

import socket
import time
from collections import Counter
from pathlib import Path

import pytest
from numba import config
from starlette.testclient import TestClient

from effort import cases_to_try
from fuzz import answers, night
from fuzz.inputs import Edit, edited, seeds
from windtunnel import units

CASES, CHUNKS = 2_000, 4
REFUSED = {"experiment": "there is no model", "replay": "num_devices = 8", "bench": "no server answers"}
"""Seeds that would start something; they are answered before they do."""

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not config.DISABLE_JIT, reason="every form of the loop would be compiled"),
]


@pytest.fixture(autouse=True)
def small_runs_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is tried here looks up or reaches another machine: no flag of it asks for one."""

    def refuse_host(host: object, *_: object, **__: object) -> object:
        if str(host) not in ("127.0.0.1", "localhost", "::1", "None"):
            raise answers.HangError(f"{host} was looked up")
        return look_up(host, *_, **__)

    def refuse_address(self: socket.socket, address: object) -> None:
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1"):
            raise answers.HangError(f"{address} was called")
        connect(self, address)

    look_up, connect = socket.getaddrinfo, socket.socket.connect
    monkeypatch.setattr(socket, "getaddrinfo", refuse_host)
    monkeypatch.setattr(socket.socket, "connect", refuse_address)
    for name, value in night.SURROUNDINGS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("number", range(CHUNKS))
def test_edits_of_good_inputs_are_answered(number: int) -> None:
    counts: Counter[str] = Counter()
    failures = night.fuzz(cases_to_try(5 * CASES // 2 // CHUNKS), number, set(), lambda how: counts.update([how]))
    assert failures == []
    assert counts["exit 0"] > counts.total() // 20
    assert counts["exit 2"] > counts.total() // 20
    assert counts["200"] > 0


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    return night.served(tmp_path_factory.mktemp("results"))


@pytest.mark.parametrize("name", sorted(seeds()))
def test_a_seed_is_a_good_input(name: str, client: TestClient, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    tree = seeds()[name]
    if name in REFUSED:
        answer = answers.run_command(tree, work)
        assert (answer.code, REFUSED[name] in answer.stderr) == (2, True), answer.stderr
        return
    expected = "asked" if "results" in tree else "200" if "http" in tree else "exit 0"
    assert night.check(tree, work, client) == expected


def test_a_crash_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = units.parse_quantity

    def crashing(name: str, text: str) -> float:
        return float({}[text]) if name == "ttft_s" and text != "1s" else parse(name, text)

    monkeypatch.setattr("windtunnel.schema.parse_quantity", crashing)
    (failure,) = night.fuzz(400, 4, set(), lambda _: None, only="small")
    assert failure["sign"] == "KeyError in schema.py:_to_si"
    assert len(failure["edits"]) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"summary": {"span_s": NaN}}', "no JSON"),
        ('{"summary": {"span_s": -1.0}}', "below 0"),
        ('{"busy_fraction": 1.2}', "above 1"),
        ('{"operators": [{"name": "gemm", "flops_fraction": 1.215}], "device_s": 0.0}', "flops_fraction is 1.215"),
        ('{"operators": [], "device_s": 2.0, "seconds_by_kind": {"gemm": 1.0}}', "the parts of a step take 1.0 s"),
        ('{"summary": {"span_s": 1, "e2e_s": {"max": 2}, "ttft_s": {"max": 0.5}}}', "in a span of 1 s"),
        ('{"summary": {"ttft_s": {"mean": 1, "p50": 3, "p90": 1, "p99": 1, "max": 2}}}', "percentiles that fall"),
        ('{"summary": {"checks": {"passed": false}}}', "own checks failed"),
    ],
)  # fmt: skip
def test_nonsense_is_seen(text: str, said: str) -> None:
    with pytest.raises(answers.ProblemError, match=said):
        answers.check_document(text)


def test_a_hang_is_seen() -> None:
    with answers.in_time(0.05), pytest.raises(answers.HangError):
        time.sleep(60)


def test_a_call_of_another_machine_is_seen() -> None:
    with pytest.raises(answers.HangError, match="was looked up"):
        socket.create_connection(("example.org", 80))
    with socket.socket() as caller, pytest.raises(answers.HangError, match="was called"):
        caller.connect(("192.0.2.1", 80))


def test_edits_write_what_they_say() -> None:
    tree = {"command": ["x"], "files": {"a.yaml": {"b": [1, 2]}, "c.csv": "1,2\n"}}
    kept = edited(tree, [Edit("double", ("files", "a.yaml", "b", 0)), Edit("move", ("files", "a.yaml", "b"), "d")])
    assert kept["files"]["a.yaml"] == {"d": [1, 1, 2]}
    assert edited(tree, [Edit("cut", ("files", "c.csv"), 0.5)])["files"]["c.csv"] == "1,"
    assert edited(tree, [Edit("double", ("files", "a.yaml", "b"))])["files"]["a.yaml"] == "b:\nb:\n- 1\n- 2\n"
