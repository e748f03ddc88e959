"""Measured training runs in a table, a run a row, with the columns of `training_columns.yaml`.

A row that does not say enough is refused with the reason, and so is one that names what the catalog does not have.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from windtunnel import catalog
from windtunnel.calibration.measured_runs import Column, Measurement, check_columns, check_ids, columns_of, reason_of
from windtunnel.errors import InputError, check_known
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.shape import LayerGroup, ModelSpec
from windtunnel.schema import decode, encode, set_path
from windtunnel.training.job import TrainingJob

COLUMNS: Mapping[str, Column] = columns_of(Column, Path(__file__).with_name("training_columns.yaml"))
TELLING_COLUMN = "n_gpus"
"""A column that a table of serving runs does not have."""
FRAMEWORKS = {
    "megatron-deepspeed": "deepspeed",
    "deepspeed": "deepspeed",
    "megatron": "megatron",
    "nemo": "megatron",
    "torchtitan": "fsdp2",
    "fsdp": "fsdp2",
    "maxtext": "maxtext",
}
"""Part of a framework's name, the longest first where several are -> framework of a job."""
SHARDING = {"full_shard": 3, "shard_grad_op": 2}
"""PyTorch's name of a sharding strategy -> stage of ZeRO."""
SHAPE = ("layers", "hidden", "heads", "vocab")
RECOMPUTE = {"full": "full", "selective": "selective", "none": "none", "": "none"}


def read_training_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> list[Measurement]:
    """Return the run of every row; one that is refused says why.

    Raises:
        InputError: a column is unknown or missing, or two runs have one id.
    """
    check_columns(path, rows[0], COLUMNS)
    runs = [_measurement(row.get("id") or str(number), row) for number, row in enumerate(rows, 1)]
    check_ids(runs, path, "give each its own, or leave the column out")
    return runs


def training_labels(job: TrainingJob) -> dict[str, str]:
    """Return the labels that a job's run is grouped by."""
    split, model = job.parallelism, job.model.name if isinstance(job.model, ModelSpec) else job.model
    widths = {"tp": split.tp, "cp": split.cp, "pp": split.pp, "ep": split.ep}
    return {
        "framework": job.framework,
        "device": job.device if isinstance(job.device, str) else job.device.name,
        "model": model.rpartition("/")[2],
        "format": job.precision.compute,
        "parallelism": " ".join(f"{name}{width}" for name, width in widths.items() if width > 1 or name == "tp"),
        "devices": str(job.num_devices or ""),
    }


def _measurement(identity: str, row: Mapping[str, str]) -> Measurement:
    given = {name: row[name] for name in COLUMNS if row.get(name)}
    use, source = given.get("use", "primary"), {"source": given["source"]} if "source" in given else {}
    try:
        job = _job(given)
        measured = _measured(given, job)
    except InputError as error:
        labels = {name: given[name] for name in ("framework", "model") if name in given}
        return Measurement(identity, None, reason_of(error), {}, labels | source, use)
    return Measurement(identity, None, "", measured, training_labels(job) | source, use, job=job)


def _job(given: Mapping[str, str]) -> TrainingJob:
    for name, column in COLUMNS.items():
        if column.needed and name not in given:
            raise InputError(f"{name} is empty")
    check_known(given.get("task", "pretrain"), ("pretrain",), f"a step of {given.get('task')!r} is not pre-training")
    raw: dict[str, Any] = {"model": _model(given), **_hardware(given["accelerator"])}
    for name, text in given.items():
        if COLUMNS[name].sets:
            set_path(raw, COLUMNS[name].sets, text if COLUMNS[name].is_text else _whole(given, name))
    set_path(raw, "precision.compute", given.get("precision", "bf16").lower().replace("-", "_"))
    if "framework" in given:
        raw["framework"] = _framework(given["framework"])
    recompute = given.get("act_ckpt", "").lower()
    check_known(recompute, RECOMPUTE, f"there is no recomputation {recompute!r}")
    set_path(raw, "recompute.granularity", RECOMPUTE[recompute])
    if re.fullmatch(r"[01]?(\.0)?", given.get("fsdp", "")) is None:
        raw["sharding"] = _sharding(given)
    job: TrainingJob = decode(raw, TrainingJob)
    return job


def _model(given: Mapping[str, str]) -> Any:
    """Return the catalog's model, or a dense one of the shape that the row gives where its name is not there.

    Its feed-forward is gated where it is not four times as wide as the model.
    """
    try:
        model = catalog.model(model_name(given["model"]))
    except InputError:
        if not given.keys() >= set(SHAPE):
            raise
        layers, hidden, heads, vocab = (_whole(given, name) for name in SHAPE)
        ffn, kv_heads = (
            _whole(given, name) if name in given else usual
            for name, usual in (("ffn", 4 * hidden), ("kv_heads", heads))
        )
        if hidden % heads:
            raise InputError(f"{heads} heads do not divide a width of {hidden}") from None
        is_gated = ffn != 4 * hidden
        attention = GroupedQueryAttention(num_heads=heads, num_kv_heads=kv_heads, head_dim=hidden // heads)
        feed_forward = DenseFeedForward(intermediate_size=ffn, gated=is_gated, bias=not is_gated)
        return encode(
            ModelSpec(
                name=given["model"],
                hidden_size=hidden,
                vocab_size=vocab,
                max_context_tokens=_whole(given, "seq_len"),
                layers=(LayerGroup(num_layers=layers, attention=attention, feed_forward=feed_forward),),
            )
        )
    if "layers" in given and _whole(given, "layers") != model.num_layers:
        raise InputError(f"{model.name} has {model.num_layers} layers, and the row says {given['layers']}")
    return model.name


def _sharding(given: Mapping[str, str]) -> dict[str, int]:
    stage = SHARDING.get(given["fsdp"].lower())
    if stage is not None:
        return {"zero": stage}
    ranks, widths = _whole(given, "fsdp"), [_whole(given, name) for name in ("tp", "pp", "cp") if name in given]
    return {"zero": 3} if ranks * prod(widths) == _whole(given, "n_gpus") else {"zero": 3, "group": ranks}


def _measured(given: Mapping[str, str], job: TrainingJob) -> dict[str, float]:
    """Return the time of a step in seconds, or where there is none the FLOP/s of a device."""
    if "iter_time_s" in given:
        return {"step": _number(given, "iter_time_s")}
    if "tokens_per_s_per_gpu" in given:
        tokens, rate = job.global_batch * job.sequence_tokens, _number(given, "tokens_per_s_per_gpu")
        return {"step": tokens / (rate * _whole(given, "n_gpus"))}
    if "tflops_per_gpu" in given:
        return {"rate": _number(given, "tflops_per_gpu") * 1e12}
    raise InputError("nothing was measured: iter_time_s, tokens_per_s_per_gpu and tflops_per_gpu are empty")


def _number(given: Mapping[str, str], name: str) -> float:
    try:
        value = float(given[name])
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise InputError(f"{name} is {given[name]!r}; a number above zero is needed")
    return value


def _whole(given: Mapping[str, str], name: str) -> int:
    value = _number(given, name)
    if value != int(value):
        raise InputError(f"{name} is {given[name]!r}; a whole number is needed")
    return int(value)


def _framework(text: str) -> str:
    parts = [part for part in FRAMEWORKS if part in text.lower()]
    if not parts:
        raise InputError(f"there is no framework {text!r}; known: {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[max(parts, key=len)]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower())


@cache
def model_name(text: str) -> str:
    """Return the catalog's model of a name, which may differ in separators and case.

    Raises:
        InputError: the catalog has none, or several.
    """
    try:
        name = catalog.model(text).name
        return name if name in catalog.names("models") else text  # a config.json
    except InputError:
        found = [name for name in catalog.names("models") if _plain(name) == _plain(text)]
        if len(found) != 1:
            raise
        return catalog.model(found[0]).name


@cache
def _hardware(text: str) -> dict[str, str]:
    """Return the device that a name means, and the node where it is one: `DGX-H100`.

    A device may be named by words that only its title has, without what is in brackets.

    Raises:
        InputError: the catalog has none, or several.
    """
    known = catalog.names("devices")
    if text in known:
        return {"device": text}
    node = next((name for name in catalog.names("nodes") if _plain(name) == _plain(text)), None)
    if node is not None:
        return {"device": catalog.node(node).device, "node": node}
    words = set(re.findall(r"[a-z0-9]+", re.sub(r"\(.*?\)", "", text).lower()))
    titles = {name: set(re.findall(r"[a-z0-9]+", catalog.device(name).title.lower())) for name in known}
    found = [name for name, title in titles.items() if words and words <= title]
    if len(found) > 1:
        raise InputError(f"{text!r} may be {', '.join(found)}", "name one of them")
    return {"device": found[0] if found else catalog.device(text).name}
