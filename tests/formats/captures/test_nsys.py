"""nsys' SQLite files: against what NVIDIA's own `nsys stats` 2023.4.4 printed of the same file, and against bad files.

`nsys_stats/*.csv` is its output of `python tests/nsys_report.py s.sqlite nsys_schema_2023.4.4.sql` under
`nsys stats -r cuda_gpu_kern_sum,cuda_gpu_kern_gb_sum,... -f csv`.
"""

import csv
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import nsys_report
from windtunnel.errors import InputError
from windtunnel.formats.captures.capture import CLASSES, GRAPH, KERNEL, Capture, read_capture, within
from windtunnel.formats.captures.kernel_time import (
    by_name,
    class_time,
    device_time,
    kernel_table,
    launch_times,
    range_time,
    statistics,
)
from windtunnel.formats.captures.nsys import read_nsys, scrub_nsys
from windtunnel.metrics.records import Table

STATS = Path(__file__).parent / "nsys_stats"


def printed(report: str) -> list[dict[str, str]]:
    with (STATS / f"{report}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(params=[nsys_report.SCHEMA_2022, nsys_report.SCHEMA_2023], ids=["2022", "2023"])
def capture(request: pytest.FixtureRequest, tmp_path: Path) -> Capture:
    nsys_report.write_report(tmp_path / "s.sqlite", request.param)
    return read_capture(tmp_path / "s.sqlite")


def check(capture: Capture, measured: Table, report: str, name: str, unit: str, scale: float, decimals: int) -> None:
    """Every statistic of every row, to the last digit that `nsys stats` prints."""
    rows = {row[name]: row for row in printed(report)}
    assert [capture.names[code] for code in measured["name"]] == list(rows)
    for place, row in enumerate(rows.values()):
        for column, values in (
            ("Avg", measured["mean"]),
            ("Med", measured["median"]),
            ("Min", measured["least"]),
            ("Max", measured["most"]),
            ("StdDev", measured["deviation"]),
        ):
            ours = values[place] * scale
            assert ours == pytest.approx(float(row[f"{column} ({unit})"]), abs=0.51 * 10.0**-decimals), (row, column)


@pytest.mark.parametrize(
    ("of", "report", "name"),
    [
        ("kernels", "cuda_gpu_kern_sum", "Name"),
        ("api_calls", "cuda_api_sum", "Name"),
        ("copies", "cuda_gpu_mem_time_sum", "Operation"),
    ],
)
def test_times_are_those_of_nsys_stats(capture: Capture, of: str, report: str, name: str) -> None:
    measured = by_name(capture, of)
    check(capture, measured, report, name, "ns", 1e9, 1)
    rows = printed(report)
    assert [round(total * 1e9) for total in measured["total"]] == [int(row["Total Time (ns)"]) for row in rows]
    assert [round(share * 100, 1) for share in measured["share"]] == [float(row["Time (%)"]) for row in rows]


def test_sizes_of_copies_are_those_of_nsys_stats(capture: Capture) -> None:
    check(capture, by_name(capture, "copied"), "cuda_gpu_mem_size_sum", "Operation", "MB", 1e-6, 3)


def test_kernels_by_grid_are_those_of_nsys_stats(capture: Capture) -> None:
    table = kernel_table(capture)
    ours = {capture.names[code]: place for place, code in enumerate(table["name"])}
    for row in printed("cuda_gpu_kern_gb_sum"):
        place = ours[row["Name"]]
        assert [table[f"grid_{axis}"][place] for axis in "xyz"] == [int(part) for part in row["GridXYZ"].split()]
        assert table["block_threads"][place] == np.prod([int(part) for part in row["BlockXYZ"].split()])
        assert table["count"][place] == int(row["Instances"])


def test_launches_are_those_of_nsys_stats(capture: Capture) -> None:
    launches, rows = launch_times(capture), capture.kernels
    kernels = rows.where((rows["activity"] == KERNEL) & (rows["call"] >= 0))
    call_s = capture.calls["duration_s"][kernels["call"]]
    call_names = capture.calls["name"][kernels["call"]]
    for row in printed("cuda_kern_exec_sum"):
        mine = np.array([capture.names[code] == row["Kernel Name"] for code in kernels["name"]])
        assert {capture.names[code] for code in call_names[mine]} == {row["API Name"]}
        queue = launches.queue_s[mine]
        assert (mine.sum(), np.isfinite(queue).sum()) == (int(row["Count"]), int(row["QCount"]))
        assert np.nanmean(queue) * 1e9 == pytest.approx(float(row["QAvg (ns)"]), abs=0.06)
        assert call_s[mine].mean() * 1e9 == pytest.approx(float(row["AAvg (ns)"]), abs=0.06)
        total = np.maximum(launches.latency_s + kernels["duration_s"], call_s)[mine]
        assert np.median(total) * 1e9 == pytest.approx(float(row["TMed (ns)"]), abs=0.06)


def test_ranges_on_the_device_are_those_of_nsys_stats(capture: Capture) -> None:
    times = range_time(capture)
    style = {"PushPop": 1, "StartEnd": 0}
    rows = printed("nvtx_gpu_proj_sum")
    assert len(times) == sum(int(row["Range Instances"]) for row in rows)
    for row in rows:
        is_mine = [capture.names[code] == row["Range"] for code in times["name"]]
        mine = np.array(is_mine) & (times["is_nested"] == style[row["Style"]])
        assert round(times["device_s"][mine].sum() * 1e9) == int(row["Total Proj Time (ns)"])
        assert round(times["host_s"][mine].sum() * 1e9) == int(row["Total Range Time (ns)"])
        assert times["num_kernels"][mine].sum() == int(row["Total GPU Ops"])


def test_ranges_on_the_host_are_those_of_nsys_stats(capture: Capture) -> None:
    """`nsys stats` splits them by style too, which the one range with both styles shows."""
    times = by_name(capture, "host_ranges")
    ours = {capture.names[code]: round(total * 1e9) for code, total in zip(times["name"], times["total"], strict=True)}
    expected: dict[str, int] = {}
    for row in printed("nvtx_sum"):
        expected[row["Range"]] = expected.get(row["Range"], 0) + int(row["Total Time (ns)"])
    assert ours == expected


@pytest.mark.full
@pytest.mark.parametrize("version", ["2022.4.2", "2023.4.4"])
def test_the_whole_schema_gives_the_same(version: str, reference: Path, tmp_path: Path) -> None:
    schema = (reference / "profiler" / f"nsys_schema_{version}.sql").read_text()
    nsys_report.write_report(tmp_path / "s.sqlite", schema)
    capture = read_nsys(tmp_path / "s.sqlite")
    assert (
        capture.tool
        == f"nsys {version}.{'54' if version[3] == '3' else '50'} (schema {'3.7.2' if version[3] == '3' else '3.0.0'})"
    )
    rows = printed("cuda_gpu_kern_sum")
    assert [round(total * 1e9) for total in by_name(capture, "kernels")["total"]] == [
        int(row["Total Time (ns)"]) for row in rows
    ]


def test_every_kernel_has_its_class_and_range(capture: Capture) -> None:
    kernels = capture.kernels_of(0)
    classes = {nsys_report.KERNELS[which][0] for which in range(7)}
    measured = {capture.names[n]: CLASSES[c] for n, c in zip(kernels["name"], kernels["kernel_class"], strict=True)}
    assert set(measured) == classes
    expected = ["norm", "gemm", "rope", "kv_cache", "attention", "communication", "activation"]
    assert [measured[name] for name, *_ in nsys_report.KERNELS] == expected
    inner = [capture.name_of(capture.ranges["name"][row]) for row in kernels["range"]]
    assert sorted(inner) == ["layer 0"] * 36 + ["layer 1"] * 36
    assert set(inner[:10]) == {"layer 0"}


def test_overlap_and_gaps_add_up(capture: Capture) -> None:
    (use,) = device_time(capture).values()
    kernels = capture.kernels
    is_nccl = kernels["kernel_class"] == CLASSES.index("communication")
    assert use.communication_s == pytest.approx(kernels["duration_s"][is_nccl].sum())
    assert 0 < use.overlapped_s <= use.communication_s * (1 + 1e-9)
    assert use.gaps_s.min() > 1e-9
    assert use.busy_s + use.gaps_s.sum() == pytest.approx(use.span_s)
    end_s = (kernels["start_s"] + kernels["duration_s"]).max()
    assert use.span_s == pytest.approx(end_s - kernels["start_s"].min())
    # Two streams: time is busy once, so what both do at once is the difference to the sum.
    assert use.busy_s == pytest.approx(kernels["duration_s"].sum() - use.overlapped_s)


def test_graphs_recorded_whole_are_seen_and_said(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    nsys_report.write_report(path)
    nsys_report.whole_graphs(path, [(9_000_000, 13_000_000), (14_000_000, 18_000_000)])
    capture = read_nsys(path)
    assert len(capture.kernels_of(GRAPH)) == 2
    assert class_time(capture)["graph"] == pytest.approx(8e-3)
    assert "91% of the device's time is in CUDA graphs" in capture.notes[0]
    assert "--cuda-graph-trace=node" in capture.notes[0]


def test_what_lies_within_a_range_keeps_its_launches_and_ranges(capture: Capture) -> None:
    assert within(capture, "no such range") is capture
    cut = within(capture, "layer 1")
    assert len(cut.kernels) == len(cut.calls) == 12
    first = next(row for row, code in enumerate(capture.ranges["name"]) if capture.names[code] == "layer 1")
    same = capture.kernels.where(capture.kernels["range"] == first)
    for name in ("name", "start_s", "stream"):
        np.testing.assert_array_equal(cut.kernels[name], same[name])
    assert {cut.name_of(cut.ranges["name"][row]) for row in cut.kernels["range"]} == {"layer 1"}
    launches = [cut.name_of(cut.calls["name"][row]) for row in cut.kernels["call"]]
    assert launches == [capture.name_of(capture.calls["name"][row]) for row in same["call"]]


def test_a_capture_without_kernels_says_so(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    nsys_report.write_report(path)
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
        database.commit()
    capture = read_nsys(path)
    assert len(capture.kernels) == 9
    assert "no kernels" in capture.notes[0]
    assert len(by_name(capture, "kernels")) == 0


def test_scrubbing_takes_the_environment_out_of_the_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    nsys_report.write_report(path)
    before = read_nsys(path)
    assert b"hf_secret" in path.read_bytes()
    assert scrub_nsys(path) == 2
    assert b"hf_secret" not in path.read_bytes()
    after = read_nsys(path)
    assert after.names == before.names
    for name, column in before.kernels.columns.items():
        np.testing.assert_array_equal(after.kernels[name], column)


def test_the_environment_is_never_read(capture: Capture, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(capture.to_arrow(), tmp_path / "k.parquet")
    assert b"hf_secret" not in (tmp_path / "k.parquet").read_bytes()
    assert "hf_secret" not in repr(vars(capture))


def test_the_parquet_has_texts_and_meanings(capture: Capture) -> None:
    table = capture.to_arrow()
    assert table["name"][0].as_py() == "[CUDA memcpy Host-to-Device]"
    assert table["activity"][0].as_py() == "copy"
    assert table["operator"].null_count == len(table)
    assert all(field.metadata[b"meaning"] for field in table.schema)


def broken(kind: str, path: Path) -> None:
    nsys_report.write_report(path)
    content = path.read_bytes()
    if kind == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "cut in the header":
        path.write_bytes(content[:10])
    elif kind == "text":
        path.write_text("Time (%),Total Time (ns)\n")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "foreign":
        path.unlink()
        with closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE photos (id INTEGER)")
    elif kind == "garbled":
        path.write_bytes(content[:100] + bytes(3) * 4000 + content[12100:])


@pytest.mark.parametrize("kind", ["cut", "cut in the header", "text", "empty", "foreign", "garbled"])
def test_a_broken_or_foreign_file_gives_one_sentence(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    broken(kind, path)
    with pytest.raises(InputError) as caught:
        read_capture(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message


def test_a_report_that_was_not_exported_names_the_command(tmp_path: Path) -> None:
    path = tmp_path / "r.nsys-rep"
    path.write_bytes(b"\x00\x01")
    with pytest.raises(InputError) as caught:
        read_capture(path)
    assert caught.value.hint is not None
    assert "nsys export --type sqlite" in caught.value.hint
    with pytest.raises(InputError, match="there is no file"):
        read_capture(tmp_path / "none.sqlite")


def test_statistics_of_nothing_and_of_one() -> None:
    assert len(statistics(np.empty(0, np.int64), np.empty(0))) == 0
    single = statistics(np.array([3]), np.array([2.0]))
    assert (single["total"][0], single["median"][0]) == (2.0, 2.0)
    assert np.isnan(single["deviation"][0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE NVTX_EVENTS SET start = 'abc'", "holds a value that is no number"),
        ("UPDATE NVTX_EVENTS SET globalTid = 'x'", "NVTX_EVENTS holds a value that is no number"),
        ("UPDATE TARGET_INFO_GPU SET cuDevice = 'x'", "TARGET_INFO_GPU holds a value that is no number"),
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN end", "the column end of CUPTI_ACTIVITY_KIND_KERNEL"),
        ("DROP TABLE StringIds", "StringIds is missing"),
    ],
)
def test_what_is_wrong_inside_is_said_too(change: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    nsys_report.write_report(path)
    with closing(sqlite3.connect(path)) as database:
        database.execute(change)
        database.commit()
    with pytest.raises(InputError, match=message):
        read_capture(path)


def test_a_name_that_is_missing_is_not_passed_off_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    nsys_report.write_report(path)
    with closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM StringIds")
        database.commit()
    capture = read_capture(path)
    assert {capture.names[code] for code in capture.kernels_of(0)["name"]} >= {"(name 7 is missing)"}
    assert len(by_name(capture, "kernels")) == 7
