"""Published training runs, row by row in one table of CSV columns, as jobs and what was measured.

The columns: `source, model, layers, hidden, heads, accelerator, n_gpus, precision, gbs, mbs, seq_len, tp, pp, cp, vp,
ep, fsdp, act_ckpt, framework, tokens_per_s_per_gpu, tflops_per_gpu, iter_time_s, mem_GB, note`, or those of a table of
MLPerf Training's results (`benchmark, n_accel, global_batch_size, step_time_s_median, ...`). What a row does not say
follows from its source: one `training_sources.Source` for each, with where its facts are published.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from readers.training import bloom as bloom_runs
from readers.training import maxtext, mlperf
from readers.training.bridge_recipes import RECIPES, TOKEN_DROP, split_with_prediction
from readers.training.sources import FINE_TUNED_ON_TOKENS, LORA_OF_MLPERF, SOURCES, TASKS, Source
from windtunnel import catalog
from windtunnel.calibration.training_runs import (
    Shape,
    format_of,
    framework_of,
    full_attention_flops,
    hardware_of,
    model_name,
    plain_name,
    recompute_of,
    shape_of,
    usual_heads,
)
from windtunnel.calibration.training_usual import add_missing
from windtunnel.errors import InputError, unreadable
from windtunnel.hardware import Link
from windtunnel.model.shape import ModelSpec
from windtunnel.schema import decode
from windtunnel.training.job import TrainingJob
from windtunnel.training.setup import uneven_layers

Row = Mapping[str, str]

_COLUMNS = (
    *("source", "release", "task", "model", "params_B", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab"),
    *("accelerator", "n_gpus"),
    *("precision", "gbs", "mbs", "seq_len", "tp", "pp", "cp", "vp", "ep", "etp", "fsdp", "act_ckpt", "framework"),
    *("tokens_per_s_per_gpu", "tflops_per_gpu", "iter_time_s", "mem_GB", "quality", "note"),
)
_MLPERF_COLUMNS = (
    *("round", "benchmark", "accelerator", "n_accel", "global_batch_size", "seq_len", "nominal_seq_len"),
    *("tp", "pp", "cp", "vp", "mbs", "fp8", "fp4", "step_time_s_median", "max_memory_GB", "grad_accum"),
    *("time_to_train_min_olympic", "samples_at_stop_median"),
)
"""Columns that are read; missing ones are blank."""


@dataclass(frozen=True)
class TrainingRun:
    """One published run."""

    row: int
    """Number of the row, counted from 0 after the header."""
    source: str
    job: TrainingJob
    step_s: float | None
    """Measured; None where only a rate of FLOPs was published, or nothing (it ran out of memory)."""
    flops_per_s_per_device: float | None
    """As published, by the source's own count of FLOPs."""
    memory_bytes: float | None
    out_of_memory: bool
    quality: str


@dataclass(frozen=True)
class SkippedRow:
    """A row that says too little to be a job, and the reason."""

    row: int
    reason: str


def read_training_runs(path: Path | str) -> tuple[list[TrainingRun], list[SkippedRow]]:
    """Read a table of published runs: rows that are complete enough to be a job, and the others with the reason.

    Raises:
        InputError: the file is missing or has none of the columns.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    columns = set(rows[0]) if rows else set()
    if not columns >= {"model", "n_gpus"} and "benchmark" not in columns:
        raise InputError(f"{path} holds no training runs: it has neither columns model and n_gpus nor benchmark")
    runs, skipped = [], []
    blank = dict.fromkeys(_MLPERF_COLUMNS if "benchmark" in columns else _COLUMNS, "")
    rows = [blank | {name: value or "" for name, value in row.items()} for row in rows]
    if "benchmark" in columns:
        rows = [mlperf.renamed(row, _COLUMNS) for row in mlperf.completed(rows)]
    for index, row in enumerate(_completed(rows)):
        try:
            runs.append(_run(index, row))
        except (InputError, _TooLittleSaidError) as error:
            skipped.append(SkippedRow(index, str(error)))
    return runs, skipped


# NeMo's recipes of supervised fine-tuning on 8 GPUs (recommended_model_configs of dgxc-benchmarking's ft_llama3): a
# copy on every GPU, four sequences of it a step.
_COPIES = {("SFT", "llama38b"): {"tp": "1", "pp": "1", "cp": "1", "mbs": "1", "gbs_per_gpu": "4"}}


def _completed(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Complete rows from other rows of the same table, where those agree.

    Virtual stages that a row leaves out are those of rows with the same model, tensor and pipeline parallelism.
    """
    virtual: dict[tuple[str, ...], set[str]] = {}
    for row in rows:
        if row["vp"]:
            virtual.setdefault(_pipeline_of(row), set()).add(row["vp"])
    shapes = bloom_runs.shapes_of(rows)
    completed = []
    for row in rows:
        if bloom_runs.is_bloom(row):
            row = bloom_runs.completed(row, shapes)
        if maxtext.is_maxtext(row):
            row = maxtext.completed(row, hardware_of(row["accelerator"]).called)
        copies = _COPIES.get((row["task"], plain_name(row["model"])), {})
        if copies and not row["tp"]:
            row = {**row, **{name: value for name, value in copies.items() if name in row}}
            row["gbs"] = row["gbs"] or str(int(copies["gbs_per_gpu"]) * int(float(row["n_gpus"])))
        if not row["mbs"] and (local := re.search(r"local batch (\d+)", row["note"])):
            row = {**row, "mbs": local[1]}
        if not row["vp"] and len(known := virtual.get(_pipeline_of(row), set())) == 1:
            row = {**row, "vp": next(iter(known))}
        completed.append(row)
    return completed


def _pipeline_of(row: Row) -> tuple[str, ...]:
    return (row["source"], row["model"].split(" 24.")[0], row["accelerator"], row["tp"], row["pp"])


class _TooLittleSaidError(Exception):
    """A row lacks a value that decides its time."""


def _source(row: Row) -> Source:
    name = "MaxText" if row["framework"] == "MaxText" else row["source"]
    for start in sorted(SOURCES, key=len, reverse=True):
        if name.startswith(start):
            return SOURCES[start]
    with suppress(InputError):
        _, usual = framework_of(row["framework"])
        return Source(usual["framework"], usual.get("settings", {}), fp8=usual.get("fp8", "fp8"))
    raise _TooLittleSaidError(f"the source {name!r} is not known")


def _run(index: int, row: Row) -> TrainingRun:
    source = _source(row)
    raw = _job(row, source)
    job = decode(raw, TrainingJob, f"row {index}")
    tokens = job.global_batch * job.sequence_tokens
    seconds = _number(row, "iter_time_s")
    rate = _number(row, "tokens_per_s_per_gpu")
    if seconds is None and rate is not None:
        seconds = tokens / (rate * _whole(row, "n_gpus"))
    flops = _number(row, "tflops_per_gpu")
    memory = _number(row, "mem_GB")
    out_of_memory = row["note"].startswith("OOM")
    if seconds is None and flops is None and not out_of_memory:
        raise _TooLittleSaidError("neither a time nor a rate was measured")
    if seconds is None and flops is not None and "2021 README" in row["source"]:
        seconds = _sc21_flops(job) / (flops * 1e12 * _whole(row, "n_gpus"))
    if seconds is None and flops is not None and row["release"] in ("24.03.01", "25.04.rc2"):
        seconds = full_attention_flops(job) / (flops * 1e12 * _whole(row, "n_gpus"))
    return TrainingRun(
        index,
        row["source"],
        job,
        seconds,
        None if flops is None else flops * 1e12,
        # Logs of torchtitan and of MLPerf's PyTorch count in powers of two.
        None if memory is None else memory * (2**30 if re.match("MLPerf|torchtitan", row["source"]) else 1e9),
        out_of_memory,
        row["quality"],
    )


def _sc21_flops(job: TrainingJob) -> float:
    """Return hardware FLOPs of a step with full recomputation (arXiv:2104.04473, equation 3)."""
    assert isinstance(job.model, ModelSpec)
    model = job.model
    width, layers, length = model.hidden_size, model.num_layers, job.sequence_tokens
    factor = 1 + length / (6 * width) + model.vocab_size / (16 * layers * width)
    return 96.0 * job.global_batch * length * layers * width**2 * factor


def _job(row: Row, source: Source) -> dict[str, Any]:
    """Return a row as the table that a job's YAML file would hold."""
    num_devices = _whole(row, "n_gpus")
    if row["task"] not in TASKS:
        raise _TooLittleSaidError(f"a step of {row['task']!r} is more than a forward and a backward pass")
    compute = _compute_format(row, source)
    if "proxy" in row["note"] and not row["layers"]:
        raise _TooLittleSaidError("a model with fewer layers, and it is not said how many")
    # GPT-2's sequences have 1024 tokens, torchtitan's default of Llama 3 is 8192.
    usual = 8192 if "Llama" in row["model"] else 1024 if row["model"].startswith("GPT2") else 2048
    sequence = _whole(row, "seq_len", usual)
    model = _model(row, source, sequence)
    parallelism = _parallelism(row, source, model)
    fsdp = row["fsdp"]
    is_sharded = fsdp not in ("", "0.0", "0") and not fsdp.startswith("ZeRO-2")
    if not row["tp"] and not is_sharded:
        raise _TooLittleSaidError("its parallel layout was not published")
    raw: dict[str, Any] = {
        "model": msgspec.to_builtins(model) if isinstance(model, ModelSpec) else model,
        "num_devices": num_devices,
        "sequence_tokens": sequence,
        "micro_batch": _whole(row, "mbs", 1),
        "parallelism": parallelism,
        "framework": source.framework,
        "precision": {"compute": compute},
        **_recompute(row),
        **_hardware(row, source),
        **_task(row),
    }
    if row["source"].startswith("Megatron-Bridge"):
        _merge_recipes(raw, row)
    if "lora" in row["model"].lower() and not is_sharded:
        add_missing(raw, LORA_OF_MLPERF)
        if row["accelerator"].startswith("AMD"):
            # RECOMPUTE_GRANULARITY=full, RECOMPUTE_METHOD=block, RECOMPUTE_NUM_LAYERS=21 of AMD's configurations.
            raw["recompute"] = {"granularity": "full", "num_layers": 21}
    add_missing(raw, source.settings)
    if not (model if isinstance(model, ModelSpec) else catalog.model(model)).has_experts:
        raw["parallelism"].pop("experts_exchange", None)
    if row["source"].startswith("NeMo") and row["release"] < "24.07":
        # cuDNN 9.0 and FlashAttention-2, before Hopper had kernels of its own.
        raw.setdefault("kernels", {})["attention"] = "flash2"
    if bloom_runs.is_bloom(row):
        raw["precision"]["gradients"] = bloom_runs.gradients(row)
    if is_sharded:
        sharding = raw.setdefault("sharding", {})
        sharding["zero"] = 3
        if fsdp.replace(".", "").isdigit():
            # torchtitan shards over context-parallel ranks too (distributed/parallel_dims.py, `dp_shard_cp`).
            ranks = int(float(fsdp)) * (parallelism["cp"] if source.framework == "fsdp2" else 1)
            sharding["group"] = ranks if ranks >= 2 else None
    # torchtitan's asynchronous tensor parallelism needs torch.compile, and was compared with the plain one under it.
    if re.search("compile|vanilla TP|async TP", row["note"]):
        # The loss was not compiled yet (torchtitan of December 2024, train.py: "compiling loss function causes CUDA
        # errors"), and memory agrees: 8B at 8k tokens on 8 devices is 77.0 GiB.
        loss = "eager" if row["release"] < "2025" else "separate"
        raw.setdefault("kernels", {}).update(fused=True, cross_entropy=loss)
    if re.search("async ?tp", row["note"].lower()):
        raw["overlap"] = {"tensor_parallel": True}
    if "Sep 2020" in row["source"]:
        # Megatron-LM of 2020 had no accumulation: a replica computes its whole batch at once.
        raw["micro_batch"] = _whole(row, "gbs") * parallelism["tp"] * parallelism["pp"] // num_devices
    raw["global_batch"] = _global_batch(row, raw, num_devices)
    return raw


def _compute_format(row: Row, source: Source) -> str:
    if "parenthesised" in row["precision"]:
        return "mxfp8" if re.search("B[23]00", row["accelerator"]) else "fp8"
    if "rowwise" in row["note"] and format_of(row["precision"]) == "fp8":
        return "fp8_rowwise"
    return format_of(row["precision"], source.fp8)


def _task(row: Row) -> dict[str, Any]:
    """Return the settings of fine-tuning; empty for pre-training."""
    settings: dict[str, Any] = {}
    if row["task"] in ("LoRA", "SFT"):
        settings["document_tokens"] = FINE_TUNED_ON_TOKENS
    if row["task"] == "LoRA" or "lora" in row["model"].lower():
        settings["lora"] = {"rank": 16, "all_linear": False}
    return settings


def _global_batch(row: Row, raw: dict[str, Any], num_devices: int) -> int:
    given = _number(row, "gbs")
    split = raw["parallelism"]
    replicas = num_devices // (int(split["tp"]) * int(split["cp"]) * int(split["pp"]))
    each = replicas * int(raw["micro_batch"])
    if given is None:
        return int(raw.get("global_batch", each))
    # BLOOM's batch sizes were rounded to what the replicas divide.
    return max(int(given) // each, 1) * each if bloom_runs.is_bloom(row) else int(given)


def _merge_recipes(raw: dict[str, Any], row: Row) -> None:
    """Merge the recipes' settings of a row's run; the row's own recomputation stays."""
    said = {"recompute"} & set(raw)
    if "w/o MTP" in row["model"]:
        raw["mtp_layers"] = 0
    if "tokendrop" in row["model"]:
        add_missing(raw, TOKEN_DROP)
    model = raw["model"] if isinstance(raw["model"], str) else raw["model"]["name"]
    compute = raw["precision"]["compute"]
    for recipe in RECIPES:
        if recipe.applies(model, raw["device"], compute, raw["parallelism"], row["release"]):
            add_missing(raw, {name: value for name, value in recipe.settings.items() if name not in said})


def _parallelism(row: Row, source: Source, model: str | ModelSpec) -> dict[str, Any]:
    pp, chunks = _whole(row, "pp", 1), _whole(row, "vp", 1)
    chunks = int(source.settings.get("parallelism", {}).get("virtual_stages", chunks))
    degrees: dict[str, Any] = {"tp": _whole(row, "tp", 1), "pp": pp, "cp": _whole(row, "cp", 1)}
    if "sequence-parallel" in row["act_ckpt"]:
        degrees["sequence_parallel"] = True
    if pp > 1:
        degrees["virtual_stages"] = chunks
        num_layers = (model if isinstance(model, ModelSpec) else catalog.model(model)).num_layers
        if num_layers % (pp * chunks):
            split = bloom_runs.layers_per_stage if bloom_runs.is_bloom(row) else uneven_layers
            if row["model"].startswith("DeepSeek"):
                split = split_with_prediction
            degrees["layers_per_stage"] = split(num_layers, pp * chunks)
    if (ep := _whole(row, "ep", 1)) > 1:
        degrees["ep"] = ep
        degrees["experts_tp"] = _whole(row, "etp", 1)
    return degrees


def _recompute(row: Row) -> dict[str, Any]:
    policy = re.split(r"[+(]", row["act_ckpt"])[0]
    if not policy:
        return {}
    _, framework = framework_of("torchtitan" if "torchtitan" in row["source"] else "megatron")
    return {"recompute": recompute_of(policy, framework)}


def _hardware(row: Row, source: Source) -> dict[str, Any]:
    hardware = hardware_of(row["accelerator"])
    if source.scale_out_bytes_per_s:
        return {"device": hardware.called, "node": _other_network(hardware.called, source.scale_out_bytes_per_s)}
    return {"device": hardware.fields["device"]}


def _other_network(device: str, bytes_per_s: float) -> dict[str, Any]:
    node = catalog.default_node(catalog.device(device))
    link = Link(name="own", bytes_per_s=bytes_per_s, latency_s=node.scale_out.latency_s if node.scale_out else 3e-6)
    built: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(node, scale_out=link))
    return built


def _model(row: Row, source: Source, sequence: int) -> str | ModelSpec:
    name = row["model"].lower().split(" (")[0].split(" 24.")[0].split(" 25.")[0]
    hidden, layers = _number(row, "hidden"), _number(row, "layers")
    if hidden and layers and name.startswith(("gpt", "turing", "megatron")):
        vocab = source.vocab_size or _whole(row, "vocab", 51200)
        heads = _whole(row, "heads", usual_heads(int(hidden), _whole(row, "tp", 1)))
        shape = Shape(int(layers), int(hidden), heads, heads, int(4 * hidden), vocab)
        return shape.model(row["model"], sequence)
    if published := shape_of(name):
        return published.model(row["model"], sequence)
    try:
        known = model_name(name)
    except InputError:
        if hidden and layers and (written := _number(row, "heads")):
            return _written_model(row, source, sequence, int(written))
        raise _TooLittleSaidError(f"the shape of {row['model']!r} is not known") from None
    model = catalog.model(known)
    if layers and int(layers) != model.num_layers and len(model.layers) == 1:
        shortened = msgspec.structs.replace(model.layers[0], num_layers=int(layers))
        return msgspec.structs.replace(model, layers=(shortened,))
    return known


def _written_model(row: Row, source: Source, sequence: int, heads: int) -> ModelSpec:
    """Return a model of which a row says depth, width and heads; a feed-forward of another width than four is gated."""
    hidden = _whole(row, "hidden")
    ffn = _whole(row, "ffn", 4 * hidden)
    vocab = source.vocab_size or _whole(row, "vocab", 51200)
    is_gated = ffn != 4 * hidden
    kv_heads = _whole(row, "kv_heads", heads)
    shape = Shape(_whole(row, "layers"), hidden, heads, kv_heads, ffn, vocab, not is_gated, not is_gated, is_gated)
    return shape.model(row["model"], sequence)


def _number(row: Row, name: str) -> float | None:
    """Return a number above zero; None for a blank."""
    text = row[name]
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise _TooLittleSaidError(f"{name} is {text!r}; a number above zero is needed")
    return value


def _whole(row: Row, name: str, usual: int | None = None) -> int:
    """Return a whole number; a blank is `usual`, or without that an error."""
    value = _number(row, name)
    if value is None and usual is None:
        raise _TooLittleSaidError(f"{name} was not published")
    if value is not None and value % 1:
        raise _TooLittleSaidError(f"{name} is {row[name]!r}; a whole number is needed")
    return int(value if value is not None else usual or 0)


def runs_in(folder: Path) -> Iterator[tuple[str, list[TrainingRun], list[SkippedRow]]]:
    """Yield every table of published runs in a folder, by name."""
    for path in sorted(folder.glob("*.csv")):
        try:
            yield path.stem, *read_training_runs(path)
        except InputError:
            continue
