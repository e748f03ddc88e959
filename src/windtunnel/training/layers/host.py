"""Work of the host in training: copies over the link to its memory, and the update of offloaded parameters."""

from collections.abc import Iterator
from dataclasses import dataclass

from windtunnel.model import operators as ops
from windtunnel.training.layers.part import Task
from windtunnel.training.layers.rank import BF16_BYTES, FP32_BYTES, Group, Rank


@dataclass(frozen=True)
class HostCopy(ops.Op):
    """A copy between a device and its host's memory."""

    kind = "host_copy"
    axes = ("size_bytes",)
    size_bytes: float

    @property
    def flops(self) -> ops.Size:
        return 0.0

    @property
    def num_bytes(self) -> ops.Size:
        return self.size_bytes


@dataclass(frozen=True)
class HostUpdate(ops.Op):
    """Adam on a host's processors, of the parameters of all its ranks at once: each has its share of the memory."""

    kind = "host_update"
    axes = ("num_parameters",)
    num_parameters: float
    parameters_per_s: float | None
    """None: as measured."""

    @property
    def flops(self) -> ops.Size:
        return 0.0

    @property
    def num_bytes(self) -> ops.Size:
        """Gradient, master weight and two moments are read, the last three written, all in fp32."""
        return 7 * FP32_BYTES * self.num_parameters


def offloads(rank: Rank, what: str = "optimizer") -> bool:
    """Whether the optimizer's state, or with `parameters` those too, wait in the host's memory."""
    given = rank.setup.job.sharding.offload
    return given != "none" if what == "optimizer" else given == what


def copy(name: str, num_bytes: float, beside: str | None = None) -> Task:
    """Return a copy as a task."""
    return Task(name, HostCopy(num_bytes), 1.0, Group.HOST, beside)


def gradient_copies(rank: Rank, num_owned: float, beside: str | None = None) -> Iterator[Task]:
    """Yield the copies of reduced gradients to the host after one micro-batch's backward pass.

    DeepSpeed's first sum goes down in 16 bit, and each further one up and down again; the last, of which fp32 goes
    down, makes it 4 bytes a micro-batch (runtime/zero/stage_1_and_2.py, `async_accumulate_grad_in_cpu_via_gpu` and
    `async_inplace_copy_grad_to_fp32_buffer_from_gpu`). FSDP2 reduces and copies fp32 (torch/distributed/fsdp/
    _fully_shard/_fsdp_collectives.py, `foreach_reduce`). Megatron copies its sums once, in the optimizer's step.
    """
    if offloads(rank) and rank.setup.job.framework != "megatron":
        yield copy("gradients_to_host", FP32_BYTES * num_owned, beside)


def parameter_copies(rank: Rank, num_owned: float, each_bytes: float, beside: str | None = None) -> Iterator[Task]:
    """Yield the copy of offloaded parameters to the device before they are gathered; FSDP2's are in fp32."""
    if offloads(rank, "parameters"):
        is_fp32 = rank.setup.job.framework == "fsdp2" and rank.setup.job.lora is None
        yield copy("parameters_from_host", (FP32_BYTES if is_fp32 else each_bytes) * num_owned, beside)


def update_tasks(rank: Rank, num_owned: float) -> Iterator[Task]:
    """Yield a step of an offloaded optimizer; then updated parameters go to the device in 16 bit."""
    setup = rank.setup
    if setup.job.framework == "megatron":
        yield copy("gradients_to_host", FP32_BYTES * num_owned)
    ranks_of_host = min(setup.node.num_devices, setup.degrees.num_devices)
    update = HostUpdate(max(num_owned, 1.0) * ranks_of_host, setup.job.sharding.host_parameters_per_s)
    yield Task("host_optimizer", update)
    if not offloads(rank, "parameters"):
        yield copy("parameters_to_device", BF16_BYTES * num_owned)


def host_bytes(rank: Rank, num_owned: float, num_kept: float, each_bytes: float) -> float:
    """Return the bytes of a rank in its host's memory: state and gradient in fp32 of what it owns, 16-bit gradients
    where DeepSpeed sums them or parameters where they are copied from, and `num_kept` parameters that it keeps
    there.
    """
    if not offloads(rank):
        return 0.0
    sums = BF16_BYTES if rank.setup.job.framework == "deepspeed" and rank.setup.degrees.num_microbatches > 1 else 0.0
    buffer = 0.0 if offloads(rank, "parameters") else BF16_BYTES
    return num_owned * (4 * FP32_BYTES + sums + buffer) + num_kept * each_bytes
