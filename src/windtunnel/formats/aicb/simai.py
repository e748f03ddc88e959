"""AICB's training workloads for SimAI (`.txt`), errors included.

Two generators of AICB disagree with each other: with measured times (`--aiob_enable`) the backward pass of a
tensor-parallel layer communicates little or nothing, without them it does even on one rank
(SimAI_training_workload_generator.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from windtunnel.errors import InputError
from windtunnel.formats.aicb.arguments import TrainingArguments
from windtunnel.formats.aicb.model import EXPERTS, AicbModel, Module, aicb_model, listed_modules
from windtunnel.formats.simai.workload import Block, FilePhase, Header, SimaiWorkload, WorkloadLayer

FP8_SHARE = (1 + 4 / 128) / 2
"""Bytes of an element in fp8 with a 4-byte scale for 128 of them, over those in bf16."""

UNIT = FilePhase(1)
"""One nanosecond: what AICB writes where it has no time."""
NOTHING = FilePhase(0)


@dataclass(frozen=True)
class Sizes:
    """Sizes that the lines repeat."""

    activations: int
    """Bytes of a micro-batch of hidden states in 2-byte elements."""
    parameters: int
    """Elements on a rank, experts included; modules that are listed twice count twice."""
    expert_parameters: int


def simai_training(arguments: TrainingArguments, times_ns: Mapping[str, int] | None) -> SimaiWorkload:
    """Return the workload that AICB generates, with an AIOB file's times (`training_ns`) or without. InputError where
    AICB fails on these arguments."""
    model = aicb_model(arguments)
    _check(arguments, model, has_times=times_ns is not None)
    modules = tuple(listed_modules(model, arguments.enable_sequence_parallel))
    sizes = Sizes(
        activations=2 * arguments.micro_batch * arguments.seq_length * arguments.hidden_size,
        parameters=sum(module.num_parameters for module in modules),
        expert_parameters=sum(module.num_parameters for module in modules if "moe" in module.name),
    )
    if times_ns is None:
        gather = FilePhase(1, "ALLGATHER", 2 * sizes.parameters)
        scatter = FilePhase(1, "REDUCESCATTER", 4 * sizes.parameters)
        head = [WorkloadLayer("grad_norm", gather, UNIT, scatter)]
        if not arguments.enable_sequence_parallel:
            head.append(WorkloadLayer("layernorm", UNIT, FilePhase(1, "ALLREDUCE", 2 * sizes.parameters), UNIT))
        head += _expert_gradients(arguments, sizes)
        vocabulary = FilePhase(1, "ALLREDUCE", arguments.vocab_size * arguments.hidden_size * 2)
        layers = [line for module in modules for line in _untimed_lines(arguments, module.name, sizes)]
        layers.append(WorkloadLayer("embedding_norm", vocabulary, UNIT, UNIT))
        blocks: tuple[Block, ...] = Block(tuple(head)), Block(tuple(layers), arguments.num_microbatches)
    else:
        blocks = _Timed(arguments, sizes, times_ns).blocks(modules)
    return SimaiWorkload(_header(arguments, sizes), (*blocks, Block(_tail(arguments))))


def _check(arguments: TrainingArguments, model: AicbModel, has_times: bool) -> None:
    """Raise InputError where AICB itself fails."""
    if arguments.frame == "DeepSeek" and arguments.enable_sequence_parallel and not has_times:
        raise InputError(
            "AICB has no DeepSeek workload with sequence parallelism and without measured times: it fails with "
            "AttributeError",
            "add --aiob_enable and --comp_filepath",
        )
    has_experts = any(layer.feed_forward.name == EXPERTS for layer in model.layers)
    if has_experts and arguments.enable_sequence_parallel and not arguments.moe_enable:
        raise InputError("AICB fails on experts without --moe_enable", "add --moe_enable")


def _header(arguments: TrainingArguments, sizes: Sizes) -> Header:
    between_stages: int | float = sizes.activations
    if arguments.enable_sequence_parallel:
        between_stages = sizes.activations / arguments.tensor_model_parallel_size
    return Header(
        tp=arguments.tensor_model_parallel_size,
        ep=arguments.expert_model_parallel_size,
        pp=arguments.pipeline_model_parallel,
        vpp=arguments.layers_per_stage,
        num_microbatches=arguments.num_microbatches,
        num_devices=arguments.world_size,
        pp_comm_bytes=between_stages if arguments.pipeline_model_parallel > 1 else 0,
    )


def _tail(arguments: TrainingArguments) -> tuple[WorkloadLayer, ...]:
    """Return the lines of loss and optimizer, once for all micro-batches."""
    loss = FilePhase(0, "ALLREDUCE", arguments.seq_length * arguments.micro_batch * 4)
    flag = FilePhase(0, "ALLREDUCE", 4)
    return (
        *(WorkloadLayer(f"cross_entropy{i}", loss, NOTHING, NOTHING) for i in (1, 2, 3)),
        *(WorkloadLayer(f"optimizer{i}", flag, NOTHING, NOTHING) for i in (1, 2, 3, 4)),
    )


def _expert_gradients(arguments: TrainingArguments, sizes: Sizes) -> tuple[WorkloadLayer, ...]:
    """Return the lines of the experts' gradients, written for dense models too, with 0 bytes."""
    if arguments.expert_model_parallel_size == arguments.data_parallel:
        return ()
    gather = FilePhase(1, "ALLGATHER_DP_EP", 2 * sizes.expert_parameters)
    scatter = FilePhase(1, "REDUCESCATTER_DP_EP", 4 * sizes.expert_parameters)
    return (WorkloadLayer("moe_grad_norm1", UNIT, UNIT, gather), WorkloadLayer("moe_grad_norm2", UNIT, UNIT, scatter))


def _expert_phases(
    arguments: TrainingArguments, sizes: Sizes, leave_out_single: bool
) -> tuple[tuple[FilePhase, FilePhase], ...]:
    """Return the five collectives of a layer of experts, forward and backward; sizes are given even without one.

    `leave_out_single` drops the collectives within a group of one rank.
    """
    tp, ep = arguments.tensor_model_parallel_size, arguments.expert_model_parallel_size
    has_tp, has_ep = tp > 1 or not leave_out_single, ep > 1 or not leave_out_single
    routed = sizes.activations * arguments.moe_router_topk
    sent = routed // tp
    dispatched = int(sent * FP8_SHARE) if arguments.frame == "DeepSeek" else sent
    counts = 2 * ep * arguments.num_experts * tp
    exchange = FilePhase(1, "ALLTOALL_EP" if has_ep else "NONE", sent)
    gather = FilePhase(1, "ALLGATHER" if has_tp else "NONE", routed)
    scatter = FilePhase(1, "REDUCESCATTER" if has_tp else "NONE", routed)
    return (
        (FilePhase(1, "ALLGATHER" if has_tp or has_ep else "NONE", counts), UNIT),
        (exchange._replace(size_bytes=dispatched), exchange),
        (gather, scatter),
        (scatter, gather),
        (exchange, exchange),
    )


def _untimed_lines(arguments: TrainingArguments, name: str, sizes: Sizes) -> Iterable[WorkloadLayer]:
    again = 2 if arguments.recompute_activations and "attention" in name else 1
    size = sizes.activations * again
    if not arguments.enable_sequence_parallel:
        # The collective is written even for one rank.
        backward = FilePhase(1, "ALLREDUCE", sizes.activations)
        yield WorkloadLayer(name, FilePhase(1, "ALLREDUCE", size), backward, UNIT)
        return
    if "embedding" in name:
        silent = FilePhase(1, "NONE", sizes.activations)
        yield WorkloadLayer(name, silent, silent, UNIT)
    elif "row" in name:
        yield WorkloadLayer(name, FilePhase(1, "REDUCESCATTER", size), FilePhase(1, "NONE", sizes.activations), UNIT)
    elif "column" in name:
        yield WorkloadLayer(name, FilePhase(1, "ALLGATHER", size), UNIT, UNIT)
    elif "moelayer" in name:
        for forward, backward in _expert_phases(arguments, sizes, leave_out_single=False):
            yield WorkloadLayer(name, forward, backward, UNIT)


class _Timed:
    """AICB's `workload_generate_aiob`: times from a file, other collectives.

    The embedding's time of weight gradients is the backward time that was looked up last: the optimizer's in the first
    micro-batch, then that of the previous module.
    """

    def __init__(self, arguments: TrainingArguments, sizes: Sizes, times_ns: Mapping[str, int]) -> None:
        self.arguments = arguments
        self.sizes = sizes
        self.times_ns = times_ns
        self.tp = arguments.tensor_model_parallel_size
        self.last_backward_ns = times_ns.get("grad_backward", 1)

    def blocks(self, modules: tuple[Module, ...]) -> tuple[Block, ...]:
        """Return the blocks: head, first micro-batch, other micro-batches."""
        head, num_microbatches = Block(self._head()), self.arguments.num_microbatches
        if not num_microbatches:
            return (head,)
        first, later = (tuple(line for module in modules for line in self._lines(module.name)) for _ in range(2))
        return head, Block(first), Block(later, num_microbatches - 1)

    def _head(self) -> tuple[WorkloadLayer, ...]:
        dense = self.sizes.parameters - self.sizes.expert_parameters
        optimizer_ns = self.times_ns.get("grad_forward", 1) + self.times_ns.get("grad_backward", 1)
        embedding = self._phase("ALLREDUCE", self.sizes.activations, 1)
        layernorm = WorkloadLayer("layernorm", UNIT, FilePhase(1, "ALLREDUCE", 2 * self.sizes.parameters), UNIT)
        return (
            WorkloadLayer("grad_gather", UNIT, UNIT, FilePhase(1, "ALLGATHER", 2 * dense)),
            WorkloadLayer("grad_param_comm", UNIT, UNIT, FilePhase(1, "REDUCESCATTER", 4 * dense)),
            WorkloadLayer("grad_param_compute", UNIT, FilePhase(optimizer_ns), UNIT),
            *(() if self.arguments.enable_sequence_parallel else (layernorm,)),
            WorkloadLayer("embedding_grads", UNIT, embedding, UNIT),
            *_expert_gradients(self.arguments, self.sizes),
        )

    def _phase(self, collective: str, size_bytes: int, compute_ns: int) -> FilePhase:
        return FilePhase(compute_ns, collective, size_bytes) if self.tp > 1 else FilePhase(compute_ns)

    def _compute_ns(self, name: str, direction: str) -> int:
        """Return the time of a module, or else of its kind; AICB counts the head as attention."""
        exact = self.times_ns.get(name, 1)
        if exact == 1 and name == "final_column":
            return self._compute_ns("attention", direction)
        return exact if exact != 1 else self.times_ns.get(f"{name.partition('_')[0]}_{direction}", 1)

    def _lines(self, name: str) -> Iterable[WorkloadLayer]:
        """Yield a module's lines: with sequence parallelism, a matrix or experts, and none for a norm.

        A matrix is one of two halves of its module, and a column's backward pass scatters 0 bytes. The backward pass of
        a whole module sends nothing.
        """
        size = self.sizes.activations
        if "embedding" in name:
            compute_ns = self.times_ns.get("embedding", self.times_ns.get("Emb", 1))
            yield WorkloadLayer(
                name, self._phase("ALLREDUCE", size, compute_ns), UNIT, FilePhase(self.last_backward_ns)
            )
            return
        forward_ns, backward_ns = self._compute_ns(name, "forward"), self._compute_ns(name, "backward")
        again = 2 if self.arguments.recompute_activations and "attention" in name else 1
        if not self.arguments.enable_sequence_parallel:
            forward, backward = self._phase("ALLREDUCE", size, forward_ns), FilePhase(backward_ns)
        elif "attention_linear" in name:
            forward, backward = FilePhase(forward_ns * again), FilePhase(backward_ns)
        elif "row" in name or "column" in name:
            forward_ns, backward_ns = forward_ns * again // 2, backward_ns // 2
            forward, backward = self._phase("ALLGATHER", size, forward_ns), self._phase("REDUCESCATTER", 0, backward_ns)
            if "row" in name:
                forward = self._phase("REDUCESCATTER", size, forward_ns)
                backward = self._phase("ALLGATHER", size, backward_ns)
        elif "moelayer" not in name:
            return
        self.last_backward_ns = backward_ns
        if self.arguments.enable_sequence_parallel and "moelayer" in name:
            yield from self._experts(name, forward_ns, backward_ns)
        else:
            yield WorkloadLayer(name, forward, backward, FilePhase(backward_ns))

    def _experts(self, name: str, forward_ns: int, backward_ns: int) -> Iterable[WorkloadLayer]:
        """Yield the lines of a layer of experts, its time in the first."""
        for forward, backward in _expert_phases(self.arguments, self.sizes, leave_out_single=True):
            yield WorkloadLayer(name, _with_time(forward, forward_ns), _with_time(backward, backward_ns), UNIT)
            forward_ns = backward_ns = 1


def _with_time(phase: FilePhase, compute_ns: int) -> FilePhase:
    return FilePhase(compute_ns, phase.collective, 0 if phase.collective == "NONE" else phase.size_bytes)
