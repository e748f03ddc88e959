"""Read a job file of torchtitan as a training job: unknown keys are announced, unknown values refused."""

import tomllib
from collections.abc import Mapping
from math import ceil, prod
from pathlib import Path
from typing import Any

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.files import read_text
from windtunnel.formats.job_files import JobLaunch
from windtunnel.schema import decode, read_yaml
from windtunnel.training.job import BY_OPERATOR, CHUNKED_SCHEDULES, V_SCHEDULES, TrainingJob
from windtunnel.training.setup import TrainingSetup

WORDS: Mapping[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("words.yaml"))
_WIDTHS = ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree")
ENDS = ("first", "last")
CHUNKS_OF_A_LOOP = 2
"""Stages of each rank of a looped schedule without `pipeline_parallel_layers_per_stage`."""


def read_job(path: Path, launch: JobLaunch) -> tuple[TrainingJob, tuple[str, ...]]:
    """Read a job and the keys that were ignored. InputError where the file is no TOML, has a value that is not known,
    or leaves one open that `launch` does not give."""
    try:
        raw = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is no TOML: {error}") from None
    device = launch.device_or(None, "torchtitan's files do not name one")
    job = Job(raw, launch.num_devices, launch.overrides)
    fields = {"device": device, **job.fields()}
    return decode(fields, TrainingJob, str(path)), job.unread()


class Job:
    """A file's keys, which of them were read, and what they mean."""

    def __init__(self, raw: dict[str, Any], num_devices: int | None, given: Mapping[str, Any] | None = None) -> None:
        self.raw, self.given = raw, given or {}
        self.given_devices = num_devices
        self.read: set[tuple[str, str]] = set()

    def unread(self) -> tuple[str, ...]:
        """Return the keys that were not read, but for those that change no prediction wherever they are."""
        idle = WORDS["keys_without_effect"]
        found = (
            (section, name)
            for section, keys in self.raw.items()
            if section not in WORDS["without_effect"]
            for name in _leaves(keys)
        )
        return tuple(f"{s}.{n}" for s, n in found if (s, n) not in self.read and n not in idle.get(s, ()))

    def value(self, section: str, name: str, default: Any) -> Any:
        """Return a key of a type like the default's; `name` may have dots."""
        self.read.add((section, name))
        found: Any = self.raw.get(section, {})
        for part in name.split("."):
            if not isinstance(found, dict) or part not in found:
                return default
            found = found[part]
        if default is not None and not isinstance(found, type(default)):
            raise InputError(f"{section}.{name} is {found!r}; it is like {default!r}")
        return found

    def first(self, default: Any, *places: tuple[str, str]) -> Any:
        """Return the first of several keys: releases call or place one differently."""
        found = [self.value(*place, None) for place in places]
        return next((value for value in found if value is not None), default)

    def choice(self, text: str, kind: str, where: str) -> str:
        words = WORDS[kind]
        if text not in words:
            raise InputError(f"{where} is {text!r}, which is not read", f"known are {', '.join(map(str, words))}")
        return str(words[text])

    def width(self, name: str) -> int:
        found = self.first(1, ("parallelism", name), ("experimental", name))
        if type(found) is not int or found < 1:
            raise InputError(f"parallelism.{name} is {found!r}; it is a whole number from 1 on")
        return found

    def fields(self) -> dict[str, Any]:
        replicas, shards = self.data_parallelism()
        dp = replicas * shards
        local = self.first(8, ("training", "local_batch_size"), ("training", "batch_size"))
        declared = self.value("training", "global_batch_size", -1)
        sequences, steps = self.value("training", "seq_len", 2048), self.value("training", "steps", 10000)
        pp, compiled, model = self.width("pipeline_parallel_degree"), self.is_compiled(), self.model()
        schedule, layers = self.pipeline(pp, catalog.model(model).num_layers)
        global_batch = declared if declared > 0 else local * dp
        piece = self.value("parallelism", "pipeline_parallel_microbatch_size", 1)
        chunks = {"virtual_stages": len(layers) // pp, "layers_per_stage": layers} if pp > 1 else {}
        return {
            "model": model,
            "sequence_tokens": sequences,
            "global_batch": global_batch,
            "micro_batch": piece if pp > 1 else local,
            "num_devices": dp * prod(map(self.width, _WIDTHS)),
            "total_tokens": float(steps) * global_batch * sequences,
            "framework": "fsdp2",
            "parallelism": {**self.parallelism(pp), **chunks},
            "sharding": self.sharding(replicas, shards, pp),
            "precision": self.precision(),
            "recompute": self.recompute(max(layers)),
            "optimizer": self.choice(self.value("optimizer", "name", "AdamW"), "optimizers", "optimizer.name"),
            "overlap": {"tensor_parallel": self.asynchronous_tensors() and compiled},
            "kernels": self.kernels(compiled),
            "schedule": schedule,
        }

    def model(self) -> str:
        name, flavor = self.value("model", "name", "llama3"), self.value("model", "flavor", "debugmodel")
        flavors: dict[str, str] = WORDS["models"].get(name, {})
        if flavor in flavors:
            return flavors[flavor]
        known = ", ".join(flavors or WORDS["models"])
        raise InputError(f"torchtitan's model {name} {flavor} is not known", f"known are {known}")

    def data_parallelism(self) -> tuple[int, int]:
        """Return replicas and the ranks that share one; -1 shards over what the devices leave."""
        replicas = self.width("data_parallel_replicate_degree")
        shards = self.value("parallelism", "data_parallel_shard_degree", -1)
        others = prod(map(self.width, _WIDTHS)) * replicas
        if shards > 0 and self.given_devices in (None, shards * others):
            return replicas, shards
        if self.given_devices is None:
            raise InputError(
                "the number of devices is not in the file: parallelism.data_parallel_shard_degree takes what is left",
                "give --num-devices",
            )
        shards, rest = divmod(self.given_devices, others)
        if rest:
            raise InputError(f"--num-devices is {self.given_devices}, no multiple of the file's {others} ranks")
        return replicas, shards

    def is_compiled(self) -> bool:
        return bool(self.first(False, ("compile", "enable"), ("training", "compile")))

    def kernels(self, compiled: bool) -> dict[str, Any]:
        """Return the kernels; releases that have `training.compile` do not compile the loss."""
        components = self.value("compile", "components", ["model", "loss"])
        is_loss_compiled = compiled and "compile" in self.raw and "loss" in components
        return {"fused": compiled, **({"cross_entropy": "separate"} if is_loss_compiled else {})}

    def asynchronous_tensors(self) -> bool:
        sections = ("parallelism", "experimental")
        return bool(self.first(False, *((section, "enable_async_tensor_parallel") for section in sections)))

    def parallelism(self, pp: int) -> dict[str, Any]:
        method = self.value("parallelism", "context_parallel_rotate_method", "allgather")
        ep, experts_tp = self.width("expert_parallel_degree"), self.width("expert_tensor_parallel_degree")
        experts: dict[str, Any] = {"ep": ep, "experts_tp": experts_tp} if max(ep, experts_tp) > 1 else {}
        backend = self.value("parallelism", "expert_parallel_comm_backend", "standard")
        if experts and backend != "standard":
            experts["experts_exchange"] = self.choice(backend, "expert_exchanges", "expert_parallel_comm_backend")
        return {
            "tp": self.width("tensor_parallel_degree"),
            "cp": self.width("context_parallel_degree"),
            "cp_method": self.choice(method, "context_methods", "parallelism.context_parallel_rotate_method"),
            "pp": pp,
            **experts,
        }

    def schedule(self, text: str) -> str:
        names: dict[str, str] = WORDS["schedule_names"]
        name = next((name for name in names if name.lower() == text.lower()), text)
        return self.choice(name, "schedule_names", "parallelism.pipeline_parallel_schedule")

    def pipeline(self, pp: int, num_layers: int) -> tuple[str | None, list[int]]:
        """Return the schedule and the layers of each chunk, where embedding and head count as layers."""
        text = self.value("parallelism", "pipeline_parallel_schedule", "1F1B")
        layers = self.first(None, ("parallelism", "pipeline_parallel_layers_per_stage"))
        first, last = (self.value("parallelism", f"pipeline_parallel_{end}_stage_less_layers", 1) for end in ENDS)
        if pp == 1:
            return None, [num_layers]
        schedule, counted = self.schedule(text), num_layers + first + last
        of_a_rank = CHUNKS_OF_A_LOOP if schedule in (*CHUNKED_SCHEDULES, *V_SCHEDULES) else 1
        num_chunks = pp * (ceil(counted / layers / pp) if layers and schedule in CHUNKED_SCHEDULES else of_a_rank)
        share, rest = divmod(counted, num_chunks)
        chunks = [share + (chunk < rest) for chunk in range(num_chunks)]
        chunks[0] -= first
        chunks[-1] -= last
        return schedule, chunks

    def sharding(self, replicas: int, shards: int, pp: int) -> dict[str, Any]:
        policy = self.value("parallelism", "fsdp_reshard_after_forward", "default")
        shards *= self.width("context_parallel_degree")
        is_offloaded = self.value("training", "enable_cpu_offload", False)
        if shards == 1 and is_offloaded:
            raise InputError("training.enable_cpu_offload = true needs FSDP over several ranks", "switch it off")
        if shards == 1:
            return {"zero": 0}
        group: dict[str, Any] = {"group": shards} if replicas > 1 else {}
        group |= {"offload": "parameters"} if is_offloaded else {}
        return {"zero": 3, "reshard_after_forward": policy == "always" or (policy == "default" and pp == 1), **group}

    def precision(self) -> dict[str, Any]:
        kept = self.choice(self.value("training", "dtype", "float32"), "dtypes", "training.dtype")
        computed, reduced = (
            self.choice(self.value("training", f"mixed_precision_{what}", default), "dtypes", f"mixed_precision_{what}")
            for what, default in (("param", "bfloat16"), ("reduce", "float32"))
        )
        own = {"master_weights": "bf16", "moments": "bf16"} if kept == "bf16" else {}
        sums = {"gradients": kept, "gradient_reduce": reduced}
        return {"compute": self.recipe() or computed, "parameter_gather": self.gathered(computed), **sums, **own}

    def recipe(self) -> str | None:
        """Return the format of the products that converters exchange, or None without one."""
        converters = self.first([], ("model", "converters"))
        names = converters.split(",") if isinstance(converters, str) else converters
        kinds = {str(name).strip().rpartition(".")[2] for name in names} - {""}
        text = None
        if "float8" in kinds:
            text = self.first("tensorwise", *_places("float8", "recipe_name"))
        elif kinds & {"mx", "mxfp8"}:
            text = self.first("mxfp8", *_places("mx", "recipe_name"))
        elif kinds:
            raise InputError(f"model.converters has {', '.join(sorted(kinds))}", "float8 and mx are read")
        return None if text is None else self.choice(text, "recipes", "recipe_name")

    def gathered(self, computed: str) -> str | None:
        narrow = self.first(False, *_places("float8", "enable_fsdp_float8_all_gather"))
        return "fp8" if narrow and self.recipe() == "fp8_current" else "fp32" if computed == "fp32" else None

    def recompute(self, layers_of_a_chunk: int) -> dict[str, Any]:
        mode = self.given.get("recompute.granularity") or self.value("activation_checkpoint", "mode", "selective")
        option = str(self.first("2", ("activation_checkpoint", "selective_ac_option")))
        if mode not in ("none", "selective", "full"):
            hint = "none, selective and full are read; --recompute takes one of them in its place"
            raise InputError(f"activation_checkpoint.mode is {mode!r}", hint)
        if mode != "selective" or option == "op":
            modules = {"modules": list(BY_OPERATOR)} if mode == "selective" else {}
            return {"granularity": mode, **modules}
        if not option.isdecimal() or int(option) < 1:
            raise InputError(
                f"activation_checkpoint.selective_ac_option is {option!r}", "it is op or a number of layers"
            )
        return {"granularity": "full", "num_layers": ceil(layers_of_a_chunk / int(option))}


def changed_keys(before: TrainingSetup, after: TrainingSetup) -> tuple[list[str], list[str]]:
    """Return the keys of a job file that differ, with their values; none is left out."""
    old, new = _keys(before), _keys(after)
    return [f"{name} = {value}" for name, value in new.items() if value != old.get(name)], []


def _keys(setup: TrainingSetup) -> dict[str, str]:
    """Return the keys of a layout, as a job file has them."""
    split, job = setup.degrees, setup.job
    local = split.micro_batch * (split.num_microbatches if split.pp > 1 else 1)
    keys: dict[str, Any] = {
        "tensor_parallel_degree": split.tp,
        "context_parallel_degree": split.cp,
        "pipeline_parallel_degree": split.pp,
        "expert_parallel_degree": split.ep,
    }
    if split.pp > 1:
        named = {ours: theirs for theirs, ours in WORDS["schedule_names"].items()}
        keys |= {
            "pipeline_parallel_microbatch_size": split.micro_batch,
            "pipeline_parallel_schedule": f'"{named[job.schedule]}"',
            "pipeline_parallel_layers_per_stage": ceil((setup.model.num_layers + 2) / split.num_chunks),
        }
    training = {"local_batch_size": local, "global_batch_size": job.global_batch}
    found = {f"parallelism.{name}": str(value) for name, value in keys.items()}
    found |= {f"training.{name}": str(value) for name, value in training.items()}
    is_by_layer = job.recompute.granularity == "full" and job.recompute.num_layers is not None
    found["activation_checkpoint.mode"] = '"selective"' if is_by_layer else f'"{job.recompute.granularity}"'
    if found["activation_checkpoint.mode"] == '"selective"':
        found["activation_checkpoint.selective_ac_option"] = "by layer" if is_by_layer else '"op"'
    return found


def _places(kind: str, name: str) -> tuple[tuple[str, str], ...]:
    """Where releases have a key of a converter."""
    return ((kind, name), ("quantize", f"linear.{kind}.{name}"), ("quantize", f"dense.{kind}.{name}"))


def _leaves(keys: Any, before: str = "") -> list[str]:
    """Return the dotted names of a section's values."""
    if not isinstance(keys, dict):
        return [before]
    return [name for key, value in keys.items() for name in _leaves(value, f"{before}.{key}" if before else key)]
