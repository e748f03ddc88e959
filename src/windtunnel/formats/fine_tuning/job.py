"""Say what the keys of a fine-tuning job mean as a training job."""

import re
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.files import is_folder, parse_whole
from windtunnel.formats.fine_tuning.sources import WORDS, Source
from windtunnel.formats.job_files import JobLaunch
from windtunnel.model.shape import ModelSpec
from windtunnel.schema import decode
from windtunnel.training.job import TrainingJob

_NOTHING = ("", "none", "[]", "{}", "false")
"""Values of keys that say nothing."""


class FineTuning:
    """The keys of a job, which of them were read, and what they mean."""

    def __init__(self, source: Source, launch: JobLaunch) -> None:
        self.source, self.launch = source, launch
        self.keys, self.defaults = source.keys, WORDS["tools"][source.tool]["defaults"]
        self.used: set[str] = set()
        self.notes: list[str] = []

    def read(self) -> tuple[TrainingJob, tuple[str, ...]]:
        """Return the job, and what of it was not read. InputError where a value is wrong or is not modelled, or one is
        missing that `launch` does not give."""
        for rule in WORDS["refused"]:
            for key in rule["keys"]:
                value = str(self.keys.get(key, "")).lower()
                is_refused = value in rule["values"] if "values" in rule else value not in WORDS["switched_off"]
                if is_refused and rule.get("unless") not in self.launch.overrides:
                    raise InputError(f"{self.source.dashes}{key} = {value} is not modelled", rule["hint"])
        device = self.launch.device_or(None, f"{self.source.path} does not name one")
        job = decode(self.fields(device), TrainingJob, str(self.source.path))
        return job, (*self.notes, *self.unread())

    def unread(self) -> list[str]:
        """Return the keys that say something, were not used, and may change a prediction."""
        idle = WORDS["without_effect"]
        left = [key for key, value in self.keys.items() if key not in self.used and str(value).lower() not in _NOTHING]
        return [f"{self.source.dashes}{key}" for key in left if not any(fnmatchcase(key, each) for each in idle)]

    def find(self, setting: str) -> tuple[str, Any]:
        """Return the name and value of a setting that the job gives, or else the tool's default; None without one."""
        names: list[str] = WORDS["settings"][setting]
        name = next((each for each in names if self.keys.get(each) not in (None, "")), None)
        if name is None:
            return f"{self.source.dashes}{names[0]}", self.defaults.get(setting)
        self.used.add(name)
        return f"{self.source.dashes}{name}", self.keys[name]

    def words(self, setting: str) -> list[str]:
        """Return the words of a list, or of a text with blanks or commas between them."""
        value = self.find(setting)[1]
        text = " ".join(map(str, value)) if isinstance(value, list) else str("" if value is None else value)
        return text.lower().replace(",", " ").split()

    def is_on(self, setting: str) -> bool:
        """Whether a setting has any value that does not switch it off."""
        return str(self.find(setting)[1]).lower() not in WORDS["switched_off"]

    def flag(self, setting: str) -> bool:
        name, value = self.find(setting)
        if str(value).lower() not in (*WORDS["switched_on"], *WORDS["switched_off"]):
            raise InputError(f"{name} is {value!r}; it is true or false")
        return self.is_on(setting)

    def number(self, setting: str, default: int | None = None, least: int = 0) -> int:
        name, value = self.find(setting)
        value = default if value is None else value
        if value is None:
            raise InputError(f"{name} is missing", f"add it to {self.source.path}")
        if not re.fullmatch(r"\d+(\.0*)?(e\+?\d\d?)?", str(value)):
            hint = "the variable is not assigned here" if "$" in str(value) else None
            raise InputError(f"{name} is {value!r}; a whole number is needed", hint)
        return parse_whole(float(value), name, least)

    def choice(self, setting: str, kind: str, default: str) -> Any:
        name, value = self.find(setting)
        return _known(name, default if value is None else value, kind)

    def fields(self, device: str) -> dict[str, Any]:
        self.choice("stage", "stages", "sft")
        model, num_devices, tokens = self.model(), self.num_devices(), self.sequence_tokens()
        split, micro_batch = self.parallelism(), self.number("micro_batch", least=1)
        dp, rest = divmod(num_devices, split["tp"] * split["cp"])
        if rest:
            raise InputError(f"{num_devices} devices are no multiple of {split['tp']} x {split['cp']} ranks (tp x cp)")
        global_batch = micro_batch * self.number("accumulation", 1, least=1) * dp
        num_steps = self.number("steps") if self.words("steps") not in ([], ["-1"]) else 0
        is_zero = any((self.is_on("deepspeed"), self.flag("use_deepspeed"), self.find("zero")[1] is not None))
        framework = "deepspeed" if is_zero else "fsdp2"
        self.find("distributed")
        sharding, overlap = self.zero(model) if is_zero else (self.fsdp(device, dp * split["cp"]), {})
        lora = self.lora()
        optimizer, moments = self.choice("optimizer", "optimizers", "adamw_torch")
        self.check_deepspeed(micro_batch, global_batch)
        precision = self.precision(framework, sharding["zero"], lora is not None)
        if optimizer == "sgd":
            precision.pop("moments", None)
        if frozen := self.quantised():
            precision["frozen_weights"] = frozen
        sharding["offload"] = self.offload(framework)
        if "paged" in " ".join(self.words("optimizer")):
            self.notes.append("pages of the optimizer's state (taken to stay on the devices)")
        return {
            "model": model,
            "device": device,
            "sequence_tokens": tokens,
            "global_batch": global_batch,
            "micro_batch": micro_batch,
            "num_devices": num_devices,
            "total_tokens": float(num_steps * global_batch * tokens) or None,
            "framework": framework,
            "parallelism": split,
            "sharding": sharding,
            "overlap": overlap,
            "precision": {**precision, **({"moments": moments} if moments else {})},
            "recompute": self.recompute(model),
            "lora": lora,
            "optimizer": "muon" if self.flag("muon") else optimizer,
            "kernels": self.kernels(),
        }

    def model(self) -> str:
        """Return the model's name; that of a copy, in a folder of another machine or by a mirror, is the catalog's."""
        name = str(self.launch.overrides.get("model") or self.find("model")[1] or "")
        if not name:
            raise InputError(f"{self.source.path} names no model", "give --model")
        folders, _, rest = name.rstrip("/").rpartition("/")
        is_path = name.startswith(("/", ".", "~", "$")) and not is_folder(Path(name))
        if is_path or folders.lower() in WORDS["mirrors"]:
            with suppress(InputError):
                known = catalog.known_name("models", rest)
                self.notes.append(f"{folders} (the model is read as {known})")
                return known
        return name

    def shape(self, model: str) -> ModelSpec | None:
        """Return the model, of which some values are multiples; None where it must be downloaded first."""
        try:
            return catalog.model(model)
        except InputError:
            self.notes.append("what follows from the size of a model that is not in the catalog")
            return None

    def num_devices(self) -> int:
        num_devices = self.launch.num_devices or self.source.num_devices
        if num_devices is None:
            raise InputError(f"the number of devices is not in {self.source.path}", "give --num-devices")
        return num_devices

    def sequence_tokens(self) -> int:
        """Return the tokens of a sequence: the limit, to which sequences are packed or padded."""
        given = self.launch.overrides.get("sequence_tokens")
        if given is None and self.find("sequence_tokens")[1] is None:
            raise InputError(f"the length of sequences is not in {self.source.path}", "give --sequence-tokens")
        tokens = int(given or self.number("sequence_tokens", least=1))
        self.notes.append(f"lengths of examples (sequences are packed or padded to {tokens:,} tokens)")
        self.find("packing")
        return tokens

    def parallelism(self) -> dict[str, Any]:
        tp, cp, ulysses = (max(self.number(name, 1), 1) for name in ("tp", "cp", "ulysses"))
        packs = self.source.tool != "axolotl" or self.flag("packing")
        method = self.choice("ring", "ring_functions", "varlen_llama3" if packs else "batch_ring")
        # transformers splits weights alone: norms and residuals stay whole.
        whole = {"sequence_parallel": False} if tp > 1 else {}
        experts = {"ep": ep} if (ep := self.number("ep", 1)) > 1 else {}
        return {"tp": tp, "cp": cp * ulysses, "cp_method": "ulysses" if ulysses > 1 else method, **whole, **experts}

    def fsdp(self, device: str, ranks: int) -> dict[str, Any]:
        """Return the sharding of FSDP over `ranks`; without it, none (DDP)."""
        words = [word for word in self.words("fsdp") if word not in WORDS["switched_off"]]
        has_keys = any(key.startswith("fsdp_config.") and value is not None for key, value in self.keys.items())
        is_meant = self.flag("use_fsdp") or (has_keys and self.words("distributed") in ([], ["fsdp"]))
        if not words and not is_meant:
            return {"zero": 0}
        kinds = [*self.words("fsdp_strategy"), *(word for word in words if word != "auto_wrap")]
        stages = [_known("fsdp", kind, "fsdp") for kind in kinds] or [WORDS["fsdp"]["full_shard"]]
        zero, is_by_node = stages[0]
        of_node = catalog.default_node(catalog.device(device)).num_devices
        group = of_node if is_by_node else ranks // max(self.number("replicas", 1), 1)
        keeps = zero == 3 and self.find("reshard")[1] is not None and not self.is_on("reshard")
        return {"zero": zero, "group": group if group < ranks else None, "reshard_after_forward": not keeps}

    def zero(self, model: str) -> tuple[dict[str, Any], dict[str, bool]]:
        """Return DeepSpeed's sharding and overlap; transformers fills in `auto` from the hidden size."""
        stage, shape = self.number("zero", 0), self.shape(model)
        fields: dict[str, Any] = {"zero": stage}
        for name, setting in WORDS["zero_settings"].items():
            words = self.words(name) if stage in setting["stages"] else []
            if words == ["auto"] and setting["auto"] and shape:
                factor, power = setting["auto"]
                fields[name] = int(factor * shape.hidden_size**power)
            elif words and words != ["auto"]:
                fields[name] = self.number(name)
        # DeepSpeed overlaps by default where it shards parameters (runtime/zero/config.py).
        overlaps = stage == 3 if self.find("overlap")[1] is None else self.flag("overlap")
        return fields, {"gradient_reduce": overlaps, **({"parameter_gather": overlaps} if stage == 3 else {})}

    def check_deepspeed(self, micro_batch: int, global_batch: int) -> None:
        """Raise InputError where DeepSpeed's file contradicts the arguments: so does Hugging Face's Trainer
        (transformers/integrations/deepspeed.py, `trainer_config_finalize`).
        """
        said: dict[str, Any] = {"train_micro_batch_size_per_gpu": micro_batch, "train_batch_size": global_batch}
        said["gradient_accumulation_steps"] = self.number("accumulation", 1, least=1)
        on = {f"{kind}.enabled": self.flag(kind) for kind in ("fp16", "bf16")}
        for name, value in {**said, **(on if any(on.values()) else {})}.items():
            given = self.keys.get(f"deepspeed.{name}", "auto")
            if str(given).lower() not in ("auto", str(value).lower()):
                raise InputError(
                    f"deepspeed.{name} is {given}, and the arguments make it {value}",
                    "the Trainer refuses that: make them equal, or write auto in DeepSpeed's file",
                )

    def precision(self, framework: str, zero: int, is_lora: bool) -> dict[str, Any]:
        """Return the number formats. Without mixed precision, weights in 16 bit are updated as they are.

        Sharded by FSDP, accelerate keeps trained weights in fp32 and reduces gradients in the format of the products;
        adapters are in fp32 (peft's `autocast_adapter_dtype`).
        """
        weights = "bf16" if self.flag("pure_bf16") else self.choice("weights", "formats", "float32")
        given = (each for each in ("fp16", "bf16") if self.flag(each) or self.words(f"zero_{each}") == ["true"])
        mixed = next(given, self.choice("mixed_precision", "mixed", "no"))
        compute = "fp8_current" if self.flag("fp8") else mixed or weights
        is_wide = self.choice("frozen_weights", "formats", "float32") == "fp32" and not self.quantised()
        if is_lora and framework != "deepspeed" and is_wide:
            self.notes.append("frozen weights in fp32 (taken as bf16)")
        if compute == "fp32":
            gathered = "fp32" if zero else None
            return {"compute": compute, "gradients": "fp32", "gradient_reduce": "fp32", "parameter_gather": gathered}
        if framework == "deepspeed":
            return {"compute": compute}
        if not is_lora and weights != "fp32" and (not zero or mixed is None):
            own = ("gradients", "gradient_reduce", "master_weights", "moments")
            return {"compute": compute, **dict.fromkeys(own, "bf16")}
        gathered = "fp8" if zero and self.flag("fp8") and self.flag("fp8_gather") else None
        reduced = "bf16" if zero and mixed else "fp32"
        return {"compute": compute, "gradients": "fp32", "gradient_reduce": reduced, "parameter_gather": gathered}

    def quantised(self) -> str | None:
        """Return the format of frozen weights that bitsandbytes has in 4 or 8 bits."""
        bits = self.words("quantised_bits")
        if bits == ["4"] or self.flag("four_bits") or self.words("adapter") == ["qlora"]:
            return "nf4"
        return "int8" if bits == ["8"] or self.flag("eight_bits") else None

    def offload(self, framework: str) -> str:
        """Return what is offloaded to the host's memory; InputError for parameters alone, or a part of the state."""
        if framework == "fsdp2":
            return "parameters" if self.is_on("fsdp_offload") else "none"
        optimizer = self.is_on("offloaded_optimizer") or self.is_on("cpu_offload")
        part, ratio = self.find("offload_ratio")
        if optimizer and str(ratio) not in ("None", "1", "1.0"):
            raise InputError(f"{part} = {ratio} is not modelled", "state is offloaded whole: ratio 1.0")
        name, _ = self.find("offloaded_parameters")
        if not self.is_on("offloaded_parameters"):
            return "optimizer" if optimizer else "none"
        if not optimizer:
            raise InputError(f"{name} without offload_optimizer is not modelled", "offload the optimizer's state too")
        return "parameters"

    def recompute(self, model: str) -> dict[str, Any]:
        granularity, is_offloaded = self.choice("checkpointing", "checkpointing", "false")
        is_off, is_full = self.flag("no_checkpointing"), self.flag("fsdp_checkpointing")
        shape = self.shape(model) if is_offloaded or self.flag("offloaded_activations") else None
        offloaded = shape.num_layers if shape else 0
        return {"granularity": "full" if is_full else "none" if is_off else granularity, "offload_layers": offloaded}

    def lora(self) -> dict[str, Any] | None:
        if self.choice("adapter", "adapters", "full") == "full":
            return None
        dropout, rank = self.words("lora_dropout"), self.number("lora_rank", least=1)
        return {"rank": rank, "target_modules": self.adapted(), "dropout": dropout not in ([], ["0"], ["0.0"])}

    def adapted(self) -> list[str] | None:
        """Return the linear layers that have adapters, by the last part of a module's name; None for all of them.

        Without names PEFT takes those of queries and values for nearly every model (peft/utils/constants.py).
        """
        (name, _), words = self.find("lora_targets"), self.words("lora_targets")
        is_typed = any(path in self.launch.overrides for path in ("lora.target_modules", "lora.all_linear"))
        if self.flag("lora_linear") or is_typed or any(word in WORDS["all_linear"] for word in words):
            return None
        if not words:
            self.notes.append(f"{name} is not given (PEFT's default is taken: q_proj and v_proj)")
        modules = [_known(name, word.rpartition(".")[2], "targets") for word in words or ["q_proj", "v_proj"]]
        return list(dict.fromkeys(name for names in modules for name in names))

    def kernels(self) -> dict[str, Any]:
        """Return the kernels; Liger's, of the loss too, take the place of eager ones."""
        compiled, liger = self.is_on("compile"), self.flag("liger")
        chunked, in_place, layers = (self.flag(name) for name in ("chunked_loss", "loss_in_place", "liger_layers"))
        by_plugin = "cut_cross_entropy" in " ".join(self.words("plugins"))
        by_tool = "in_place" if in_place else "separate" if compiled else None
        loss = "chunked" if chunked or liger or by_plugin else by_tool
        named = self.choice("attention", "attentions", "auto")
        attention = "unfused" if self.flag("eager_attention") else "flash2" if self.flag("flash_attention") else named
        return {"fused": compiled or liger or layers, "cross_entropy": loss, "attention": attention}


def _known(name: str, value: Any, kind: str) -> Any:
    """Return what a word means; `kind` is a key of `words.yaml`."""
    words = WORDS[kind]
    if str(value).lower() not in words:
        raise InputError(f"{name} is {value!r}, which is not read", f"known are {', '.join(words)}")
    return words[str(value).lower()]
