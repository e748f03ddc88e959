"""Collectives between processes of this machine."""

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.lab.profile.collectives import (
    CollectivesPlan,
    TimedCollective,
    collective_tables,
    sizes_between,
    time_collectives,
)
from windtunnel.lab.profile.samples import statistics_of


def timed(op: str, workers: int, size: int, seconds: float) -> TimedCollective:
    return TimedCollective(op, workers, 1, size, statistics_of([seconds] * 3))


@pytest.mark.parametrize(
    ("op", "workers", "factor"),
    [
        ("all_reduce", 8, 2 * 7 / 8),
        ("all_gather", 8, 7 / 8),
        ("reduce_scatter", 4, 3 / 4),
        ("all_to_all", 2, 1 / 2),
        ("send_recv", 2, 1.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(op: str, workers: int, factor: float) -> None:
    """doc/PERFORMANCE.md of nccl-tests: 2 (n - 1) / n of an all-reduce's size crosses each rank's link."""
    one = timed(op, workers, 1 << 20, 1e-3)
    assert one.algorithm_bytes_per_s == pytest.approx((1 << 20) / 1e-3)
    assert one.bus_bytes_per_s == pytest.approx(factor * (1 << 20) / 1e-3)


def test_a_single_worker_has_no_row() -> None:
    (table,) = collective_tables([timed("all_reduce", n, 1024, 1e-4 * n) for n in (1, 2, 4)], "test")
    np.testing.assert_array_equal(table.sites["num_ranks"], [2, 4])
    np.testing.assert_allclose(table.seconds, [2e-4, 4e-4])


def test_sizes() -> None:
    assert sizes_between(1024, 4096) == (1024, 2048, 4096)
    assert sizes_between(1000, 5000) == (1000, 2000, 4000, 5000)
    with pytest.raises(InputError, match="there are no sizes from 8 to 4 bytes"):
        sizes_between(8, 4)


def test_unknown_collectives_are_refused() -> None:
    with pytest.raises(InputError, match="there is no collective 'all_redu'"):
        CollectivesPlan(("all_redu",), (2,), (8,), "gloo", 8)


@pytest.mark.slow
def test_two_processes_over_gloo() -> None:
    pytest.importorskip("torch", reason="torch is not installed; collectives run on its gloo")
    ops = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
    timings = time_collectives(CollectivesPlan(ops, (2,), (1024, 1 << 18), "gloo", 8), print)
    assert [(row.op, row.size_bytes) for row in timings] == [(op, size) for op in ops for size in (1024, 1 << 18)]
    assert all(row.statistics.median_s > 0 for row in timings)
    assert len(collective_tables(timings, "test")) == 5
