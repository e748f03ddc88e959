"""Timelines are valid by the rules of the format and of its reader, true to their tables, and bounded."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel import cli
from windtunnel.errors import InputError
from windtunnel.files import check_replaceable
from windtunnel.formats.timeline import write
from windtunnel.formats.timeline.file import SUFFIXES
from windtunnel.formats.timeline.plan import plan_timeline
from windtunnel.formats.timeline.write import MAX_EVENTS, write_timeline
from windtunnel.metrics.records import STEP_COLUMNS, Table, request_table
from windtunnel.serving.results import Result
from windtunnel.serving.shorthand import scenario
from windtunnel.serving.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Event = dict[str, Any]

KEYS = {
    "M": {"ph", "name", "pid", "args"},
    "X": {"ph", "cat", "name", "pid", "tid", "ts", "dur", "args"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
    **{phase: {"ph", "cat", "id", "name", "pid", "tid", "ts"} for phase in "bestf"},
}
"""Phase -> keys that the Trace Event Format asks for."""
MORE_KEYS = {"M": {"tid"}, "b": {"args"}, "f": {"bp"}}


def timeline(requests: Table, steps: Table, max_events: int = MAX_EVENTS) -> Iterator[Event]:
    return write.timeline(plan_timeline(requests, steps, max_events))


def check(events: list[Event]) -> None:
    """Assert all that the Trace Event Format and Perfetto's importer of it ask."""
    check_fields(events)
    check_names(events)
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    check_slices(events)
    check_async(events)
    check_flows(events)


def check_fields(events: Iterable[Event]) -> None:
    for event in events:
        phase = event["ph"]
        assert KEYS[phase] <= set(event) <= KEYS[phase] | MORE_KEYS.get(phase, set()), event
        assert isinstance(event["name"], str)
        assert event["name"]
        for key in ("pid", "tid", "ts", "dur"):
            # Perfetto keeps numbers of processes and threads in 32 bits, and cuts fractions of microseconds off.
            assert isinstance(event.get(key, 0), int)
            assert 0 <= event.get(key, 0) < (2**32 if key in ("pid", "tid") else 2**53)
        if "id" in event:
            assert hex(int(event["id"], 16)) == event["id"]
        if phase == "C":
            assert event["args"]
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values()), event


def check_names(events: list[Event]) -> None:
    """Processes and threads are named, once and before they are used; a thread's number is no process's."""
    names = [event for event in events if event["ph"] == "M"]
    assert events[: len(names)] == names
    processes = [event["pid"] for event in names if event["name"] == "process_name"]
    threads = [(event["pid"], event["tid"]) for event in names if event["name"] == "thread_name"]
    assert len(set(processes)) == len(processes)
    assert len({tid for _, tid in threads} | set(processes)) == len(threads) + len(processes)
    assert all(event["args"]["name"] for event in names if event["name"].endswith("_name"))
    assert {event["pid"] for event in events} <= set(processes)
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] in "XC"} <= set(threads)


def check_slices(events: Iterable[Event]) -> None:
    free: defaultdict[tuple[int, int], int] = defaultdict(int)
    for event in events:
        if event["ph"] == "X":
            thread = event["pid"], event["tid"]
            assert event["ts"] >= free[thread], event
            free[thread] = event["ts"] + event["dur"]


def check_async(events: Iterable[Event]) -> None:
    """Begins and ends nest, as Perfetto's stack of each track wants it, and every track is empty at the end."""
    stacks: defaultdict[tuple[int, str, str], list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] not in "be":
            continue
        stack = stacks[event["pid"], event["cat"], event["id"]]
        if event["ph"] == "b":
            assert stack in ([], ["request"])
            assert (event["name"] == "request") == (not stack)
            stack.append(event["name"])
        else:
            assert stack.pop() == event["name"]
    assert not any(stacks.values())


def check_flows(events: Iterable[Event]) -> None:
    """Each flow starts, may step, and ends; each point lies in a slice of its own that was begun before."""
    open_slice: dict[tuple[int, int], int] = {}
    ends: dict[int, int] = {}
    flows: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for number, event in enumerate(events):
        if event["ph"] == "X":
            open_slice[event["pid"], event["tid"]] = number
            ends[number] = event["ts"] + event["dur"]
        elif event["ph"] in "stf":
            inside = open_slice[event["pid"], event["tid"]]
            assert event["ts"] <= ends[inside]
            assert (event.get("bp") == "e") == (event["ph"] == "f")
            flows[event["id"]].append((event["ph"], inside))
    for points in flows.values():
        assert "".join(phase for phase, _ in points) in ("sf", "stf")
        assert len({inside for _, inside in points}) == len(points)


def of_phase(events: Iterable[Event], phase: str) -> list[Event]:
    return [event for event in events if event["ph"] == phase]


def busy_us(events: Iterable[Event]) -> dict[int, int]:
    busy: defaultdict[int, int] = defaultdict(int)
    for event in of_phase(events, "X"):
        busy[event["pid"]] += event["dur"]
    return dict(busy)


def steps_of(**columns: Any) -> Table:
    """A step table; what is not given is one step of one replica that decodes one request."""
    n = len(columns["start_s"])
    usual = {"num_steps": 1, "decode_tokens": 1}
    filled = {name: np.asarray(columns.get(name, [usual.get(name, 0)] * n)) for name in STEP_COLUMNS}
    return Table(filled, STEP_COLUMNS)


def requests_of(times_s: list[tuple[float, float, float, float]], replica: list[int] | None = None) -> Table:
    """A request table from arrival, scheduled, first token and finish."""
    n = len(times_s)
    columns = np.array(times_s, float).reshape(n, 4).T
    names = ("arrival_s", "scheduled_s", "first_token_s", "finish_s")
    counts = {"input_tokens": 100, "output_tokens": 8, "priority": 0, "num_preemptions": 0}
    engine = dict(zip(names, columns, strict=True)) | {name: np.full(n, value) for name, value in counts.items()}
    return request_table(engine, np.array(replica or [0] * n, np.int64), 0.0, 0)


def run(**more: Any) -> Result:
    usual = {"model": "meta-llama/Llama-3.1-8B", "device": "h100_sxm", "num_requests": 120, "rate_per_s": 30}
    lengths = {"input_tokens": {"type": "uniform", "min_tokens": 16, "max_tokens": 3000}, "output_tokens": 24}
    return simulate(scenario(**(usual | lengths | more)))


@pytest.fixture(scope="module", params=[{"replicas": 2}, {"pp": 2}, {"rate_per_s": None, "concurrency": 16}], ids=str)
def result(request: pytest.FixtureRequest) -> Result:
    return run(**request.param)


def test_a_run_is_a_valid_timeline(result: Result, tmp_path: Path) -> None:
    detail = write_timeline(tmp_path / "run.json", result.requests, result.steps)
    text = (tmp_path / "run.json").read_text()
    document = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert list(document) == ["displayTimeUnit", "otherData", "traceEvents"]
    assert document["displayTimeUnit"] == "ms"
    check(document["traceEvents"])
    assert document["traceEvents"] == list(timeline(result.requests, result.steps))
    assert detail.is_complete
    assert detail.num_events == document["otherData"]["num_events"] == len(document["traceEvents"]) < MAX_EVENTS


def test_slices_are_the_steps(result: Result) -> None:
    events, steps = list(timeline(result.requests, result.steps)), result.steps
    slices = of_phase(events, "X")
    assert len(slices) == len(steps)
    for pid, busy in busy_us(events).items():
        mine = steps["replica"] == pid - 1
        # Each end is rounded to its microsecond; steps take thousands.
        assert busy == pytest.approx(steps["duration_s"][mine].sum() * 1e6, abs=float(mine.sum()))
    for name in ("decode_tokens", "prefill_tokens", "num_steps", "context_tokens", "used_blocks", "num_running"):
        assert sum(event["args"][name] for event in slices) == steps[name].sum()


def test_pipeline_tracks_are_threads() -> None:
    result = run(pp=2)
    threads = [
        event["args"]["name"] for event in timeline(result.requests, result.steps) if event["name"] == "thread_name"
    ]
    assert threads == ["batches in flight, 1 of 2", "batches in flight, 2 of 2"]


def test_requests_have_their_times(result: Result) -> None:
    events, table = list(timeline(result.requests, result.steps)), result.requests
    times = {(event["ph"], event["name"], int(event["id"], 16)): event["ts"] for event in events if event["ph"] in "be"}
    for number in range(len(table)):
        assert times["b", "request", number] == round(table["arrival_s"][number] * 1e6)
        assert times["b", "prefill", number] == round(table["scheduled_s"][number] * 1e6)
        assert (
            times["e", "prefill", number] == times["b", "decode", number] == round(table["first_token_s"][number] * 1e6)
        )
        assert times["e", "request", number] == times["e", "decode", number] == round(table["finish_s"][number] * 1e6)
        queued = round(table["queueing_s"][number] * 1e6) > 0
        assert (("b", "queueing", number) in times) == queued
    args = {event["args"]["request"]: event["args"] for event in of_phase(events, "b") if "args" in event}
    assert [args[number]["input_tokens"] for number in range(len(table))] == table["input_tokens"].tolist()
    assert args[7]["ttft_ms"] == pytest.approx(table["ttft_s"][7] * 1e3, abs=1e-3)


def test_flows_lead_from_the_first_batch_to_the_last(result: Result) -> None:
    events, table = list(timeline(result.requests, result.steps)), result.requests
    starts = {int(event["id"], 16): event for event in of_phase(events, "s")}
    assert len(starts) == len(of_phase(events, "f")) == len(table)
    inside: dict[tuple[int, int], Event] = {}
    for event in events:
        thread = event["pid"], event.get("tid", 0)
        if event["ph"] == "X":
            inside[thread] = event
        elif event["ph"] in "stf":
            number, batch = int(event["id"], 16), inside[thread]
            if event["ph"] == "s":
                assert batch["ts"] == round(table["scheduled_s"][number] * 1e6)
                assert batch["args"]["prefill_tokens"] > 0
            else:
                name = "first_token_s" if event["ph"] == "t" else "finish_s"
                assert batch["ts"] + batch["dur"] == pytest.approx(table[name][number] * 1e6, abs=1)
            assert event["pid"] - 1 == table["replica"][number]


def test_every_event_of_a_small_run() -> None:
    steps = steps_of(
        start_s=[1.0, 1.5],
        duration_s=[0.5, 0.4],
        num_steps=[1, 4],
        decode_tokens=[0, 2],
        prefill_tokens=[200, 0],
        num_prefills=[2, 0],
        used_blocks=[13, 15],
        num_running=[2, 2],
        num_waiting=[1, 0],
    )
    events = list(timeline(requests_of([(0.9, 1.0, 1.5, 1.9)]), steps))
    check(events)
    in_short = [
        (event["ts"], event["ph"], event["name"], *(event["args"].values() if event["ph"] == "C" else ()))
        for event in events
        if event["ph"] != "M"
    ]
    assert in_short == [
        (900_000, "b", "request"),
        (900_000, "b", "queueing"),
        (1_000_000, "X", "prefill 2 x 100"),
        (1_000_000, "C", "KV blocks", 13),
        (1_000_000, "C", "requests", 2, 1),
        (1_000_000, "C", "tokens/s", 0, 400),
        (1_000_000, "e", "queueing"),
        (1_000_000, "b", "prefill"),
        (1_000_000, "s", "request"),
        (1_500_000, "X", "decode 2"),
        (1_500_000, "C", "requests", 2, 0),
        (1_500_000, "C", "tokens/s", 20, 0),
        (1_500_000, "e", "prefill"),
        (1_500_000, "b", "decode"),
        (1_500_000, "f", "request"),
        # The row's blocks are all taken when the last of its four steps starts.
        (1_800_000, "C", "KV blocks", 15),
        (1_900_000, "C", "KV blocks", 0),
        (1_900_000, "C", "requests", 0, 0),
        (1_900_000, "C", "tokens/s", 0, 0),
        (1_900_000, "e", "decode"),
        (1_900_000, "e", "request"),
    ]


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        ({"decode_tokens": 64}, "decode 64"),
        ({"decode_tokens": 0, "prefill_tokens": 2048, "num_prefills": 1}, "prefill 2,048"),
        ({"decode_tokens": 61, "prefill_tokens": 6144, "num_prefills": 3}, "prefill 3 x 2,048 + decode 61"),
        ({"decode_tokens": 61, "prefill_tokens": 6145, "num_prefills": 3}, "prefill 3 x ~2,048 + decode 61"),
    ],
)
def test_a_slice_is_named_by_its_composition(batch: dict[str, int], name: str) -> None:
    steps = steps_of(start_s=[0.0], duration_s=[1.0], **{key: [value] for key, value in batch.items()})
    assert [event["name"] for event in of_phase(timeline(requests_of([]), steps), "X")] == [name]


def test_a_rate_is_of_all_batches_in_flight() -> None:
    steps = steps_of(start_s=[0.0, 1.0, 3.0], duration_s=[2.0, 2.0, 2.0], decode_tokens=[20, 40, 6])
    events = list(timeline(requests_of([(0.0, 0.0, 2.0, 5.0)]), steps))
    rates = [event["args"]["decode"] for event in of_phase(events, "C") if event["name"] == "tokens/s"]
    assert rates == [10, 10 + 20, 3, 0]


def test_counters_fall_to_zero_only_where_nothing_is_left_to_do() -> None:
    steps = steps_of(start_s=[0.0, 2.0, 5.0], duration_s=[1.0, 1.0, 1.0], num_running=[1, 1, 1])
    events = list(timeline(requests_of([(0.0, 0.0, 1.0, 3.0), (5.0, 5.0, 6.0, 6.0)]), steps))
    running = [
        (event["ts"], event["args"]["running"]) for event in of_phase(events, "C") if event["name"] == "requests"
    ]
    assert running == [(0, 1), (2_000_000, 1), (3_000_000, 0), (5_000_000, 1), (6_000_000, 0)]


def test_batches_that_touch_share_a_thread_however_they_are_rounded() -> None:
    """1.5 us rounds to 2, and what should be the same time a hair before it to 1."""
    steps = steps_of(start_s=[0.0, 1.4999999e-6], duration_s=[1.5e-6, 1e-3])
    events = list(timeline(requests_of([]), steps))
    check(events)
    assert [(event["tid"], event["ts"], event["dur"]) for event in of_phase(events, "X")] == [(2, 0, 1), (2, 1, 1000)]


def test_a_flow_starts_in_the_batch_that_prefills() -> None:
    """Of two batches that start together."""
    steps = steps_of(
        start_s=[0.0, 0.0, 1.0], duration_s=[2.0, 1.0, 1.0], prefill_tokens=[0, 100, 0], num_prefills=[0, 1, 0]
    )
    events = list(timeline(requests_of([(0.0, 0.0, 1.0, 2.0)]), steps))
    check(events)
    prefill = next(event for event in events if event["name"] == "prefill 100 + decode 1")
    assert [(event["ts"], event["tid"]) for event in of_phase(events, "s")] == [(0, prefill["tid"])]


def test_no_flow_runs_backwards_where_batches_are_merged() -> None:
    """Drawn with the idle time before them left out, batches of two tracks may change their order."""
    starts, durations = np.array([0.0, 0.5, 10.0, 10.5]), np.array([1.0, 0.1, 1.0, 1.0])
    blocks = np.arange(40) * 20.0
    steps = steps_of(
        start_s=np.add.outer(blocks, starts).ravel(),
        duration_s=np.tile(durations, 40),
        prefill_tokens=np.tile([0, 0, 100, 0], 40),
    )
    requests = requests_of([(block + 9.0, block + 10.0, block + 11.0, block + 11.5) for block in blocks])
    assert len(of_phase(timeline(requests, steps), "f")) == 40
    events = list(timeline(requests, steps, 200))
    check(events)
    assert any("batches:" in event["name"] for event in events)


def test_unfinished_requests_are_not_shown() -> None:
    nan = float("nan")
    requests = requests_of([(0.0, 0.0, 1.0, 2.0), (0.0, 0.0, nan, nan)])
    steps = steps_of(start_s=[0.0, 1.0], duration_s=[1.0, 1.0], prefill_tokens=[100, 0])
    events = list(timeline(requests, steps))
    check(events)
    assert {event["id"] for event in events if "id" in event} == {"0x0"}


def test_an_unfinished_request_keeps_no_other_replica_busy() -> None:
    nan = float("nan")
    requests = requests_of([(0.0, nan, nan, nan), (0.0, 0.0, 1.0, 1.0)], [0, 1])
    steps = steps_of(start_s=[0.0, 0.0], duration_s=[1.0, 1.0], replica=[0, 1], num_running=[1, 1])
    events = list(timeline(requests, steps))
    running = [(event["pid"], event["args"]["running"]) for event in events if event["name"] == "requests"]
    assert running == [(1, 1), (2, 1), (2, 0)]


@pytest.mark.parametrize("max_events", [100, 600, 1000])
def test_a_sampled_run_is_bounded_and_conserves_busy_time(result: Result, max_events: int, tmp_path: Path) -> None:
    everything = list(timeline(result.requests, result.steps))
    detail = write_timeline(tmp_path / "run.json", result.requests, result.steps, max_events)
    document = json.loads((tmp_path / "run.json").read_text())
    events = document["traceEvents"]
    check(events)
    assert detail.num_events == len(events) <= max_events < len(everything)
    assert busy_us(events) == busy_us(everything)
    shown = sorted({int(event["id"], 16) for event in of_phase(events, "b")})
    assert len(shown) == detail.num_shown_requests == document["otherData"]["num_shown_requests"]
    assert 0 < len(shown) < len(result.requests)
    gaps = {after - before for before, after in pairwise(shown)}
    assert gaps <= {len(result.requests) // len(shown), len(result.requests) // len(shown) + 1}
    assert str(detail.batches_per_slice) in document["otherData"]["sampling"]
    steps = sum(event["args"]["num_steps"] for event in of_phase(events, "X"))
    assert steps == result.steps["num_steps"].sum()


def test_requests_take_the_room_that_batches_leave() -> None:
    steps = steps_of(start_s=[0.0, 1.0], duration_s=[1.0, 1.0], prefill_tokens=[100, 0])
    requests = requests_of([(0.0, 0.0, 1.0, 2.0)] * 500)
    events = list(timeline(requests, steps, 1000))
    assert len(of_phase(events, "X")) == 2
    assert 900 < len(events) <= 1000


seconds = st.integers(0, 40_000).map(lambda number: number * 2.5e-5)
rows = st.lists(st.tuples(seconds, seconds, st.integers(0, 2), st.integers(0, 3)), max_size=40)
times = st.lists(st.tuples(st.lists(seconds, min_size=4, max_size=4), st.integers(0, 2)), max_size=20)


@pytest.mark.full
@given(rows=rows, times=times, max_events=st.integers(0, 2000))
def test_any_tables_make_a_valid_timeline(rows: list[Any], times: list[Any], max_events: int) -> None:
    start, duration, replica, prefills = zip(*rows, strict=True) if rows else ((),) * 4
    steps = steps_of(
        start_s=np.array(start, float),
        duration_s=np.array(duration, float),
        replica=np.array(replica, np.int32),
        prefill_tokens=np.array(prefills, np.int32) * 16,
        num_prefills=np.array(prefills, np.int32),
    )
    requests = requests_of([tuple(sorted(four)) for four, _ in times], [home for _, home in times])
    everything = list(timeline(requests, steps))
    check(everything)
    try:
        events = list(timeline(requests, steps, max_events))
    except InputError as error:
        assert max_events < 600
        needed = int(error.hint.split()[2].replace(",", ""))  # type: ignore[union-attr]
        events, max_events = list(timeline(requests, steps, needed)), needed
    check(events)
    assert len(events) <= max_events
    assert busy_us(events) == busy_us(everything)
    if len(everything) <= max_events:
        assert events == everything


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    result = run()
    for name in ("one.json", "two.json", "one.json.gz", "two.json.gz"):
        write_timeline(tmp_path / name, result.requests, result.steps, 1000)
    plain, packed = (tmp_path / "one.json").read_bytes(), (tmp_path / "one.json.gz").read_bytes()
    assert plain == (tmp_path / "two.json").read_bytes() == gzip.decompress(packed)
    assert packed == (tmp_path / "two.json.gz").read_bytes()
    assert packed[3:8] == bytes(5), "the header holds no name and no time"
    assert len(packed) < len(plain) / 4


def test_nothing_is_left_of_a_timeline_that_cannot_be_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_text("former")

    def breaks(_: Any) -> Any:
        yield {"ph": "M"}
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "timeline", breaks)
    with pytest.raises(InputError, match=r"run\.json cannot be written: No space left on device"):
        write_timeline(tmp_path / "run.json", requests_of([]), steps_of(start_s=[]))
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert (tmp_path / "run.json").read_text() == "former"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run.yaml", "does not end in .json or .json.gz"),
        ("folder.json", "is a folder"),
        ("there.json", "exists"),
        ("there.json/run.json", "not a folder that you may write to"),
    ],
)
def test_wrong_files_are_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "there.json").write_text("mine")
    with pytest.raises(InputError, match=message):
        check_replaceable(tmp_path / name, False, *SUFFIXES)


SMALL = [
    *("simulate", "--model", "meta-llama/Llama-3.1-8B", "--device", "h100_sxm"),
    *("--input-tokens", "64", "--output-tokens", "8", "--concurrency", "4", "--num-requests", "20"),
]


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deep" / "run.json.gz"
    assert cli.run([*SMALL, "--timeline", str(file)]) == 0
    document = json.loads(gzip.decompress(file.read_bytes()))
    check(document["traceEvents"])
    about = document["otherData"]
    assert (about["model"], about["device"], about["num_requests"]) == ("meta-llama/Llama-3.1-8B", "h100_sxm", 20)
    assert capsys.readouterr().err == f"wrote {file}: {about['num_events']} events\n"
    assert cli.run([*SMALL, "--timeline", str(file), "--overwrite", "--timeline-events", "100"]) == 0
    assert "of 20 requests are shown; --timeline-events 200 shows more" in capsys.readouterr().err
    assert len(json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]) <= 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--timeline", "scenario.yaml/run.json"], "is not a folder that you may write to"),
        (["--timeline", "scenario.yaml"], "does not end in .json or .json.gz"),
        (["--timeline-events", "5"], "--timeline-events is the size of a --timeline"),
        (["--timeline", "run.json", "--timeline-events", "5"], "5 events has no room for the 2 processes and threads"),
    ],
)
def test_wrong_options_write_nothing(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scenario.yaml").write_text("seed: 1\n")
    assert cli.run([*SMALL, *options, "--out", "run"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["scenario.yaml"]
