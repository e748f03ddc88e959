"""Logs of nccl-tests: times, ranks and hosts; logs that say nothing certain are refused."""

from pathlib import Path

import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.formats.nccl_tests import read_nccl_log

TITLES = """#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
# Times of two sizes on eight H100 as published (benchmarks/collective_accuracy.py), in a log of nccl-tests 2.17.
LOG = (
    "# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807\n"
    "# Collective test starting: all_reduce_perf\n"
    "# nThread 1 nGpus 1 minBytes 0 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1\n"
    "#\n# Using devices\n"
    + "".join(
        f"#  Rank {rank:2d} Group  0 Pid {1887 + rank:6d} on   worker-{rank // 4} device  {rank % 4} [0000:8d:00] "
        "NVIDIA H100 80GB HBM3\n"
        for rank in range(8)
    )
    + "worker-0:1887:1887 [0] NCCL INFO Bootstrap : Using eth0\n"
    + TITLES
    + """\
           0             0     float     sum      -1     5.70    0.00    0.00      0     5.54    0.00    0.00      0
     1048576        262144     float     sum      -1    27.37   38.31   67.04      0    26.90   38.98   68.22      0
   134217728      33554432     float     sum      -1    586.4  228.88  400.53      0    585.1  229.39  401.43    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 233.8
"""
)


def read(tmp_path: Path, text: str, op: str | None = None):
    path = tmp_path / "test.log"
    path.write_text(text)
    return read_nccl_log(path, op)


def test_times_out_of_place_are_read_with_what_ran(tmp_path):
    log = read(tmp_path, LOG)
    assert (log.op, log.num_ranks, log.num_hosts, log.gpu) == ("all_reduce", 8, 2, "NVIDIA H100 80GB HBM3")
    assert log.seconds == pytest.approx({2**20: 27.37e-6, 2**27: 586.4e-6})


def test_logs_of_rccl_tests(tmp_path):
    """ROCm names the GPU as HIP does, with a function in its address, or not at all."""
    rocm = LOG.replace(" Group  0", "").replace(":00] NVIDIA H100 80GB HBM3", ":00.0] AMD Instinct MI300X")
    log = read(tmp_path, rocm)
    assert catalog.device(log.gpu).name == "mi300x"
    nameless = read(tmp_path, LOG.replace(" NVIDIA H100 80GB HBM3", ""))
    assert (nameless.gpu, nameless.num_ranks, nameless.num_hosts) == ("", 8, 2)
    assert nameless.seconds == log.seconds


def test_a_log_of_before_2_13_has_no_root_and_does_not_name_its_program(tmp_path):
    old = (
        LOG.replace("# Collective test starting: all_reduce_perf\n", "")
        .replace("sum      -1", "sum")
        .replace(" Group  0", "")
    )
    assert read(tmp_path, old, "reduce_scatter").seconds == read(tmp_path, LOG).seconds
    with pytest.raises(InputError, match="does not name its program"):
        read(tmp_path, old)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Rank  1 ", "Rank  0 ", "8 ranks, which are not two or more from 0 on"),
        (LOG[: LOG.index(TITLES)], "", "no log of nccl-tests"),
        ("device  3 [0000:8d:00] NVIDIA H100", "device  3 [0000:8d:00] NVIDIA H200", "several kinds of GPU"),
        ("67.04      0    26.90", "67.04     12    26.90", "12 values were wrong"),
        ("  585.1  229.39  401.43    N/A", "", "not all of its columns"),
        ("27.37", " 0.00", "the time is 0.00 us"),
        ("all_reduce_perf", "all_reduce_perf all_gather_perf", "give the log of one program"),
        (LOG[LOG.index(TITLES) :], "", "no row with a size above 0"),
    ],
)
def test_a_log_that_says_nothing_certain_is_refused(tmp_path, old, new, message):
    with pytest.raises(InputError) as error:
        read(tmp_path, LOG.replace(old, new, 1))
    assert message in f"{error.value.message} {error.value.hint}"
