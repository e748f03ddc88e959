"""AICB's communication list of a rank in DeepSpeed's ZeRO training.

The model is LLaMA's with as many key heads as query heads; parameters have 2 bytes
(generate_deepspeed_stage1_2_workload.py, generate_deepspeed_stage3_workload.py and MockedDeepspeed.py).
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from windtunnel.errors import InputError
from windtunnel.formats.aicb.arguments import TrainingArguments
from windtunnel.formats.aicb.csv_records import EPOCH_END, Record, RecordList, Stretch

Shape = tuple[int, int]

ELEMENT_BYTES = 2


def zero_records(arguments: TrainingArguments, generator: str) -> RecordList:
    """Return the list of one of AICB's two generators: `..._stage3_workload`, or `..._stage1_2_workload`.

    The latter treats any stage but 1 as 2. InputError where AICB fails on these arguments.
    """
    is_stage3 = generator == "generate_deepspeed_stage3_workload"
    rank = _Stage3(arguments) if is_stage3 else _Stage1Or2(arguments)
    rank.start()
    rank.records.append(EPOCH_END)
    for _ in range(arguments.epoch_num):
        if arguments.pipeline_model_parallel > 1:
            rank.step()
        else:
            for _ in range(arguments.num_microbatches):
                rank.forward()
                rank.backward()
        rank.step()
        rank.records.append(EPOCH_END)
    return RecordList((Stretch(tuple(rank.records)),))


class _ZeroRank:
    """The common part of the stages: the parameters and the growing list."""

    def __init__(self, arguments: TrainingArguments) -> None:
        self.arguments = arguments
        hidden, width = arguments.hidden_size, arguments.feed_forward_size
        heads = hidden // arguments.heads * arguments.heads
        attention = [(hidden, 1), *[(hidden, heads)] * 3, (heads, hidden)]
        layer = [*attention, (hidden, 1), (hidden, width), (width, hidden), (hidden, width)]
        vocabulary = arguments.vocab_size
        self.shapes = [(vocabulary, hidden), *layer * arguments.layers_per_stage, (hidden, 1), (hidden, vocabulary)]
        self.elements = [rows * columns for rows, columns in self.shapes]
        self.dp = arguments.data_parallel
        self.records: list[Record] = []

    def _send(self, kind: str, size: int, stage: str, group: str = "dp_group", **ends: int | None) -> None:
        self.records.append(Record(kind, group, self.dp, size, stage, **ends))  # type: ignore[arg-type]

    def _multiply(self, shape: Shape, direction: str, weight_stage: str) -> None:
        """Add products of a matrix; the embedding counts as one too."""
        rows, columns = shape
        is_listed = self.arguments.computation_enable or self.arguments.aiob_enable
        if not is_listed or columns == 1 or direction not in ("forward", "backward"):
            return
        batch, sequence = self.arguments.micro_batch, self.arguments.seq_length
        product = ((batch, sequence, rows), (rows, columns))
        self.records.append(Record("computation", size=product, stage=f"{direction}.computation"))
        if direction == "backward":
            gradient = ((rows, batch * sequence), (batch * sequence, columns))
            self.records.append(Record("computation", size=gradient, stage=weight_stage))


class _Stage1Or2(_ZeroRank):
    """Gradients are reduced in buckets, at every micro-batch; parameters are gathered after the step."""

    def __init__(self, arguments: TrainingArguments) -> None:
        super().__init__(arguments)
        self.bucket: list[int] = []
        """Positions of the parameters whose gradients are in the bucket."""

    @property
    def bucket_elements(self) -> int:
        return sum(self.elements[position] for position in self.bucket)

    def start(self) -> None:
        if self.arguments.amp_enabled:
            raise InputError("AICB fails with UnboundLocalError on --amp_enabled before ZeRO-3", "leave it out")
        for elements in self.elements:
            self._send("broadcast", elements * ELEMENT_BYTES, "init")
        self._send("barrier", self.elements[-1] * ELEMENT_BYTES, "init.__init__", "all")

    def forward(self) -> None:
        for shape in self.shapes:
            self._multiply(shape, "forward", "")

    def backward(self) -> None:
        waiting = self.bucket_elements
        for position in reversed(range(len(self.shapes))):
            if self.elements[position] + waiting > self.arguments.reduce_bucket_size:
                self.reduce("backward")
                waiting = 0
            self.bucket.append(position)
            waiting += self.elements[position]
            self._multiply(self.shapes[position], "backward", "backward.computation")

    def reduce(self, stage: str) -> None:
        """Send the bucket: to all ranks, or in stage 2 with `--contiguous_gradients` to those that keep its parts."""
        if self.arguments.stage == 1 or not self.arguments.contiguous_gradients:
            self._send("all_reduce", self.bucket_elements * ELEMENT_BYTES, f"{stage}.allreduce_bucket")
        else:
            shares: list[tuple[int, int, int]] = []
            for start, end in self._ranges():
                for rank, low, high in self._shares(start, end):
                    if shares and shares[-1][0] == rank:
                        # AICB takes neighbours of one rank for one range, though a micro-batch ends between them.
                        low = shares.pop()[1]
                    shares.append((rank, low, high))
            for rank, low, high in shares:
                self._send("reduce", (high - low) * ELEMENT_BYTES, f"{stage}.average_tensor", destination=rank)
        self.bucket = []

    def _ranges(self) -> Iterable[tuple[int, int]]:
        """Yield the bucket's contiguous ranges of all gradients, last joined first.

        Parameters join from the last to the first, and those of the micro-batch before may still wait.
        """
        runs: list[list[int]] = []
        for position in reversed(self.bucket):
            if runs and runs[-1][-1] == position - 1:
                runs[-1].append(position)
            else:
                runs.append([position])
        for run in runs:
            start = sum(self.elements[: run[0]])
            yield start, start + sum(self.elements[position] for position in run)

    def _shares(self, start: int, end: int) -> Iterable[tuple[int, int, int]]:
        """Yield (rank, start, end) of a range of all gradients; ranks keep equal parts, the last one the rest."""
        part = -(-sum(self.elements) // self.dp)
        if start and start % part == 0:
            # AICB moves on to the next rank one parameter too late, and sends the rank before nothing.
            yield start // part - 1, start, start
        cuts = [start, *range((start // part + 1) * part, end, part), end]
        for low, high in pairwise(cuts):
            yield low // part, low, high

    def step(self) -> None:
        self.reduce("step")
        self._send("all_reduce", 1, "step.has_overflow")
        total = sum(self.elements)
        num_shards = max(total // self.arguments.allgather_bucket_size, 1)
        share = total // num_shards
        for shard in range(num_shards):
            elements = total - shard * share if shard == num_shards - 1 else share
            padded = -(-elements // self.dp) * self.dp
            self._send("all_gather", padded * ELEMENT_BYTES, "step.all_gather_dp_groups")


@dataclass
class _Parameter:
    """One parameter of ZeRO-3."""

    shape: Shape
    elements: int
    is_persistent: bool
    is_gathered: bool = False
    last_use: int = -1
    """Last step for which it was fetched."""


class _Stage3(_ZeroRank):
    """Parameters are gathered before use and dropped after it, from the second iteration on several at a time."""

    def __init__(self, arguments: TrainingArguments) -> None:
        super().__init__(arguments)
        self.parameters: list[_Parameter] = []
        persistent_elements = 0
        for shape, elements in zip(self.shapes, self.elements, strict=True):
            fits = elements + persistent_elements <= arguments.model_persistence_threshold
            keeps = fits and elements <= arguments.param_persistence_threshold
            persistent_elements += elements if keeps else 0
            self.parameters.append(_Parameter(shape, elements, keeps))
        self.uses: deque[tuple[int, _Parameter]] = deque()
        """Coming uses as (step, parameter); empty until the first backward pass has ended."""
        self.live_elements = 0
        self.waiting_elements = 0
        """Elements of the gradients in the bucket."""

    def start(self) -> None:
        if not self.arguments.amp_enabled:
            for elements in self.elements:
                self._send("broadcast", elements * ELEMENT_BYTES, "init._broadcast_model", source=0)
        self._send("barrier", 0, "init._create_fp16_partitions_with_defragmentation", "all")
        for _ in range(2):
            self._send("barrier", 0, "init._setup_for_real_optimizer", "all")
        for elements in self.elements:
            self._send("all_gather", elements * ELEMENT_BYTES, "init._allgather_params")

    def forward(self) -> None:
        for step, parameter in enumerate(self.parameters):
            self._use(parameter, step, "forward")

    def backward(self) -> None:
        for step, parameter in enumerate(reversed(self.parameters), len(self.parameters)):
            self._use(parameter, step, "backward")
            if parameter.elements + self.waiting_elements > self.arguments.reduce_bucket_size:
                self._send("reduce_scatter", self.waiting_elements * ELEMENT_BYTES, "backward.reduce_scatter_fn")
                self.waiting_elements = 0
            self.waiting_elements += parameter.elements
        self.uses = deque(enumerate(self.parameters + self.parameters[::-1]))
        for parameter in self.parameters:
            parameter.last_use = -1

    def _use(self, parameter: _Parameter, step: int, stage: str) -> None:
        if self.uses:
            self._fetch_ahead(parameter, stage)
        else:
            self._fetch(parameter, stage)
        # It is dropped unless it persists or is used again; before the first prefetch always.
        if not self.uses or not (parameter.is_persistent or parameter.last_use > step):
            parameter.is_gathered = False
            self.live_elements -= parameter.elements

    def _keep(self, parameter: _Parameter) -> None:
        parameter.is_gathered = True
        self.live_elements += parameter.elements

    def _fetch(self, parameter: _Parameter, stage: str) -> None:
        if not parameter.is_gathered:
            self._send("all_gather", parameter.elements * ELEMENT_BYTES, f"{stage}.allgather_fn")
            self._keep(parameter)
        self._multiply(parameter.shape, stage, "")

    def _fetch_ahead(self, parameter: _Parameter, stage: str) -> None:
        """Gather a missing parameter and the next ones, up to the bucket's size and the limit of live elements."""
        bucket: list[_Parameter] = []
        bucket_elements = 0
        if not parameter.is_gathered:
            self.uses.popleft()
            bucket.append(parameter)
            bucket_elements = parameter.elements
            self._keep(parameter)
        while (
            self.uses
            and bucket_elements < self.arguments.prefetch_bucket_size
            and self.live_elements < self.arguments.max_live_parameters
        ):
            step, ahead = self.uses.popleft()
            ahead.last_use = max(step, ahead.last_use)
            if not ahead.is_gathered:
                bucket.append(ahead)
                bucket_elements += ahead.elements
                self._keep(ahead)
        if bucket:
            self._send("all_gather", bucket_elements * ELEMENT_BYTES, f"{stage}.allgather_fn")
            for gathered in bucket:
                self._multiply(gathered.shape, stage, "")

    def step(self) -> None:
        self._send("reduce_scatter", self.waiting_elements * ELEMENT_BYTES, "step.reduce_scatter_fn")
        self.waiting_elements = 0
        self._send("all_reduce", 1, "step.has_overflow")
        self._send("all_reduce", 8, "step.get_grad_norm_direct")
        for parameter in self.parameters:
            parameter.is_gathered = False
        self.live_elements = 0
        for parameter in self.parameters:
            if parameter.is_persistent:
                self._fetch(parameter, "step")
