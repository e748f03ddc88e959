"""Which global ranks talk to each other: the members of every group of a training job.

Ranks are numbered as Megatron-Core numbers them (`core/parallel_state.py`, order `tp-cp-ep-dp-pp`): within a pipeline
stage tensor-parallel neighbours come first, then context-parallel ones, then data-parallel ones; experts see the same
ranks as `experts_tp x ep x experts_dp`; stages follow each other.
"""

from windtunnel.errors import InputError
from windtunnel.training.layers.rank import Group, Rank


def group_ranks(rank: Rank, group: Group, number: int) -> tuple[int, ...]:
    """Return the ranks of the `group` that the global rank `number` belongs to, in the group's order.

    Raises:
        InputError: the job has no such rank.
    """
    known = rank.setup.degrees
    if not 0 <= number < known.num_devices:
        raise InputError(f"the job has ranks 0 to {known.num_devices - 1}; there is no rank {number}")
    per_stage = known.num_devices // known.pp
    stage, local = divmod(number, per_stage)
    if group is Group.PIPELINE:
        return tuple(range(local, known.num_devices, per_stage))
    if group is Group.EMBEDDING:
        return tuple(sorted({local, local + (known.pp - 1) * per_stage}))
    num_ranks, stride = rank.layout(group)
    first = stage * per_stage + local - (local // stride) % num_ranks * stride
    return tuple(range(first, first + num_ranks * stride, stride))


def stage_of_rank(rank: Rank, number: int) -> int:
    """Return the pipeline stage of a global rank."""
    known = rank.setup.degrees
    return number // (known.num_devices // known.pp)
