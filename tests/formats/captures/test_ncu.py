"""Nsight Compute's CSV: both pages, units scaled or not, lines of the profiler around it, and bad files."""

from pathlib import Path

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.formats.captures.capture import CLASSES, read_capture
from windtunnel.formats.captures.kernel_time import device_time, kernel_table
from windtunnel.formats.captures.ncu import read_ncu

FIXED = ",".join(
    f'"{name}"'
    for name in (
        "ID",
        "Process ID",
        "Process Name",
        "Host Name",
        "Kernel Name",
        "Context",
        "Stream",
        "Block Size",
        "Grid Size",
        "Device",
        "CC",
    )
)
LAUNCH = (
    '"{id}","77","python","127.0.0.1","void gemm_kernel<128, 64>(Params)","1","7","(128, 1, 1)","(16, 2, 1)","0","9.0"'
)
METRICS = {
    "gpu__time_duration.sum": ("usecond", "31.872000", "nsecond", "31872"),
    "dram__bytes_read.sum": ("Mbyte", "4.195712", "byte", "4,195,712"),
    "dram__bytes_write.sum": ("Kbyte", "69.376000", "byte", "69,376"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "83.84", "%", "83.84"),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "77.67", "%", "77.67"),
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": ("%", "n/a", "%", ""),
    "launch__registers_per_thread": ("register/thread", "22", "register/thread", "22"),
    "smsp__cycles_elapsed.avg.per_second": ("cycle/nsecond", "0.94", "cycle/second", "940,000,000"),
    "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum.per_cycle_elapsed": ("inst/cycle", "100", "inst/cycle", "100"),
    "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum.per_cycle_elapsed": ("inst/cycle", "20", "inst/cycle", "20"),
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum.per_cycle_elapsed": ("inst/cycle", "40", "inst/cycle", "40"),
    "smsp__sass_thread_inst_executed_op_dadd_pred_on.sum.per_cycle_elapsed": ("inst/cycle", "0", "inst/cycle", "0"),
    "smsp__sass_thread_inst_executed_op_dmul_pred_on.sum.per_cycle_elapsed": ("inst/cycle", "0", "inst/cycle", "0"),
    "smsp__sass_thread_inst_executed_op_dfma_pred_on.sum.per_cycle_elapsed": ("inst/cycle", "0", "inst/cycle", "0"),
}
"""Metric -> unit and value as `ncu` scales them, and with `--print-units base`."""


def raw_page(base: bool, num_launches: int = 2) -> str:
    column = 2 * base
    header = ",".join([FIXED, *(f'"{name}"' for name in METRICS)])
    units = ",".join(['""'] * 11 + [f'"{cells[column]}"' for cells in METRICS.values()])
    values = [f'"{cells[column + 1]}"' for cells in METRICS.values()]
    launches = [",".join([LAUNCH.format(id=number), *values]) for number in range(num_launches)]
    return "\n".join([header, units, *launches, ""])


DETAILS = "\n".join(
    [
        f'{FIXED},"Section Name","Metric Name","Metric Unit","Metric Value","Rule Name","Rule Type","Rule Description"',
        f'{LAUNCH.format(id=0)},"GPU Speed Of Light Throughput","Memory Throughput","%","46.36",',
        f'{LAUNCH.format(id=0)},"GPU Speed Of Light Throughput","Duration","us","31.87",',
        f'{LAUNCH.format(id=0)},"GPU Speed Of Light Throughput","Compute (SM) Throughput","%","77.67",',
        f'{LAUNCH.format(id=0)},"SpeedOfLight","","","","SOLBottleneck","WRN","compute is heavily used"',
        f'{LAUNCH.format(id=0)},"Memory Workload Analysis","Memory Throughput","Gbyte/second","133.8",',
        f'{LAUNCH.format(id=0)},"Occupancy","Achieved Occupancy","%","83.84",',
        "",
    ]
)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "counters.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("base", [False, True], ids=["scaled", "base"])
def test_scaled_units_mean_the_same_as_base_units(base: bool, tmp_path: Path) -> None:
    capture = read_capture(write(tmp_path, raw_page(base)))
    kernels = capture.kernels
    assert kernels["duration_s"] == pytest.approx([31.872e-6] * 2)
    assert kernels["num_bytes"] == pytest.approx([4195712 + 69376] * 2)
    # (100 + 20 + 2 x 40) a cycle at 0.94 GHz
    assert kernels["flops"] == pytest.approx([200 * 0.94e9 * 31.872e-6] * 2)
    assert kernels["occupancy_fraction"] == pytest.approx([0.8384] * 2)
    assert kernels["compute_fraction"] == pytest.approx([0.7767] * 2)
    assert np.isnan(kernels["memory_fraction"]).all()
    assert (kernels["registers"][0], kernels["grid_x"][0], kernels["block_x"][0]) == (22, 16, 128)
    assert CLASSES[kernels["kernel_class"][0]] == "gemm"


def test_the_details_page_is_read_too(tmp_path: Path) -> None:
    kernels = read_ncu(write(tmp_path, DETAILS)).kernels
    assert len(kernels) == 1
    assert kernels["duration_s"][0] == pytest.approx(31.87e-6)
    assert kernels["memory_fraction"][0] == pytest.approx(0.4636)
    assert np.isnan(kernels["flops"][0])


def test_lines_of_the_profiler_around_the_table_are_passed_over(tmp_path: Path) -> None:
    text = f"==PROF== Connected to process 77\n{raw_page(True)}==PROF== Disconnected\n"
    assert len(read_capture(write(tmp_path, text)).kernels) == 2


def test_operations_of_tensor_cores_make_the_work_unknown(tmp_path: Path) -> None:
    text = raw_page(True).replace("dram__bytes_write.sum", "sm__inst_executed_pipe_tensor.sum")
    assert np.isnan(read_ncu(write(tmp_path, text)).kernels["flops"]).all()


def test_counters_have_durations_and_no_timeline(tmp_path: Path) -> None:
    capture = read_ncu(write(tmp_path, raw_page(True)))
    assert device_time(capture) == {}
    assert "repeats kernels" in capture.notes[0]
    table = kernel_table(capture)
    assert table["bytes_per_s"][0] == pytest.approx(4265088 / 31.872e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (raw_page(True)[:-40], "is cut off"),
        (DETAILS[: DETAILS.index("python") + 3], "a row is not whole"),
        (raw_page(True, num_launches=0), "holds no kernel"),
        (FIXED + "\n", "holds no kernel"),
        (raw_page(True).replace("gpu__time_duration.sum", "gpu__nothing"), "has no gpu__time_duration.sum"),
        ("kernel,time\ngemm,3\n", "is no capture that is known"),
        (FIXED.replace('"Grid Size",', "") + "\n", "has no column Grid Size"),
    ],
)
def test_a_broken_or_foreign_file_gives_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_capture(write(tmp_path, text))
    assert "\n" not in caught.value.message


def test_a_report_that_was_not_exported_names_the_command(tmp_path: Path) -> None:
    (tmp_path / "p.ncu-rep").write_bytes(b"NVR\x00")
    with pytest.raises(InputError) as caught:
        read_capture(tmp_path / "p.ncu-rep")
    assert "ncu --import p.ncu-rep --csv" in str(caught.value.hint)
