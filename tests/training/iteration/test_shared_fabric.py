"""Jobs that share a fabric: alone they are what they are alone, beside each other they get their max-min fair share."""

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.network.collectives.run import groups_seconds
from windtunnel.network.paths import Paths
from windtunnel.network.settings import NetworkSettings
from windtunnel.network.topology import fabric_of
from windtunnel.training.iteration.layers import (
    Communication,
    IterationLayer,
    LayerPhase,
    LayerWorkload,
    RankGroup,
    groups_of,
    run_layers,
)
from windtunnel.training.iteration.shared_fabric import max_min_rates, place_jobs, run_jobs

FLOW = NetworkSettings(backend="flow", routing="spray")
NARROW = "dcn_plus:num_gpus=32,gpus_per_leaf=16,num_spines=1,leaf_spine_bytes_per_s=400Gbps"


def job(num_gpus: int = 16, reduce_bytes: int = 2**26, compute_s: float = 0.0, pp: int = 1) -> LayerWorkload:
    nothing = LayerPhase(0.0)
    reduce = Communication("all_reduce", RankGroup.DP, reduce_bytes)
    layer = IterationLayer("gradients", LayerPhase(compute_s), nothing, LayerPhase(0.0, reduce))
    return LayerWorkload("job", 8, 1, pp, 1, 4, num_gpus, 2**20 * (pp > 1), (layer,))


def test_a_job_alone_takes_what_it_takes_alone() -> None:
    fabric = fabric_of("spectrum_x:num_gpus=32")
    for workload in (job(32, compute_s=1e-3), job(32, compute_s=1e-3, pp=2)):
        (alone,) = run_jobs(place_jobs([workload], fabric), fabric, FLOW)
        assert alone.alone_s == pytest.approx(run_layers(workload, fabric, FLOW).total_ns * 1e-9, rel=1e-6)
        assert alone.slowdown == pytest.approx(1.0)


def test_two_jobs_on_a_narrow_uplink_take_as_long_as_their_collectives_at_once() -> None:
    fabric, workload = fabric_of(NARROW), job()
    placed = place_jobs([workload, workload], fabric, "striped")
    shared = run_jobs(placed, fabric, FLOW)
    groups = np.concatenate([each.gpus[groups_of(workload, RankGroup.DP)] for each in placed])
    at_once = groups_seconds(fabric, "all_reduce", 2**26, groups, FLOW)
    for each in shared:
        # Steps of a ring wait for latencies in which the other job has the uplink to itself.
        assert each.shared_s == pytest.approx(at_once, rel=0.05)
        assert each.slowdown == pytest.approx(2.0, rel=0.01)


def test_computation_between_collectives_leaves_the_wire_to_the_other() -> None:
    """Each needs the uplink for less than half of its time: they settle into each other's gaps."""
    fabric = fabric_of(NARROW)
    reduce_s = run_jobs(place_jobs([job(), job()], fabric, "striped"), fabric, FLOW)[0].alone_s
    workload = job(compute_s=3 * reduce_s)
    placed = place_jobs([workload, workload], fabric, "striped")
    shared = run_jobs(placed, fabric, FLOW, num_iterations=50)
    assert all(each.slowdown == pytest.approx(1.0, abs=0.01) for each in shared)


def test_jobs_in_racks_of_their_own_do_not_meet() -> None:
    fabric, workload = fabric_of(NARROW), job()
    for each in run_jobs(place_jobs([workload, workload], fabric, "packed"), fabric, FLOW):
        assert each.slowdown == pytest.approx(1.0)


def test_max_min_rates_fill_the_fullest_link_first() -> None:
    """Three connections on a link of 1, one of them also on a link of 3 with a fourth."""
    one = Paths(np.arange(3, dtype=np.int32), np.array([0, 1, 2, 4]), np.array([0, 0, 0, 1], np.int32), np.zeros(0))
    other = Paths(np.zeros(1, np.int32), np.array([0, 1]), np.array([1], np.int32), np.zeros(0))
    rates = max_min_rates([one, other], np.array([1.0, 3.0]))
    np.testing.assert_allclose(rates[0], 1 / 3)
    np.testing.assert_allclose(rates[1], 3 - 1 / 3)


@pytest.mark.parametrize(
    ("jobs", "placement", "says"),
    [
        ([job(), job(), job()], "packed", "need 6 servers"),
        ([job(4 * 8), job(8, pp=1)], "striped", "need 5 servers"),
        ([job()], "scattered", "no placement 'scattered'"),
    ],
)
def test_jobs_that_cannot_be_placed_are_refused(jobs: list[LayerWorkload], placement: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        place_jobs(jobs, fabric_of(NARROW), placement)


def test_a_job_that_does_nothing_is_refused() -> None:
    fabric = fabric_of(NARROW)
    with pytest.raises(InputError, match="takes no time"):
        run_jobs(place_jobs([job(reduce_bytes=0)], fabric), fabric, FLOW)
