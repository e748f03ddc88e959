"""Every degree of a training job's parallelism, and the relations that must hold between them exactly.

Degrees follow Megatron-Core (`core/parallel_state.py`): `tp x cp x pp x dp = num_devices`; experts see the same devices
as `experts_tp x ep x experts_dp x pp`. `dp` is the dense degree; data-parallel groups of dense weights span `dp x cp`.
"""

from dataclasses import dataclass

from windtunnel.errors import InputError
from windtunnel.training.job import V_SCHEDULES, TrainingJob


@dataclass(frozen=True)
class Degrees:
    """Every degree of a job, checked: what divides what, exactly."""

    num_devices: int
    tp: int
    cp: int
    pp: int
    virtual_stages: int
    dp: int
    ep: int
    experts_tp: int
    experts_dp: int
    shard_group: int
    """Ranks over which one copy of dense weights or their optimizer state is divided."""
    micro_batch: int
    num_microbatches: int

    @property
    def num_chunks(self) -> int:
        """Chunks of layers in the whole pipeline."""
        return self.pp * self.virtual_stages

    @property
    def dense_dp(self) -> int:
        """Ranks that hold the same dense weights: `dp x cp`."""
        return self.dp * self.cp

    @property
    def replicas(self) -> int:
        """Copies of the sharded state (HSDP); 1 where all data-parallel ranks share one."""
        return self.dense_dp // self.shard_group


def degrees(job: TrainingJob) -> Degrees:
    """Every degree of `job`, from those that it gives.

    The relations that must hold exactly:
        num_devices = tp x cp x pp x dp
        num_devices / pp = experts_tp x ep x experts_dp
        global_batch = dp x micro_batch x num_microbatches
        the shard group divides dp x cp.

    Raises:
        InputError: names the relation that is violated and both of its sides.
    """
    at = job.parallelism
    model_ranks = at.tp * at.cp * at.pp
    dp = at.dp or (_divide("num_devices = tp x cp x pp x dp", job.num_devices, model_ranks) if job.num_devices else 1)
    num_devices = model_ranks * dp
    if job.num_devices not in (None, num_devices):
        raise InputError(
            f"num_devices = {job.num_devices}, but tp x cp x pp x dp = {at.tp} x {at.cp} x {at.pp} x {dp} "
            f"= {num_devices}",
            "leave dp out: it follows from num_devices",
        )
    num_microbatches = _divide(
        "global_batch = dp x micro_batch x num_microbatches", job.global_batch, dp * job.micro_batch
    )
    if job.num_microbatches not in (None, num_microbatches):
        raise InputError(
            f"num_microbatches = {job.num_microbatches}, but global_batch / (dp x micro_batch) = {job.global_batch} / "
            f"({dp} x {job.micro_batch}) = {num_microbatches}",
            "leave num_microbatches out: it follows",
        )
    experts_tp = at.experts_tp or (at.tp if at.ep == 1 else 1)
    per_stage = num_devices // at.pp
    experts_dp = _divide("num_devices / pp = experts_tp x ep x experts_dp", per_stage, experts_tp * at.ep)
    if at.experts_dp not in (None, experts_dp):
        raise InputError(
            f"experts_dp = {at.experts_dp}, but num_devices / (pp x experts_tp x ep) = {num_devices} / "
            f"({at.pp} x {experts_tp} x {at.ep}) = {experts_dp}",
            "leave experts_dp out: it follows",
        )
    shard_group = job.sharding.group or dp * at.cp
    _divide("dp x cp = shard group x replicas", dp * at.cp, shard_group)
    return Degrees(
        num_devices=num_devices,
        tp=at.tp,
        cp=at.cp,
        pp=at.pp,
        virtual_stages=2 if job.schedule in V_SCHEDULES else at.virtual_stages,
        dp=dp,
        ep=at.ep,
        experts_tp=experts_tp,
        experts_dp=experts_dp,
        shard_group=shard_group,
        micro_batch=job.micro_batch,
        num_microbatches=num_microbatches,
    )


def dense_dp_of(world: int, pp: int, ep: int, tp: int, experts_dp: int) -> int:
    """The dense data-parallel degree where a job is described as `world = experts_dp x pp x ep x tp`.

    That convention puts expert parallelism outside data parallelism; ours inside: `dp = experts_dp x ep`.

    Raises:
        InputError: the product is not `world`.
    """
    if experts_dp * pp * ep * tp != world:
        raise InputError(
            f"world = {world}, but experts_dp x pp x ep x tp = {experts_dp} x {pp} x {ep} x {tp} "
            f"= {experts_dp * pp * ep * tp}"
        )
    return experts_dp * ep


def _divide(relation: str, whole: int, part: int) -> int:
    """`whole / part` where it is a whole number; `relation` names what it would violate."""
    quotient, rest = divmod(whole, part)
    if rest or quotient == 0:
        raise InputError(f"{relation} does not hold: {whole} is not a multiple of {part}")
    return quotient
