"""Find every degree of a training job's parallelism, and check the relations between them.

Degrees follow Megatron-Core (`core/parallel_state.py`): `tp x cp x pp x dp = num_devices`; experts see the same devices
as `experts_tp x ep x experts_dp x pp`. `dp` is the dense degree; data-parallel groups of dense weights span `dp x cp`.
"""

from dataclasses import dataclass

from windtunnel.errors import InputError
from windtunnel.limits import check_size
from windtunnel.training.job import V_SCHEDULES, TrainingJob, TrainingParallelism

MAX_MICROBATCHES = 1_000_000
"""Most micro-batches of a step on each rank."""


@dataclass(frozen=True)
class Degrees:
    """Every degree of a job; all relations between them hold."""

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
    def replicas(self) -> int:
        """Copies of the sharded state (HSDP); 1 where all data-parallel ranks share one."""
        return self.dp * self.cp // self.shard_group


def degrees(job: TrainingJob) -> Degrees:
    """Return every degree of `job`, from those that it gives.

    Relations that hold exactly:
        num_devices = tp x cp x pp x dp
        num_devices / pp = experts_tp x ep x experts_dp
        global_batch = dp x micro_batch x num_microbatches
        the shard group divides dp x cp.

    InputError names the relation that is violated and both of its sides.
    """
    given = job.parallelism
    num_devices, dp = _devices(job)
    num_microbatches = _divide(
        "global_batch = dp x micro_batch x num_microbatches",
        job.global_batch,
        dp * job.micro_batch,
        f"dp is {dp}: raise parallelism.tp, parallelism.pp or parallelism.cp, or let --search find the best layout",
    )
    if num_microbatches > MAX_MICROBATCHES:
        raise InputError(
            f"a step of {num_microbatches:,} microbatches on each rank is not simulated; at most {MAX_MICROBATCHES:,}",
            "reduce global_batch, or give more devices or a larger micro_batch",
        )
    check_size(tasks=2.0 * num_microbatches * given.pp * given.virtual_stages)
    formula = f"global_batch / (dp x micro_batch) = {job.global_batch} / ({dp} x {job.micro_batch})"
    _check_given("num_microbatches", job.num_microbatches, num_microbatches, formula)
    experts_tp, experts_dp = _experts_degrees(given, num_devices)
    shard_group = job.sharding.group or dp * given.cp
    _divide("dp x cp = shard group x replicas", dp * given.cp, shard_group)
    return Degrees(
        num_devices=num_devices,
        tp=given.tp,
        cp=given.cp,
        pp=given.pp,
        virtual_stages=2 if job.schedule in V_SCHEDULES else given.virtual_stages,
        dp=dp,
        ep=given.ep,
        experts_tp=experts_tp,
        experts_dp=experts_dp,
        shard_group=shard_group,
        micro_batch=job.micro_batch,
        num_microbatches=num_microbatches,
    )


def _devices(job: TrainingJob) -> tuple[int, int]:
    """Return the number of devices and the dense data-parallel degree."""
    given = job.parallelism
    model_ranks = given.tp * given.cp * given.pp
    dp = given.dp or 1
    if given.dp is None and job.num_devices:
        dp = _divide("num_devices = tp x cp x pp x dp", job.num_devices, model_ranks)
    num_devices = model_ranks * dp
    formula = f"tp x cp x pp x dp = {given.tp} x {given.cp} x {given.pp} x {dp}"
    hint = "leave dp out: it follows from num_devices"
    _check_given("num_devices", job.num_devices, num_devices, formula, hint)
    return num_devices, dp


def _experts_degrees(given: TrainingParallelism, num_devices: int) -> tuple[int, int]:
    """Return `experts_tp` and `experts_dp`."""
    experts_tp = given.experts_tp or (given.tp if given.ep == 1 else 1)
    per_stage = num_devices // given.pp
    experts_dp = _divide("num_devices / pp = experts_tp x ep x experts_dp", per_stage, experts_tp * given.ep)
    formula = f"num_devices / (pp x experts_tp x ep) = {num_devices} / ({given.pp} x {experts_tp} x {given.ep})"
    _check_given("experts_dp", given.experts_dp, experts_dp, formula)
    return experts_tp, experts_dp


def _check_given(name: str, given: int | None, value: int, formula: str, hint: str | None = None) -> None:
    """Raise InputError where a job gives another `value` than its other degrees do by `formula`."""
    if given not in (None, value):
        message = f"{name} = {given}, but {formula} = {value}"
        raise InputError(message, hint or f"leave {name} out: it follows")


def _divide(relation: str, total: int, part: int, hint: str = "let --search find the layouts that fit") -> int:
    """Return `total / part` where it is a whole number; `relation` names the relation that it would violate."""
    quotient, rest = divmod(total, part)
    if rest or quotient == 0:
        raise InputError(f"{relation} does not hold: {total} is not a multiple of {part}", hint)
    return quotient
