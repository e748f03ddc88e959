"""Recognise any workload or trace by its content, and summarise its communication in one vocabulary."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from windtunnel.errors import InputError
from windtunnel.files import read_bytes
from windtunnel.formats.aicb.aiob_times import read_aiob_times
from windtunnel.formats.aicb.csv_records import COLUMNS, RecordList, read_records
from windtunnel.formats.captures import kineto, pytorch_trace
from windtunnel.formats.chakra.read import read_trace
from windtunnel.formats.chakra.schema import ChakraCollective, ChakraKind, ChakraTrace
from windtunnel.formats.collective_calls import CollectiveCall, totals
from windtunnel.formats.simai.read import read_workload
from windtunnel.formats.simai.schema import POLICIES, SimaiWorkload, meaning
from windtunnel.model import operators as ops
from windtunnel.training.layers.rank import Rank
from windtunnel.training.program import device_program
from windtunnel.training.setup import TrainingSetup
from windtunnel.units import format_count

SIMAI, AICB, AIOB = "SimAI workload", "AICB list", "AIOB times"
CHAKRA, KINETO, PYTORCH = "Chakra trace", "Kineto trace", "PyTorch execution trace"
AICB_COMMAND, MEGATRON, JOB = "AICB command", "Megatron arguments", "training job"

_KNOWN_HINT = "`windtunnel workload --help` lists the known formats"

_CHAKRA_START = re.compile(rb"[\x02-\xff]{1,3}?\n[\x05-\x10]\d+\.\d+\.\d+")
"""The length of the metadata, then its first field, the version."""

_COLLECTIVES: dict[int, str] = {member.value: member.name.lower() for member in ChakraCollective}
_AICB_GROUPS = {"ep_dp_group": "dp_ep", "all": "all"}
_AICB_SCRIPT = re.compile(r"^[^#\n]*\b(?:ba)?sh\s+\S*?(?:_workload_with_aiob|megatron_gpt|deepspeed_llama)\.sh\b", re.M)
"""A line that runs one of AICB's scripts."""
_AICB_KINDS = {"isend": "send", "irecv": "receive"}


@dataclass(frozen=True)
class Contents:
    """Summary of a workload."""

    kind: str
    facts: tuple[tuple[str, str], ...]
    """Label and value, for people."""
    calls: tuple[CollectiveCall, ...]
    """Collectives, equal ones added up."""
    compute_s: float | None = None
    """Time of all computation, where the file has times."""
    modules_s: Mapping[str, float] | None = None
    """Mean time of each module, for AIOB files."""


def recognise(path: Path) -> str:
    """Return the format of a file, by its content.

    Raises:
        InputError: the file is missing, empty, or of no known format.
    """
    content = read_bytes(path)
    if _CHAKRA_START.match(content):
        return CHAKRA
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path} is no workload or trace that is known: it is not text", _KNOWN_HINT) from None
    if not text.strip():
        raise InputError(f"{path} is empty")
    if text.lstrip().startswith("{"):
        if '"traceEvents"' in text:
            return KINETO
        return PYTORCH if '"schema"' in text[:4096] and '"nodes"' in text else JOB
    first = text.split(maxsplit=1)[0]
    if first in POLICIES or first.startswith("HYBRID_"):
        return SIMAI
    if COLUMNS in text[:100_000]:
        return AICB
    if first.startswith(("train_iter:", "inference_term:")):
        return AIOB
    if "workload_generator." in text or _AICB_SCRIPT.search(text):
        return AICB_COMMAND
    if "--num-layers" in text or "num_layers ..." in text:
        return MEGATRON
    if "sequence_tokens" in text or path.suffix in (".yaml", ".yml"):
        return JOB
    raise InputError(f"{path} is no workload or trace that is known: it begins with {first[:40]!r}", _KNOWN_HINT)


def read_contents(path: Path, kind: str) -> Contents:
    """Read a file of a format that needs no other file.

    Raises:
        InputError: the file is wrong; names the line or byte.
    """
    if kind == SIMAI:
        return _simai(read_workload(path))
    if kind == AICB:
        return _aicb(read_records(path))
    if kind == CHAKRA:
        return _chakra(read_trace(path))
    if kind == KINETO:
        return _kineto(kineto.read_kineto(path))
    if kind == PYTORCH:
        trace = pytorch_trace.read_execution_trace(path)
        facts = (("schema", trace.schema), ("operators", f"{len(trace.operators):,}"))
        return Contents(PYTORCH, facts, tuple(totals(pytorch_trace.collective_calls(trace))))
    times = read_aiob_times(path)
    modules = {name: module.mean_us * 1e-6 for name, module in times.modules.items()}
    return Contents(AIOB, (("run", times.title),), (), sum(modules.values()), modules)


def job_contents(setup: TrainingSetup, device: int) -> Contents:
    """Return the messages of one rank of a pipeline device in a step of a job."""
    degrees, names = setup.degrees, ("tp", "cp", "pp", "dp", "ep")
    ranks = ", ".join(f"{name} {getattr(degrees, name)}" for name in names)
    microbatches = f"{degrees.num_microbatches} of {degrees.micro_batch} x {setup.job.sequence_tokens:,} tokens"
    facts = (
        ("model", f"{setup.model.name}, {format_count(setup.model.num_layers, 'layer')}"),
        ("ranks", f"{degrees.num_devices:,}: {ranks}"),
        ("micro-batches", microbatches),
        ("shown", f"one rank of pipeline device {device}, one step"),
    )
    return Contents(JOB, facts, tuple(totals(_job_calls(setup, device))))


def _job_calls(setup: TrainingSetup, device: int) -> Iterator[CollectiveCall]:
    rank = Rank(setup)
    for action in device_program(setup, device):
        for message in (action.receives, action.sends):
            if message:
                kind = "send" if message.is_send else "receive"
                yield CollectiveCall(kind, "pp", 2, round(message.size_bytes))
        for task in action.tasks:
            if isinstance(task.op, ops.Collective) and task.group:
                size, num_ranks = round(float(task.op.message_bytes)), task.op.num_ranks
                is_world = num_ranks == setup.degrees.num_devices != rank.layout(task.group)[0]
                group = "all" if is_world else str(task.group)
                yield CollectiveCall(task.op.op, group, num_ranks, size, round(task.count))


def _simai(workload: SimaiWorkload) -> Contents:
    header = workload.header
    facts = [("policy", workload.policy), ("lines", f"{workload.num_layers:,}")]
    values = (header.tp, header.ep, header.pp, header.vpp, header.num_microbatches, header.num_devices)
    labels = ("tp", "ep", "pp", "vpp", "ga", "gpus")
    degrees = [f"{label} {value}" for label, value in zip(labels, values, strict=True) if value is not None]
    if degrees:
        facts.append(("degrees", ", ".join(degrees)))
    compute_ns = sum(
        (layer.forward.compute_ns + layer.input_gradient.compute_ns + layer.weight_gradient.compute_ns) * block.repeats
        for block in workload.blocks
        for layer in block.layers
    )
    return Contents(SIMAI, tuple(facts), tuple(totals(_simai_calls(workload))), compute_ns * 1e-9)


def _simai_calls(workload: SimaiWorkload) -> Iterator[CollectiveCall]:
    header = workload.header
    sizes: dict[str, int | None] = {"tp": header.tp, "ep": header.ep, "dp": None, "dp_ep": None}
    if header.num_devices and header.tp and header.pp:
        data_parallel = header.num_devices // (header.tp * header.pp)
        sizes |= {"dp": data_parallel, "dp_ep": data_parallel // (header.ep or 1)}
    for block in workload.blocks:
        for layer in block.layers:
            phases = ((layer.forward, False), (layer.input_gradient, False), (layer.weight_gradient, True))
            for phase, is_weight in phases:
                collective = meaning(phase.collective, is_weight)
                if collective:
                    operation, group = collective
                    yield CollectiveCall(operation, group, sizes[group], phase.size_bytes, block.repeats)


def _aicb(lists: list[RecordList]) -> Contents:
    facts = [("lists", str(len(lists))), ("lines", f"{sum(part.num_records for part in lists):,}")]
    facts += [("ranks", part.title) for part in lists if part.title]
    records = [record for part in lists for record in part.records()]
    products = [record for record in records if record.kind == "computation"]
    if products:
        facts.append(("products", f"{len(products):,} of matrices"))
    timed = [record.elapsed_ms for record in products if record.elapsed_ms is not None]
    calls = (
        CollectiveCall(
            _AICB_KINDS.get(record.kind, record.kind),
            _AICB_GROUPS.get(record.group or "", (record.group or "").removesuffix("_group")),
            record.group_size,
            round(record.size) if not isinstance(record.size, tuple) else None,
            record.num_calls,
            record.elapsed_ms * 1e-3 if record.elapsed_ms is not None else None,
        )
        for record in records
        if record.kind not in ("computation", "epoch_end")
    )
    return Contents(AICB, tuple(facts), tuple(totals(calls)), sum(timed) * 1e-3 if timed else None)


def _chakra(trace: ChakraTrace) -> Contents:
    facts = (("version", trace.version), ("nodes", f"{len(trace.nodes):,}"))
    compute_us = sum(node.duration_us for node in trace.nodes if node.kind is ChakraKind.COMPUTE)
    return Contents(CHAKRA, facts, tuple(totals(_chakra_calls(trace))), compute_us * 1e-6 if compute_us else None)


def _chakra_calls(trace: ChakraTrace) -> Iterator[CollectiveCall]:
    kinds = {ChakraKind.SEND: "send", ChakraKind.RECEIVE: "receive"}
    for node in trace.nodes:
        raw = node.get("comm_size")
        size = raw if isinstance(raw, int) else None
        if node.kind is ChakraKind.COLLECTIVE:
            raw = node.get("comm_type")
            name = _COLLECTIVES.get(raw, f"collective {raw!r}") if isinstance(raw, int) else "collective"
            yield CollectiveCall(name, str(node.get("pg_name") or ""), None, size)
        elif node.kind in kinds:
            yield CollectiveCall(kinds[node.kind], "", None, size)


def _kineto(trace: kineto.KinetoTrace) -> Contents:
    facts = [("events", f"{len(trace.events):,}"), ("operators", f"{len(trace.of_category('cpu_op')):,}")]
    kernels = trace.of_category("kernel")
    if kernels:
        facts.append(("kernels", f"{len(kernels):,}"))
    if (job := trace.distributed_info) is not None:
        facts.append(("rank", f"{job.rank} of {job.world_size}, {job.backend}"))
    compute_us = sum(kernel.duration_us for kernel in kernels if "ChakraCollective name" not in kernel.args)
    calls = tuple(totals(kineto.collective_calls(trace)))
    return Contents(KINETO, tuple(facts), calls, compute_us * 1e-6 if kernels else None)
