"""AICB's communication list of rank 0, in the first pipeline stage of Megatron or DeepSeek training, errors included.

Source: generate_megatron_workload.py and mocked_model/training.
"""

from collections.abc import Iterable
from itertools import chain

from windtunnel.formats.aicb.arguments import TrainingArguments
from windtunnel.formats.aicb.csv_records import EPOCH_END, Record, RecordList, Stretch
from windtunnel.formats.aicb.model import EXPERTS, AicbLayer, AicbModel, Linear, aicb_model
from windtunnel.formats.aicb.simai import FP8_SHARE


def megatron_records(arguments: TrainingArguments) -> RecordList:
    """Return the list that AICB generates for Megatron, or for DeepSeek with `--frame=DeepSeek`. InputError where AICB
    fails on these arguments."""
    rank = _MegatronRank(arguments)
    iteration = [*rank.micro_batches(), rank.step()]
    if arguments.pipeline_model_parallel > 1:
        iteration.append(rank.step())  # AICB calls its optimizer step twice
    iteration.append(Stretch((EPOCH_END,)))
    return RecordList((rank.start(), *iteration * arguments.epoch_num))


class _MegatronRank:
    """The records of one rank's parts of a step."""

    def __init__(self, arguments: TrainingArguments) -> None:
        self.arguments = arguments
        self.model: AicbModel = aicb_model(arguments)
        self.tp = arguments.tensor_model_parallel_size
        self.pp = arguments.pipeline_model_parallel
        self.dp = arguments.data_parallel
        self.forward = self._pass("forward")
        self.backward = self._pass("backward")

    def _send(self, kind: str, size: float, stage: str, group: str = "tp_group", source: int | None = None) -> Record:
        sizes = {"tp_group": self.tp, "dp_group": self.dp, "pp_group": self.pp}
        return Record(kind, group, sizes[group], size, stage, source=source)

    def start(self) -> Stretch:
        """Return the messages before the first step."""
        stage = "init.model_setup"
        data = self._send("all_reduce", 8, stage, "dp_group")
        stages = [self._send("all_reduce", 8, stage, "pp_group")] if self.pp > 1 else []
        embedding: list[Record] = []
        if self.pp > 1 and self.arguments.pp_rank == self.pp - 1:
            positions = self.arguments.seq_length * self.arguments.hidden_size
            words = self.model.embedding.num_parameters - positions
            embedding = [self._send("all_reduce", 2 * elements, stage) for elements in (words, positions)]
        return Stretch(
            (
                data,
                *[data, *stages] * 3,
                self._send("all_gather", 32, stage, "dp_group"),
                self._send("broadcast", 24, stage, source=0),
                *embedding,
                self._send("all_gather", 64, stage, "dp_group"),
                EPOCH_END,
            )
        )

    def micro_batches(self) -> list[Stretch]:
        """Return forward and backward passes: one after the other, or in the order of 1F1B's first stage."""
        total = self.arguments.num_microbatches
        inputs = self._inputs()
        if self.pp == 1:
            loss = self._loss()
            return [Stretch((*(inputs if self.tp > 1 else ()), *self.forward, *loss, *self.backward), total)]
        # Hidden states are sent in full, even where sequence parallelism leaves a rank a part of them.
        size = 2 * self.arguments.hidden_size * self.arguments.seq_length * self.arguments.micro_batch

        def neighbour(kind: str, stage: str, direction: str) -> Record:
            return Record(kind, "pp_group", 1, size, stage, additional=direction)

        send_next = neighbour("isend", "forward_step", "send_next")
        warmup = min(self.pp - 1, total)
        steady = (*inputs, *self.forward, neighbour("irecv", "forward_step", "recv_next"), send_next, *self.backward)
        return [
            Stretch((*inputs, *self.forward, send_next), warmup),
            Stretch(steady, total - warmup),
            Stretch((neighbour("irecv", "backward_step", "recv_next"), *self.backward), warmup),
        ]

    def _inputs(self) -> tuple[Record, ...]:
        """Return the broadcast of tokens, which one tensor-parallel rank reads for all."""
        tokens = self.arguments.seq_length * self.arguments.micro_batch
        return (
            self._send("broadcast", 40, "forward_step", source=0),
            self._send("broadcast", 8 * (self.arguments.world_size + tokens), "forward_step", source=0),
        )

    def _loss(self) -> tuple[Record, ...]:
        size = self.arguments.micro_batch * self.arguments.seq_length * 4
        entropy = self._send("all_reduce", size, "forward_step._VocabParallelCrossEntropy")
        stage = "forward_step.average_losses_across_data_parallel_group"
        return (entropy, entropy, entropy, self._send("all_reduce", 4, stage, "dp_group"))

    def step(self) -> Stretch:
        """Return the optimizer's messages; parameters are divided by the stages a second time."""
        parameters = self.model.num_parameters
        gradients, weights = 4 * parameters // self.pp, 2 * parameters // self.pp
        if self.arguments.use_distributed_optimizer:
            records = [
                self._send("reduce_scatter", gradients, "step", "dp_group"),
                self._send("all_gather", weights, "step", "dp_group"),
            ]
        else:
            records = [self._send("all_reduce", gradients, "step.finish_grad_sync", "dp_group")]
        # AICB marks no parameter as a norm's, so that nothing is left to reduce.
        norms = self._send("all_reduce", 0, "step._allreduce_layernorm_grads")
        return Stretch((*records, norms, self._send("all_reduce", 4, "step.check_for_nan")))

    def _pass(self, direction: str) -> tuple[Record, ...]:
        """Return the records of a pass, in each layer attention before the feed-forward network."""
        layers = self.model.layers if direction == "forward" else self.model.layers[::-1]
        known = {id(layer): tuple(self._layer(layer, direction)) for layer in layers}
        size = 2 * self.arguments.micro_batch * self.arguments.seq_length * self.arguments.hidden_size
        embedding = self._send("all_reduce", size, f"{direction}.MegatronEmbedding")
        parts = [(embedding,) if self.tp > 1 else (), *(known[id(layer)] for layer in layers)]
        return tuple(chain.from_iterable(parts if direction == "forward" else parts[1:] + parts[:1]))

    def _layer(self, layer: AicbLayer, direction: str) -> Iterable[Record]:
        product = self._linear_forward if direction == "forward" else self._linear_backward
        for part in (layer.attention, layer.feed_forward):
            if part.name == EXPERTS and direction == "forward":
                yield from self._experts()
            for linear in part.linears:
                yield from product(linear)

    def _product(self, left: tuple[int, ...], right: tuple[int, ...], stage: str) -> Iterable[Record]:
        if self.arguments.computation_enable or self.arguments.aiob_enable:
            yield Record("computation", size=(left, right), stage=stage)

    def _collective(self, kind: str, linear: Linear, stage: str) -> Iterable[Record]:
        if self.tp > 1:
            width = linear.input_size if linear.split == "column" else linear.output_size
            size = 2 * self.arguments.seq_length * self.arguments.micro_batch * width
            yield self._send(kind, size, stage)

    def _tokens(self, linear: Linear) -> tuple[int, int]:
        """Return sequence and batch of a matrix product; AICB multiplies a gathered sequence by tp again."""
        gathered = linear.split == "column" and self.arguments.enable_sequence_parallel
        return self.arguments.seq_length * (self.tp if gathered else 1), self.arguments.micro_batch

    def _linear_forward(self, linear: Linear) -> Iterable[Record]:
        stage, is_split = f"forward.{linear.module}", self.arguments.enable_sequence_parallel
        if is_split and linear.split == "column":
            yield from self._collective("all_gather", linear, stage)
        left, right = (*self._tokens(linear), linear.input_share), (linear.input_share, linear.output_share)
        yield from self._product(left, right, f"{stage}.{linear.name}")
        if linear.split == "row":
            yield from self._collective("reduce_scatter" if is_split else "all_reduce", linear, stage)

    def _linear_backward(self, linear: Linear) -> Iterable[Record]:
        """Yield a matrix's records; of one that every rank has in full, AICB lists the weights' gradient only."""
        stage, is_split = f"backward.{linear.module}", self.arguments.enable_sequence_parallel
        # AICB leaves out the dot before the name of a row-parallel matrix.
        product_stage = f"{stage}{linear.name}" if linear.split == "row" else f"{stage}.{linear.name}"
        sequence, batch = self._tokens(linear)
        if linear.split != "none":
            if is_split:
                yield from self._collective("all_gather", linear, stage)
            yield from self._product(
                (sequence, batch, linear.output_share), (linear.output_share, linear.input_share), product_stage
            )
        if is_split and linear.split == "column":
            yield from self._collective("reduce_scatter", linear, stage)
        yield from self._product(
            (linear.output_share, sequence * batch), (sequence * batch, linear.input_share), product_stage
        )
        if not is_split and linear.split == "column":
            yield from self._collective("all_reduce", linear, stage)

    def _experts(self) -> Iterable[Record]:
        """Yield the experts' messages, forward only: AICB drops their backward pass. Their groups have no size."""
        arguments = self.arguments
        ep, topk = arguments.expert_model_parallel_size, arguments.moe_router_topk
        routed = arguments.seq_length * arguments.hidden_size * arguments.micro_batch * topk
        sent: float = routed // self.tp * 2
        if arguments.frame != "DeepSeek" and (self.tp > 1 or ep > 1):
            counts = 2 * ep * arguments.num_experts * self.tp
            yield Record("all_gather", "ep_group", None, counts, "forward.MoE.preprocess")
        if ep > 1:
            dispatched = sent * FP8_SHARE if arguments.frame == "DeepSeek" else sent
            yield Record("all_to_all", "ep_group", None, dispatched, "forward.MoE.dispatch")
        if self.tp > 1:
            yield Record("all_gather", "tp_group", None, routed * 2, "forward.MoE.permutation")
            yield Record("reduce_scatter", "tp_group", None, routed * 2, "forward.MoE.unpermutation")
        if ep > 1:
            yield Record("all_to_all", "ep_group", None, sent, "forward.MoE.combine")
