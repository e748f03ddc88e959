"""Measured training runs in a table, a run a row, with the columns of `training_columns.yaml`.

A row that does not say enough is refused with the reason, and so is one that names what the catalog does not have.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from windtunnel import catalog
from windtunnel.calibration.measured_runs import Column, Measurement, check_columns, check_ids, columns_of, reason_of
from windtunnel.errors import InputError, check_known
from windtunnel.hardware import Device
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.shape import LayerGroup, ModelSpec
from windtunnel.schema import decode, encode, flattened, read_yaml, set_path
from windtunnel.training.job import GEMM_FORMATS, TrainingJob

COLUMNS: Mapping[str, Column] = columns_of(Column, Path(__file__).with_name("training_columns.yaml"))
TELLING_COLUMN = "n_gpus"
"""A column that a table of serving runs does not have."""
WORDS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("training_words.yaml"))
"""Words of tables -> ours, by subject."""
SHARDING = {"full_shard": 3, "shard_grad_op": 2}
"""PyTorch's name of a sharding strategy -> stage of ZeRO."""
TASKS = ("pretrain", "SFT", "LoRA")
_REMARK = re.compile(r" \(.*| 2[0-9]\.\d\d\b.*")
"""A remark in brackets, or the release of a container (`24.09`), after a model's name."""
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
    check_known(given.get("task", "pretrain"), TASKS, f"a step of {given.get('task')!r} is not known")
    model = _model(given)
    is_known = model.name in catalog.names("models") and model == catalog.model(model.name)
    raw: dict[str, Any] = {"model": model.name if is_known else encode(model), **_hardware(given["accelerator"])}
    for name, text in given.items():
        if COLUMNS[name].sets:
            set_path(raw, COLUMNS[name].sets, text if COLUMNS[name].is_text else _whole(given, name))
    framework = framework_of(given.get("framework", "megatron"))
    raw["framework"] = framework["framework"]
    set_path(raw, "precision.compute", format_of(given.get("precision", "bf16"), framework.get("fp8", "fp8")))
    if given.get("task") == "LoRA":
        raw["lora"] = {}
    recompute, *beside = given.get("act_ckpt", "").lower().split("+")
    check_known(recompute, RECOMPUTE, f"there is no recomputation {recompute!r}")
    if beside == ["sequence-parallel"]:
        set_path(raw, "parallelism.sequence_parallel", True)
    elif beside:
        raise InputError(f"there is no recomputation {given['act_ckpt']!r}")
    set_path(raw, "recompute.granularity", RECOMPUTE[recompute])
    if re.fullmatch(r"[01]?(\.0)?", given.get("fsdp", "")) is None:
        raw["sharding"] = _sharding(given)
    if "global_batch" not in raw:
        raw["global_batch"] = _global_batch(given)
    split = raw.get("parallelism", {})
    num_chunks = split.get("pp", 1) * split.get("virtual_stages", 1)
    if model.num_layers % num_chunks:
        split["layers_per_stage"] = uneven_layers(model.num_layers, num_chunks)
    _add_usual(raw, framework.get("settings", {}), model)
    job: TrainingJob = decode(raw, TrainingJob)
    return job


def _add_usual(raw: dict[str, Any], settings: Mapping[str, Any], model: ModelSpec) -> None:
    """Add to a job's fields what is usual for its framework, where they do not say it."""
    given = flattened(raw)
    for path, value in flattened(settings).items() if settings else ():
        if path not in given and (model.has_experts or path != "parallelism.experts_exchange"):
            set_path(raw, path, value)


def uneven_layers(num_layers: int, num_chunks: int) -> list[int]:
    """Return layers by chunk where embedding and head count as a layer each (Megatron-Core's
    `account_for_embedding_in_pipeline_split` and `account_for_loss_in_pipeline_split`).

    Raises:
        InputError: there are more chunks than layers.
    """
    share, rest = divmod(num_layers + 2, num_chunks)
    layers = [share + (1 if 0 < index <= rest else 0) for index in range(num_chunks)]
    layers[0] -= 1
    layers[-1] -= 1
    if min(layers) < 0:
        raise InputError(f"{num_layers} layers do not spread over {num_chunks} chunks")
    return layers


def _global_batch(given: Mapping[str, str]) -> int:
    """Return the sequences of a step that the replicas, their micro-batch and the accumulation make."""
    if "mbs" not in given:
        raise InputError("gbs is empty, and so is mbs")
    widths = [_whole(given, name) for name in ("tp", "pp", "cp") if name in given]
    steps = _whole(given, "ga") if "ga" in given else 1
    return _whole(given, "n_gpus") // prod(widths) * _whole(given, "mbs") * steps


def format_of(text: str, fp8: str = "fp8") -> str:
    """Return the recipe of a format as a table writes it; `fp8` is what a framework calls FP8.

    Raises:
        InputError: it is none that is known.
    """
    plain, written = re.sub(r"[ _]", "-", text.strip().lower()), " ".join(words_of(text))
    found = (recipe for words, recipe in WORDS["format_words"] if re.search(rf"\b({words})\b", written))
    ours = plain.replace("-", "_")
    recipe = WORDS["formats"].get(plain) or (ours if ours in GEMM_FORMATS else next(found, None))
    if recipe is None:
        raise InputError(f"the precision {text!r} is not known", f"known are {', '.join(GEMM_FORMATS)}")
    return fp8 if recipe == "fp8" else recipe


@dataclass(frozen=True)
class Shape:
    """A dense model, or one of equal experts, by its widths."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool = True
    bias: bool = True
    gated: bool = False
    head_dim: int | None = None
    experts: int = 0
    per_token: int = 0

    def model(self, name: str, max_tokens: int) -> ModelSpec:
        """Return the model of this shape."""
        attention = GroupedQueryAttention(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim or self.hidden // self.heads,
            qkv_bias=self.bias,
            output_bias=self.bias,
        )
        part: DenseFeedForward | ExpertsFeedForward
        if self.experts:
            part = ExpertsFeedForward(
                num_experts=self.experts, experts_per_token=self.per_token, intermediate_size=self.ffn, gated=self.gated
            )
        else:
            part = DenseFeedForward(intermediate_size=self.ffn, gated=self.gated, bias=self.bias)
        return ModelSpec(
            name=name,
            hidden_size=self.hidden,
            vocab_size=self.vocab,
            max_context_tokens=max_tokens,
            layers=(LayerGroup(num_layers=self.layers, attention=attention, feed_forward=part),),
            tie_word_embeddings=self.tied,
            norm_bias=not self.gated,
        )


@cache
def shape_of(name: str) -> Shape | None:
    """Return the published shape of a model that the catalog has not; None where it is not known."""
    names = {plain_name(known): known for known in WORDS["shapes"]}
    names |= {plain_name(other): known for other, known in WORDS["same_shape"].items()}
    known = names.get(plain_name(_REMARK.sub("", name)))
    return None if known is None else Shape(**WORDS["shapes"][known])


def _model(given: Mapping[str, str]) -> ModelSpec:
    """Return the catalog's model with as many layers as the row says, one of a published shape, or where its name is
    not known a dense one of the row's own shape.
    """
    name, tokens = given["model"], _whole(given, "seq_len")
    try:
        model = catalog.model(model_name(name))
    except InputError:
        if (published := shape_of(name)) is None and not given.keys() >= set(SHAPE):
            raise
        model = (published or _own_shape(given)).model(name, tokens)
    num_layers = _whole(given, "layers") if "layers" in given else model.num_layers
    if num_layers == model.num_layers:
        return model
    if len(model.layers) > 1:
        raise InputError(f"{model.name} has {model.num_layers} layers, and the row says {num_layers}")
    return replace(model, layers=(replace(model.layers[0], num_layers=num_layers),))


def _own_shape(given: Mapping[str, str]) -> Shape:
    """Return the shape that a row gives; a feed-forward that is not four times as wide as the model is gated."""
    layers, hidden, heads, vocab = (_whole(given, name) for name in SHAPE)
    ffn, kv_heads = (
        _whole(given, name) if name in given else usual for name, usual in (("ffn", 4 * hidden), ("kv_heads", heads))
    )
    if hidden % heads:
        raise InputError(f"{heads} heads do not divide a width of {hidden}")
    is_gated = ffn != 4 * hidden
    return Shape(layers, hidden, heads, kv_heads, ffn, vocab, tied=False, bias=not is_gated, gated=is_gated)


def _sharding(given: Mapping[str, str]) -> dict[str, int]:
    stage = SHARDING.get(given["fsdp"].lower())
    if stage is not None:
        return {"zero": stage}
    if named := re.match(r"zero-([1-3])\b", given["fsdp"].lower()):
        return {"zero": int(named[1])}
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


def framework_of(text: str) -> Mapping[str, Any]:
    """Return the framework of a job, what is usual for it, and its name of FP8, by a framework's own name.

    Raises:
        InputError: it is none that is known.
    """
    known: Mapping[str, Mapping[str, Any]] = WORDS["frameworks"]
    parts = [part for part in known if part in text.lower()]
    if not parts:
        raise InputError(f"there is no framework {text!r}; known: {', '.join(known)}")
    return known[max(parts, key=len)]


def _described(device: Device) -> str:
    """Return the words of a device: its title and its power."""
    return device.title if device.tdp_w is None else f"{device.title} {device.tdp_w:g}W"


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, cut at whatever is no letter, digit or point."""
    return re.findall(r"[a-z0-9.]+", text.lower())


def plain_name(name: str) -> str:
    """Return a model's name as every table may write it: letters and digits, without words that change no shape."""
    words = words_of(name.rpartition("/")[2])
    return _letters("".join(word for word in words if word.replace(".", "") not in WORDS["idle_words"]))


@cache
def _by_plain_name() -> dict[str, str]:
    """Return the catalog's models by their plain names; of several with one, the shortest."""
    named = sorted((*catalog.names("models"), *catalog.other_names("models")), key=len, reverse=True)
    return {plain_name(name): name for name in named}


@cache
def model_name(text: str) -> str:
    """Return the catalog's model of a name as a table writes it, with a release or a remark in brackets after it.

    Raises:
        InputError: the catalog has none.
    """
    try:
        name = catalog.model(text).name
        return name if name in catalog.names("models") else text  # a config.json
    except InputError as error:
        key = plain_name(_REMARK.sub("", text))
        known = WORDS["models"].get(key) or _by_plain_name().get(key)
        if known is None:
            raise error from None
        return catalog.model(known).name


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
    named = (*catalog.names("nodes"), *catalog.other_names("nodes"))
    node = next((catalog.node(name) for name in named if _letters(name) == _letters(text)), None)
    if node is not None and node.device is not None:
        return {"device": node.device, "node": node.name}
    words = set(re.findall(r"[a-z0-9]+", re.sub(r"\(.*?\)", "", text).lower()))
    titles = {name: set(re.findall(r"[a-z0-9]+", _described(catalog.device(name)).lower())) for name in known}
    found = [name for name, title in titles.items() if words and words <= title]
    if len(found) > 1:
        raise InputError(f"{text!r} may be {', '.join(found)}", "name one of them")
    return {"device": found[0] if found else catalog.device(text).name}
