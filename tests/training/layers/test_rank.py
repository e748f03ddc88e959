import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.schema import decode
from windtunnel.training.job import TrainingJob
from windtunnel.training.layers.rank import Group, Rank, group_ranks
from windtunnel.training.setup import resolve

MIXTRAL = "mixtral-8x7b"
powers = st.sampled_from([1, 2, 4])


def rank_of(**parallelism: object) -> Rank:
    job = {
        "device": "h100_sxm",
        "sequence_tokens": 4096,
        "global_batch": 64,
        "model": MIXTRAL,
        "parallelism": parallelism,
    }
    return Rank(resolve(decode(job, TrainingJob)))


def every(rank: Rank, group: Group) -> set[tuple[int, ...]]:
    return {group_ranks(rank, group, number) for number in range(rank.setup.degrees.num_devices)}


def test_groups_of_sixteen_ranks_are_megatrons() -> None:
    # AICB's copy of Megatron's RankGenerator, recorded for w16 t2 p2 e2 with experts that tensor ranks share.
    rank = rank_of(tp=2, pp=2, dp=4, ep=2, experts_tp=2)
    assert {(0, 1), (2, 3), (14, 15)} <= every(rank, Group.TENSOR)
    assert {(0, 2), (1, 3), (4, 6)} <= every(rank, Group.EXPERTS)
    assert {(0, 2, 4, 6), (9, 11, 13, 15)} <= every(rank, Group.DATA)
    assert (0, 4) in every(rank, Group.EXPERTS_DATA)
    assert (0, 8) in every(rank, Group.PIPELINE)


def test_context_parallel_ranks_lie_between_tensor_and_data_parallel_ones() -> None:
    rank = rank_of(tp=2, cp=2, dp=2)
    assert every(rank, Group.CONTEXT) == {(0, 2), (1, 3), (4, 6), (5, 7)}
    assert every(rank, Group.DATA) == {(0, 2, 4, 6), (1, 3, 5, 7)}


@settings(max_examples=25)
@given(powers, powers, powers, powers, st.sampled_from([1, 2]))
def test_every_group_is_a_partition_of_all_ranks(tp: int, cp: int, pp: int, dp: int, ep: int) -> None:
    if tp * cp * dp % ep:
        ep = 1
    rank = rank_of(tp=tp, cp=cp, pp=pp, dp=dp, ep=ep)
    known = rank.setup.degrees
    for group in Group:
        found = every(rank, group)
        members = [number for ranks in found for number in ranks]
        if group is not Group.EMBEDDING:
            assert sorted(members) == list(range(known.num_devices))
        for ranks in found:
            assert all(group_ranks(rank, group, number) == ranks for number in ranks)
            if group not in (Group.PIPELINE, Group.EMBEDDING):
                assert len(ranks) == rank.layout(group)[0]


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(InputError, match="ranks 0 to 7; there is no rank 8"):
        group_ranks(rank_of(tp=2, dp=4), Group.TENSOR, 8)


def test_first_and_last_stage_lie_a_whole_pipeline_apart() -> None:
    rank = rank_of(tp=4, pp=4)
    first, last = group_ranks(rank, Group.EMBEDDING, 0)
    assert rank.layout(Group.EMBEDDING) == (2, last - first) == (2, 12)
    assert rank.collective(Group.EMBEDDING, "all_reduce", 1.0).span_nodes == 2
    assert rank.collective(Group.PIPELINE, "send_recv", 1.0).span_nodes == 1
