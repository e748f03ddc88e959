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
from windtunnel.calibration import measured_runs
from windtunnel.calibration.measured_runs import Column, Measurement
from windtunnel.calibration.training_usual import add_missing, completed, shapes_of
from windtunnel.errors import InputError, check_known
from windtunnel.hardware import Device
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.parameters import count_parameters
from windtunnel.model.shape import LayerGroup, ModelSpec
from windtunnel.schema import decode, encode, read_yaml, set_path
from windtunnel.training.job import GEMM_FORMATS, TrainingJob
from windtunnel.training.setup import uneven_layers

COLUMNS: Mapping[str, Column] = measured_runs.columns_of(Column, Path(__file__).with_name("training_columns.yaml"))
TELLING_COLUMNS = ("n_gpus", "iter_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu")
"""Columns of which a table of training runs has the first; by another name, beside one of the others."""
WORDS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("training_words.yaml"))
"""Words of tables -> ours, by subject."""
SHARDING = {"full_shard": 3, "shard_grad_op": 2}
"""PyTorch's name of a sharding strategy -> stage of ZeRO."""
TASKS = ("pretrain", "SFT", "LoRA")
_REMARK = re.compile(r" \(.*| 2[0-9]\.\d\d\b.*")
"""A remark in brackets, or the release of a container (`24.09`), after a model's name."""
LAYOUT = ("tp", "pp", "dp", "fsdp")
"""Columns that say how a job spreads over its devices; a row without any says nothing of it."""


def are_training_runs(row: Mapping[str, str]) -> bool:
    """Whether a table with this row is one of training runs."""
    names = [measured_runs.column_of(name, COLUMNS) for name in row]
    return TELLING_COLUMNS[0] in row or (TELLING_COLUMNS[0] in names and len({*TELLING_COLUMNS} & {*names}) > 1)


def read_training_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> list[Measurement]:
    """Return the run of every row; one that is refused says why. InputError where a column is unknown, missing or there
    twice, or two runs have one id."""
    rows = measured_runs.with_our_columns(path, rows, COLUMNS)
    measured_runs.check_columns(path, rows[0], COLUMNS)
    layout, shapes = [name for name in LAYOUT if any(row.get(name) for row in rows)], shapes_of(rows)
    runs = [
        _measurement(row.get("id") or str(number), row, layout, shapes.get(row["model"], {}))
        for number, row in enumerate(rows, 1)
    ]
    measured_runs.check_ids(runs, path, "give each its own, or leave the column out")
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


def _measurement(identity: str, row: Mapping[str, str], layout: Sequence[str], shape: Mapping[str, str]) -> Measurement:
    """Return a row's run; `layout` are the columns of `LAYOUT` that the table has, `shape` is that of its model."""
    given = {name: row[name] for name in COLUMNS if row.get(name)}
    use, source = given.get("use", "primary"), {"source": given["source"]} if "source" in given else {}
    try:
        columns, job, taken = read_job(given, layout, shape)
        measured = _measured(columns, job)
    except InputError as error:
        named = {name: row[name] for name in ("framework", "model") if row.get(name)}
        return Measurement(identity, None, measured_runs.reason_of(error), {}, named | source, use)
    labels = training_labels(job) | source | ({"assumed": ", ".join(taken)} if taken else {})
    return Measurement(identity, None, "", measured, labels, use, job=job)


def read_job(
    row: Mapping[str, str], layout: Sequence[str] = (), shape: Mapping[str, str] = {}
) -> tuple[dict[str, str], TrainingJob, list[str]]:
    """Return a row with what is usual for it, its job, and what was taken for columns that are empty.

    One of the columns `layout` is needed; `shape` are layers and width that other rows of its model say. InputError
    where the row does not say enough, or names what is not known.
    """
    for name, column in COLUMNS.items():
        if column.needed and name not in row:
            raise InputError(f"{name} is empty")
    check_known(row.get("task", "pretrain"), TASKS, f"a step of {row.get('task')!r} is not known")
    hardware = hardware_of(row["accelerator"])
    word, framework = framework_of(row.get("framework", "megatron"), row["model"])
    usual = completed(row, word, plain_name(_REMARK.sub("", row["model"])), hardware.called, shape)
    given, taken = usual.columns, usual.taken
    if hardware.is_usual:
        taken.append(hardware.called)
    if layout and not any(given.get(name) for name in layout):
        raise InputError(f"its parallel layout is empty: {', '.join(layout)}")
    if "seq_len" not in given:
        raise InputError("seq_len is empty")
    model = _model(given)
    is_known = model.name in catalog.names("models") and model == catalog.model(model.name)
    written = plain_name(_REMARK.sub("", given["model"]))
    if is_known and plain_name(model.name) != written and written not in WORDS["models"]:
        taken.append(model.name)
    raw: dict[str, Any] = {"model": model.name if is_known else encode(model), **hardware.fields}
    for name, text in given.items():
        if COLUMNS[name].sets:
            set_path(raw, COLUMNS[name].sets, text if COLUMNS[name].is_text else _whole(given, name))
    raw["framework"] = framework["framework"]
    compute = format_of(given.get("precision", "bf16"), framework.get("fp8", "fp8"))
    scales_rows = compute.startswith("fp8") and "rowwise" in given.get("note", "").lower()
    set_path(raw, "precision.compute", "fp8_rowwise" if scales_rows else compute)
    if given.get("task") == "LoRA":
        raw["lora"] = usual.job.pop("lora", {})
    _set_recompute(raw, given.get("act_ckpt", "none"), framework)
    if re.fullmatch(r"[01]?(\.0)?", given.get("fsdp", "")) is None:
        raw["sharding"] = _sharding(given)
    if "global_batch" not in raw:
        raw["global_batch"] = _global_batch(given)
    split = raw.get("parallelism", {})
    if split.get("dp", ranks := _replicas(given)) != ranks:
        split["dp"] = ranks
        taken.append(f"dp {ranks}")
    num_chunks = split.get("pp", 1) * split.get("virtual_stages", 1)
    if model.num_layers % num_chunks:
        split["layers_per_stage"] = uneven_layers(model.num_layers, num_chunks)
    add_missing(raw, usual.job)
    add_missing(raw, framework.get("settings", {}))
    if not model.has_experts:
        raw.get("parallelism", {}).pop("experts_exchange", None)
    job: TrainingJob = decode(raw, TrainingJob)
    return given, job, taken


def _set_recompute(raw: dict[str, Any], text: str, framework: Mapping[str, Any]) -> None:
    """Set the recomputation of a job, and sequence parallelism where a table says it beside."""
    policy, *beside = text.lower().split("+")
    if beside == ["sequence-parallel"]:
        set_path(raw, "parallelism.sequence_parallel", True)
    elif beside:
        raise InputError(f"there is no recomputation {text!r}")
    if policy != "none":
        raw["recompute"] = recompute_of(policy, framework)


def recompute_of(policy: str, framework: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return the recomputation that a table names, as this framework does it; InputError where it is not known."""
    known: dict[str, Any] = {**WORDS["recompute"], **framework.get("recompute", {})}
    name = re.sub(r"\(.*\)$", "", policy.strip().lower())
    check_known(name, known, f"there is no recomputation {policy!r}")
    return dict(known[name])


def _replicas(given: Mapping[str, str]) -> int:
    return max(_whole(given, "n_gpus") // prod(_whole(given, name) for name in ("tp", "pp", "cp") if name in given), 1)


def _global_batch(given: Mapping[str, str]) -> int:
    """Return the sequences of a step that the replicas, their micro-batch and the accumulation make."""
    if "mbs" not in given:
        raise InputError("gbs is empty, and so is mbs")
    return _replicas(given) * _whole(given, "mbs") * (_whole(given, "ga") if "ga" in given else 1)


def format_of(text: str, fp8: str = "fp8") -> str:
    """Return the recipe of a format in a table; `fp8` is what a framework calls FP8; InputError where it is unknown."""
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
        if (published := shape_of(name)) is None and not _says_shape(given):
            if _GPT.match(name):
                raise InputError(f"the shape of {name!r} is not known: layers and hidden are empty") from None
            raise
        model = (published or _own_shape(given)).model(name, tokens)
    num_layers = _whole(given, "layers") if "layers" in given else model.num_layers
    if num_layers == model.num_layers:
        return model
    if len(model.layers) > 1:
        raise InputError(f"{model.name} has {model.num_layers} layers, and the row says {num_layers}")
    return replace(model, layers=(replace(model.layers[0], num_layers=num_layers),))


_GPT = re.compile(r"(gpt|megatron|turing)[^a-z]", re.IGNORECASE)
GPT_VOCAB = 51200
"""Tokens of GPT-2 in multiples of 128 for every tensor-parallel rank of eight (Megatron-LM)."""


def _own_shape(given: Mapping[str, str]) -> Shape:
    """Return the shape that a row gives; a feed-forward that is not four times as wide as the model is gated.

    A model that is named GPT is one with learned positions and tied embeddings; where its size says its depth or width,
    P = 12 l h^2 (arXiv:2104.04473, section 5), in layers that the stages divide and widths in steps of 1,024.
    """
    is_gpt, tp = _GPT.match(given["model"]) is not None, _whole(given, "tp") if "tp" in given else 1
    size = _number(given, "params_B") * 1e9 if is_gpt and "params_B" in given else 0.0
    layers, hidden = (_whole(given, name) if name in given else 0 for name in ("layers", "hidden"))
    if size and layers and not hidden:
        hidden = max(round((size / (12 * layers)) ** 0.5 / 1024), 1) * 1024
    if size and hidden and not layers:
        stages = _whole(given, "pp") if "pp" in given else 1
        layers = max(round(size / (12 * hidden**2) / stages), 1) * stages
    heads = _whole(given, "heads") if "heads" in given else usual_heads(hidden, tp)
    if hidden % heads:
        raise InputError(f"{heads} heads do not divide a width of {hidden}")
    ffn, kv_heads, vocab = (
        _whole(given, name) if name in given else usual
        for name, usual in (("ffn", 4 * hidden), ("kv_heads", heads), ("vocab", GPT_VOCAB))
    )
    is_plain = ffn == 4 * hidden
    return Shape(layers, hidden, heads, kv_heads, ffn, vocab, tied=is_gpt, bias=is_plain, gated=not is_plain)


def _says_shape(given: Mapping[str, str]) -> bool:
    if _GPT.match(given["model"]) is None:
        return given.keys() >= {"layers", "hidden", "heads", "vocab"}
    return len(given.keys() & {"layers", "hidden", "params_B"}) > 1 and bool(given.keys() & {"layers", "hidden"})


def usual_heads(hidden: int, tp: int) -> int:
    """Return a number of heads of about 128 that a width and a tensor-parallel degree divide."""
    return min((n for n in range(tp, hidden + 1, tp) if hidden % n == 0), key=lambda n: abs(hidden / n - 128))


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
        counts_recomputation = "hfu_pct" in given and "mfu_pct" not in given and job.recompute.granularity == "full"
        rate = _number(given, "tflops_per_gpu") * 1e12
        if framework_of(given.get("framework", "megatron"))[1].get("full_attention"):
            return {"step": full_attention_flops(job) / (rate * _whole(given, "n_gpus"))}
        return {"rate": rate * (model_share(job) if counts_recomputation else 1.0)}
    raise InputError("nothing was measured: iter_time_s, tokens_per_s_per_gpu and tflops_per_gpu are empty")


def full_attention_flops(job: TrainingJob) -> float:
    """Return FLOPs, forward and backward, with causal attention counted in full."""
    model = catalog.model(job.model)
    counted = count_parameters(model)
    products = counted.active - counted.embedding - counted.norms
    scores = sum(
        12.0 * group.num_layers * group.attention.num_heads * group.attention.head_dim * job.sequence_tokens
        for group in model.layers
        if isinstance(group.attention, GroupedQueryAttention)
    )
    return job.global_batch * job.sequence_tokens * (6.0 * products + scores)


def model_share(job: TrainingJob) -> float:
    """Return the share of a fully recomputed step's FLOPs that are the model's: of layers three in four, of the head
    all (arXiv:2104.04473, equation 3).
    """
    model = catalog.model(job.model)
    counted = count_parameters(model)
    head = model.vocab_size * model.hidden_size
    layers = counted.active - counted.embedding - counted.norms - (0 if model.tie_word_embeddings else head)
    return 3 * (layers + head) / (4 * layers + 3 * head)


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


def framework_of(text: str, model: str = "") -> tuple[str, Mapping[str, Any]]:
    """Return the word of `WORDS` in a framework's own name, with its job's framework, what is usual, its name of FP8.

    Some are named with the model, whatever else a table says: `Paxml GPT5B`. InputError where it is none that is known.
    """
    known: Mapping[str, Mapping[str, Any]] = WORDS["frameworks"]
    parts = [part for part in known if known[part].get("in_model") and part in model.lower()]
    parts = parts or [part for part in known if _letters(part) in _letters(text)]
    if not parts:
        raise InputError(f"there is no framework {text!r}; known: {', '.join(known)}")
    word = max(parts, key=len)
    return word, known[word]


def _described(device: Device) -> str:
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


def _begun_by(key: str) -> str | None:
    """Return the catalog's model whose plain name goes on where `key`, which says a size, ends: `qwen3235b`.

    Several are one where their layers are the same; else none is meant.
    """
    found = [name for plain, name in _by_plain_name().items() if plain.startswith(key)]
    if re.search(r"\d[bt]$", key) is None or not found:
        return None
    models = [catalog.model(name) for name in found]
    is_one = len({(model.hidden_size, model.vocab_size, model.layers) for model in models}) == 1
    return min(found, key=len) if is_one else None


@cache
def model_name(text: str) -> str:
    """Return the catalog's model of a name in a table, a remark in brackets after it; InputError where it has none."""
    try:
        name = catalog.model(text).name
        return name if name in catalog.names("models") else text  # a config.json
    except InputError as error:
        key = plain_name(_REMARK.sub("", text))
        known = WORDS["models"].get(key) or _by_plain_name().get(key) or _begun_by(key)
        if known is None:
            raise error from None
        return catalog.model(known).name


@dataclass(frozen=True)
class Hardware:
    """What a table calls an accelerator."""

    called: str
    """A device of the catalog."""
    fields: Mapping[str, Any]
    """Device and node of a job."""
    is_usual: bool = False
    """Whether the name fits several devices, of which this one is usually meant."""


@cache
def hardware_of(text: str) -> Hardware:
    """Return the device that a name means, and the node where it is one: `DGX-H100`.

    A device may be named by words that only its title has, without what is in brackets, or by those of `WORDS`.
    InputError where the catalog has none, or several.
    """
    known = catalog.names("devices")
    if text in known:
        return Hardware(text, {"device": text})
    named = (*catalog.names("nodes"), *catalog.other_names("nodes"))
    node = next((catalog.node(name) for name in named if _letters(name) == _letters(text)), None)
    written = set(words_of(re.sub("(?i)tpu(?=v)", "tpu ", text).replace(".", " ")))
    called = max((key for key in WORDS["devices"] if written.issuperset(key.split())), key=len, default="")
    meant: str | Mapping[str, Any] | None = WORDS["devices"].get(called)
    if node is not None and node.device and (meant is None or meant == node.device):
        return Hardware(node.device, {"device": node.device, "node": node.name})
    words = set(re.findall(r"[a-z0-9]+", re.sub(r"\(.*?\)", "", text).lower()))
    titles = {name: set(re.findall(r"[a-z0-9]+", _described(catalog.device(name)).lower())) for name in known}
    found = [name for name, title in titles.items() if title.issuperset(words or {""})]
    if len(found) == 1:
        return Hardware(found[0], {"device": found[0]})
    if isinstance(meant, Mapping):
        parts = {name: value for name, value in meant.items() if name != "like"}
        device = decode(encode(catalog.device(meant["like"])) | parts, Device)
        return Hardware(meant["like"], {"device": encode(device)})
    if meant not in (None, "none"):
        return Hardware(meant, {"device": meant}, is_usual=len(found) > 1)
    if len(found) > 1:
        raise InputError(f"{text!r} may be {', '.join(found)}", "name one of them")
    name = catalog.device(text).name
    return Hardware(name, {"device": name})
