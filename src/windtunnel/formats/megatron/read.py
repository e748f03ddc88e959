"""Read Megatron-LM arguments as a training job. Variables and arrays that a script assigns are filled in."""

import ast
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.files import parse_whole
from windtunnel.formats.launch.containers import Command, commands_in_script
from windtunnel.formats.launch.shell import is_unset
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.attention.latent import LatentAttention
from windtunnel.model.attention.mamba2 import Mamba2
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.shape import Attention, FeedForward, LayerGroup, ModelSpec
from windtunnel.schema import decode, encode, read_yaml
from windtunnel.training.job import TrainingJob
from windtunnel.training.setup import has_whole_layers

WORDS: Mapping[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("words.yaml"))
"""Words of Megatron's arguments -> ours, by subject."""
RECOMPUTED, _LAUNCHERS = WORDS["recomputed"], WORDS["launchers"]
_STARTS = {"srun", "mpirun", "mpiexec"}
_UNSET = "$"  # key of what should have been options, and is not known
_LOG_LINE = re.compile(r"(\w+) \.{2,} (.*?)\s*$")


class MegatronJob(NamedTuple):
    """A job, and the arguments that it does not hold."""

    job: TrainingJob
    unread: tuple[str, ...]
    """Of no effect on a prediction."""
    not_modelled: tuple[str, ...]
    unknown: tuple[str, ...]
    """No arguments of Megatron-LM, as far as we know."""


def read_megatron_arguments(text: str, device: str, num_devices: int | None = None, model: Any = None) -> MegatronJob:
    """Read the job that a command line, script or log of Megatron-LM describes. InputError where an argument is
    missing, has a wrong value or a variable that is not assigned.

    Args:
        text: a shell script or command with Megatron's arguments, or lines `name ...... value` of its log.
        device: device of the job; Megatron does not say.
        num_devices: number of devices in place of the launcher's nnodes x nproc_per_node.
        model: a model of the catalog in place of the one that the arguments describe.
    """
    of_log = _from_log(text)
    arguments = _Arguments(of_log or _from_shell(text), bool(of_log), model)
    return MegatronJob(arguments.job(device, num_devices), *arguments.unread())


def _from_log(text: str) -> dict[str, list[str]]:
    """Return arguments as Megatron prints them; a flag is True or False there."""
    options: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = _LOG_LINE.search(line)
        if not match:
            continue
        name, value = match[1].replace("_", "-"), match[2]
        if value not in ("None", "False", "[]"):
            options[name] = [] if value == "True" else value.strip("[]").replace(",", " ").split()
    if "num-layers" not in options:
        return {}
    # The log names the value where the command names its opposite.
    if "add-bias-linear" not in options:
        options["disable-bias-linear"] = []
    return options


def _from_shell(text: str) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for command in commands_in_script(text):
        if any(word.startswith(("--num-layers", "--hybrid-layer-pattern")) for word in command.words):
            options = _of_command(command)
    if not options:
        raise InputError(
            "there is no Megatron command here: nothing has --num-layers",
            "give the script or command that starts pretrain_gpt.py, or the arguments that its log prints",
        )
    return options


def _of_command(command: Command) -> dict[str, list[str]]:
    """Return the options of a program, with those of its launcher that say how many devices there are."""
    words = _split(command.words)
    start = next((index for index, word in enumerate(words) if word.endswith(".py")), 0)
    launched = {name: values for name, values in _options(words[:start]).items() if name in _LAUNCHERS}
    options = launched | _options(words[start:])
    if options.keys().isdisjoint(_LAUNCHERS) and (num_tasks := _num_tasks(words[:start], command.environment)):
        options["world-size"] = [str(num_tasks)]
    program = Path(words[start]).name
    if program in WORDS["hybrid_programs"]:
        options["is-hybrid-model"] = []
    if program in WORDS["other_programs"]:
        options["model-of"] = [program]
    return options


def _split(words: list[str]) -> list[str]:
    """Return the words of options that stand in an array with their value, `"--fp8-format hybrid"`, one by one."""
    return [part for word in words for part in (word.split() if word.startswith("--") else [word])]


def _num_tasks(launcher: list[str], environment: Mapping[str, str]) -> int:
    """Return the tasks, each with a device, that srun or mpirun, or else Slurm's variables say; 0 where none does."""
    words = " ".join(launcher) if _STARTS.intersection(launcher) else ""
    said = dict(re.findall(r"(?<!\S)--?([\w-]+)[= ]\s*(\d+)(?!\S)", words))
    if total := next((said[name] for name in ("np", "n", "ntasks") if name in said), environment.get("SLURM_NTASKS")):
        return int(total)
    each = said.get("ntasks-per-node") or said.get("gpus-per-node") or environment.get("SLURM_GPUS_PER_NODE") or "0"
    return int(said.get("nodes") or said.get("N") or environment.get("SLURM_NNODES") or 1) * int(each)


def _options(words: list[str]) -> dict[str, list[str]]:
    """Return option -> its values; `--name=value` and underscores are understood. Arrays and further variables that the
    text does not set are apart; files of data may be any number of variables."""
    options: dict[str, list[str]] = {}
    name, current = "", list[str]()
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            current = options[name if name in _LAUNCHERS else name.replace("_", "-")] = [value] if has_value else []
        elif is_unset(word) and (word.endswith("]}") or (current and "path" not in name)):
            options.setdefault(_UNSET, []).append(word)
        else:
            current.append(word)
    return options


class _Arguments:
    """Megatron's arguments with its defaults; remembers which of them were read."""

    def __init__(self, options: dict[str, list[str]], is_log: bool, named: Any) -> None:
        self.options, self.is_log, self.named = options, is_log, named
        self.read: set[str] = set()
        self.notes = [f"{word} (the text does not set it)" for word in options.pop(_UNSET, [])]

    def unread(self) -> tuple[tuple[str, ...], ...]:
        """Return the arguments without effect, those that are not modelled, and those that are not known.

        A log prints every argument with its default, which says nothing of the run.
        """
        found: dict[str, list[str]] = {"without_effect": [], "not_modelled": [*{*self.notes}], "unknown": []}
        for name in self.options.keys() - self.read:
            kinds = (kind for kind in found if any(fnmatchcase(name, each) for each in WORDS.get(kind, ())))
            found["without_effect" if self.is_log else next(kinds, "unknown")].append(f"--{name}")
        return tuple(tuple(sorted(names)) for names in found.values())

    def values(self, name: str) -> list[str] | None:
        self.read.add(name)
        return self.options.get(name)

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number; without a default the option must be given."""
        text = self.text(name)
        if text is None:
            if default is None:
                raise InputError(f"--{name} is missing", "Megatron needs it too")
            return default
        try:
            return parse_whole(text, f"--{name}", least=1)
        except InputError as error:
            raise error.or_hint("the variable is not assigned here") if "$" in text else error from None

    def optional(self, name: str) -> int | None:
        return None if self.values(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        return self.values(name) is not None

    def text(self, name: str) -> str | None:
        values = self.values(name)
        if values is None:
            return None
        if not values:
            raise InputError(f"a value is missing after --{name}")
        return values[0]

    def decimal(self, name: str, default: str) -> float:
        text = self.text(name) or default
        try:
            return float(text)
        except ValueError:
            raise InputError(f"--{name} is {text!r}; a number is needed") from None

    def choice(self, name: str, choices: Mapping[str, str], default: str) -> str:
        text = self.text(name) or default
        if text not in choices:
            raise InputError(f"--{name} is {text!r}, which is not read", f"known are {', '.join(choices)}")
        return choices[text]

    def model(self) -> ModelSpec:
        """Return the model that Megatron builds, its vocabulary padded, or the one that is given in its place."""
        refused = [name for name in WORDS["refused"] if self.flag(name)]
        if self.named is None and refused:
            said = " ".join([f"--{refused[0]}".removeprefix("--model-of"), *self.options[refused[0]]]).strip()
            raise InputError(f"layers of {said} are not read", "give --model to take one of the catalog")
        if self.named is None:
            return self.described_model()
        with suppress(InputError):
            self.described_model()  # what it reads is not announced
        return catalog.model(self.named)

    def described_model(self) -> ModelSpec:
        multiple = self.number("make-vocab-size-divisible-by", 128) * self.number("tensor-model-parallel-size", 1)
        return ModelSpec(
            name="megatron",
            hidden_size=self.number("hidden-size"),
            vocab_size=-(-self.vocabulary() // multiple) * multiple,
            max_context_tokens=max(self.number("max-position-embeddings", 1), self.number("seq-length")),
            layers=self.layers(),
            tie_word_embeddings=not self.flag("untie-embeddings-and-output-weights"),
            norm_bias=(self.text("normalization") or "LayerNorm") == "LayerNorm",
        )

    def vocabulary(self) -> int:
        """Return the size of the vocabulary: as given, or that of a tokenizer whose name says it."""
        tokenizer, of_model = self.text("tokenizer-type"), self.text("tokenizer-model")
        if tokenizer is None and self.flag("merge-file"):  # which GPT2BPETokenizer alone reads
            tokenizer = "GPT2BPETokenizer"
            self.notes.append("--vocab-file (taken as GPT-2's, of 50,257 tokens)")
        size = self.optional("vocab-size") or WORDS["vocabularies"].get(tokenizer or "")
        if size is None and of_model is not None:
            for name in (of_model, of_model.rstrip("/").rpartition("/")[2]):
                with suppress(InputError):
                    return catalog.model(catalog.known_name("models", name)).vocab_size
        if size is None:
            hint = f"the tokenizer {tokenizer} alone does not tell it: " if tokenizer else ""
            raise InputError("--vocab-size is missing", f"{hint}add it, or give --model to take a model of the catalog")
        return int(size)

    def layers(self) -> tuple[LayerGroup, ...]:
        if any([self.flag("is-hybrid-model"), self.flag("hybrid-layer-pattern"), self.flag("hybrid-override-pattern")]):
            return self.hybrid_layers()
        num_layers, attention = self.number("num-layers"), self.attention()
        attentions, is_windowed = [attention], [0] * num_layers
        parts, has_experts = list[FeedForward]([self.dense()]), is_windowed
        if self.flag("num-experts"):
            parts.append(self.experts())
            has_experts = self.pattern("moe-layer-freq", num_layers, lambda layer, every: layer % every == 0)
        if self.flag("window-size") and isinstance(attention, GroupedQueryAttention):  # 128,0: before, after
            window = parse_whole(
                re.sub(r"[^\d-]*(-?\d+).*", r"\1", self.text("window-size") or ""), "--window-size", least=1
            )
            attentions.append(msgspec.structs.replace(attention, window_tokens=window))
            is_windowed = [1] * num_layers
            if self.flag("window-attn-skip-freq"):
                is_windowed = self.pattern("window-attn-skip-freq", num_layers, lambda layer, n: (layer + 1) % n > 0)
        return tuple(
            LayerGroup(num_layers=count, attention=attentions[window], feed_forward=parts[part])
            for (window, part), count in sorted(Counter(zip(is_windowed, has_experts, strict=True)).items())
        )

    def hybrid_layers(self) -> tuple[LayerGroup, ...]:
        """Return layers of one part each, by a pattern of letters or by shares of attention and feed-forward
        (core/ssm/mamba_hybrid_layer_allocation.py).
        """
        pattern = self.text("hybrid-layer-pattern") or self.text("hybrid-override-pattern")
        letters, predicts, _ = (pattern or "").replace("|", "").partition("/")
        self.notes += ["--hybrid-layer-pattern after / (multi-token prediction)"] if predicts else []
        num_layers = self.number("num-layers", len(letters) or None)
        if pattern is None:
            shares = [("*", "hybrid-attention-ratio"), ("-", "hybrid-mlp-ratio")]
            letters = "".join(each * round(num_layers * self.decimal(name, "0")) for each, name in shares)
            letters = letters.ljust(num_layers, "M")
        readers = {"M": self.mamba, "*": self.attention, "-": self.dense, "E": self.experts}
        parts: dict[str, Any] = {letter: read() for letter, read in readers.items() if letter in letters}
        if len(letters) != num_layers or not set(letters) <= parts.keys():
            raise InputError(
                f"the layers {pattern or letters!r} are not {num_layers} letters of {', '.join(readers)}",
                "a letter is a layer: Mamba-2, attention, feed-forward or experts",
            )
        kinds = {letter: "attention" if letter in "M*" else "feed_forward" for letter in parts}
        counts = Counter(letters).items()
        return tuple(LayerGroup(num_layers=n, num_norms=1, **{kinds[each]: parts[each]}) for each, n in counts)

    def mamba(self) -> Mamba2:
        width = self.number("mamba-head-dim", 64)
        return Mamba2(
            num_heads=self.number("mamba-num-heads", max(2 * self.number("hidden-size") // width, 1)),
            head_dim=width,
            num_groups=self.number("mamba-num-groups", 8),
            state_size=self.number("mamba-state-dim", 128),
            conv_kernel_size=4,
            chunk_size=128,
        )

    def attention(self) -> Attention:
        hidden, heads = self.number("hidden-size"), self.number("num-attention-heads")
        if self.flag("multi-latent-attention"):
            sizes: dict[str, Any] = {
                field: self.number(name, default) for field, (name, default) in WORDS["latent_sizes"].items()
            }
            return LatentAttention(num_heads=heads, q_lora_rank=self.optional("q-lora-rank"), **sizes)
        if not self.flag("kv-channels") and hidden % heads:
            raise InputError(f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}")
        has_bias = not self.flag("disable-bias-linear")
        return GroupedQueryAttention(
            num_heads=heads,
            num_kv_heads=self.number("num-query-groups", 1) if self.flag("group-query-attention") else heads,
            head_dim=self.number("kv-channels", hidden // heads),
            qkv_bias=has_bias or self.flag("add-qkv-bias"),
            output_bias=has_bias,
            qk_norm=self.flag("qk-layernorm"),
        )

    def dense(self) -> DenseFeedForward:
        hidden, gated = self.number("hidden-size"), self.flag("swiglu")
        default = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
        width = self.number("ffn-hidden-size", default)
        return DenseFeedForward(intermediate_size=width, gated=gated, bias=not self.flag("disable-bias-linear"))

    def experts(self) -> ExpertsFeedForward:
        return ExpertsFeedForward(
            num_experts=self.number("num-experts"),
            experts_per_token=self.number("moe-router-topk", 2),
            intermediate_size=self.number("moe-ffn-hidden-size", self.dense().intermediate_size),
            shared_intermediate_size=self.optional("moe-shared-expert-intermediate-size") or 0,
            gated=self.flag("swiglu"),
            bias=not self.flag("disable-bias-linear"),
            latent_size=self.optional("moe-latent-size"),
        )

    def pattern(self, name: str, num_layers: int, holds: Callable[[int, int], bool]) -> list[int]:
        """Return 1 for each layer, counted from 0, that a number chooses by `holds`, or a list as `([0]*3+[1]*58)`."""
        text = "".join(self.values(name) or ["1"])
        pattern = _evaluated(text)
        if isinstance(pattern, int) and pattern > 0:
            return [int(holds(layer, pattern)) for layer in range(num_layers)]
        if not isinstance(pattern, list) or len(pattern) != num_layers or not set(pattern) <= {0, 1}:
            raise InputError(
                f"--{name} is {text!r}; it is a number, or a list of {num_layers} zeros and ones such as "
                f"([0]*3+[1]*{num_layers - 3})"
            )
        return pattern

    def job(self, device: str, num_devices: int | None) -> TrainingJob:
        model = self.model()
        devices, micro_batch = num_devices or self.devices(), self.number("micro-batch-size")
        data_parallel = max(devices // self.model_ranks(), 1)
        global_batch = self.number("global-batch-size", micro_batch * data_parallel)
        sequences = self.optional("train-samples")
        if sequences is None and self.flag("train-iters"):
            sequences = self.number("train-iters") * global_batch
        fields: dict[str, Any] = {
            "model": encode(model),
            "device": device,
            "sequence_tokens": self.number("seq-length"),
            "micro_batch": micro_batch,
            "global_batch": global_batch,
            "num_devices": devices,
            "parallelism": (parallelism := self.parallelism(model)),
            "sharding": self.sharding(),
            "precision": self.precision(),
            "recompute": self.recompute(),
            "optimizer": self.choice("optimizer", WORDS["optimizers"], "adam"),
            "overlap": self.overlap(parallelism),
            "kernels": {"attention": self.attention_kernel(), "cuda_graphs": self.graphs()},
            "dropout": any(self.decimal(f"{kind}-dropout", "0.1") > 0 for kind in ("hidden", "attention")),
            "learned_positions": self.has_learned_positions(),
            "framework": next((name for flag, name in WORDS["frameworks"].items() if self.flag(flag)), "megatron"),
        }
        if has_whole_layers(model):
            fields["mtp_layers"] = self.optional("mtp-num-layers") or 0
        if sequences is not None:
            fields["total_tokens"] = float(sequences * self.number("seq-length"))
        return decode(fields, TrainingJob, "Megatron's arguments")

    def devices(self) -> int:
        """Return the number of devices of the launcher, or of the log."""
        if self.flag("world-size"):
            return self.number("world-size")
        try:
            counts = {role: self.number(name) for name, role in _LAUNCHERS.items() if self.flag(name)}
        except InputError as error:
            raise InputError(error.message, "give --num-devices") from None
        if "nproc" not in counts:
            what = "the number of devices is not in the command: torchrun's --nproc_per_node is missing"
            raise InputError(what, "give --num-devices")
        return counts["nproc"] * counts.get("nnodes", 1)

    def model_ranks(self) -> int:
        kinds = ("tensor-model", "pipeline-model", "context")
        return math.prod(self.number(f"{kind}-parallel-size", 1) for kind in kinds)

    def parallelism(self, model: ModelSpec) -> dict[str, Any]:
        pp, layout = self.number("pipeline-model-parallel-size", 1), self.text("pipeline-model-parallel-layout")
        per_stage = self.optional("num-layers-per-virtual-pipeline-stage")
        virtual_stages = self.number("num-virtual-stages-per-pipeline-rank", 1)
        if per_stage is not None:
            virtual_stages, rest = divmod(model.num_layers, pp * per_stage)
            if rest:
                raise InputError(
                    f"--num-layers {model.num_layers} is not a multiple of --pipeline-model-parallel-size {pp} x "
                    f"--num-layers-per-virtual-pipeline-stage {per_stage}"
                )
        fields: dict[str, Any] = {
            "tp": self.number("tensor-model-parallel-size", 1),
            "pp": pp,
            "cp": self.number("context-parallel-size", 1),
            "cp_method": self.choice("cp-comm-type", WORDS["context_methods"], "p2p"),
            "ep": self.number("expert-model-parallel-size", 1),
            "virtual_stages": virtual_stages,
            "sequence_parallel": self.flag("sequence-parallel"),
        }
        if self.flag("num-experts"):
            fields["experts_tp"] = self.number("expert-tensor-parallel-size", fields["tp"])
            fields["experts_exchange"] = self.exchange()
            if self.flag("moe-pad-expert-input-to-capacity"):  # which needs a factor
                fields["experts_capacity"] = self.decimal("moe-expert-capacity-factor", "1")
        first, last = (self.optional(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
        counted = [self.flag(f"account-for-{end}-in-pipeline-split") for end in ("embedding", "loss")]
        if any(counted):
            fields["layers_per_stage"] = _with_ends(model.num_layers, pp * virtual_stages, *counted)
        if first is not None or last is not None:
            fields["layers_per_stage"] = _uneven(model.num_layers, pp, first, last)
        if layout is not None:
            layers = _layers_in(layout)
            fields |= {"layers_per_stage": layers, "virtual_stages": max(len(layers) // pp, 1)}
        return fields

    def exchange(self) -> str:
        """Return how tokens reach experts. DeepEP is what the flex dispatcher took before it had a choice."""
        kind = self.choice("moe-token-dispatcher-type", WORDS["dispatchers"], "allgather")
        backend = self.choice("moe-flex-dispatcher-backend", WORDS["flex_dispatchers"], "deepep")
        self.flag("moe-enable-deepep")
        return backend if kind == "flex" else kind

    def sharding(self) -> dict[str, Any]:
        if self.flag("use-torch-fsdp2"):
            return {"zero": 3}
        if self.flag("deepspeed"):  # Megatron-DeepSpeed's
            missing = "--deepspeed-config (its ZeRO stage is taken as 1; --zero gives another)"
            self.notes += [] if self.flag("zero-stage") else [missing]
            return {"zero": int(self.choice("zero-stage", WORDS["zero_stages"], "1"))}
        strategy = self.choice("data-parallel-sharding-strategy", WORDS["sharding_strategies"], "no_shard")
        if any([self.flag("use-megatron-fsdp"), self.flag("use-custom-fsdp")]):
            self.flag("use-distributed-optimizer")
            return {"zero": int(strategy)}
        fraction, is_offloaded = self.text("optimizer-offload-fraction"), self.flag("optimizer-cpu-offload")
        if is_offloaded and fraction not in (None, "1", "1.0"):
            raise InputError(
                f"--optimizer-offload-fraction {fraction} is not modelled", "state is offloaded whole: leave it out"
            )
        offload = {"offload": "optimizer"} if is_offloaded else {}
        return {"zero": int(self.flag("use-distributed-optimizer")), **offload}

    def precision(self) -> dict[str, Any]:
        compute = "bf16" if self.flag("bf16") else "fp16" if self.flag("fp16") else "fp32"
        if self.flag("fp4-format"):
            compute = "nvfp4"
        elif self.flag("fp8-format"):
            compute = self.choice("fp8-recipe", WORDS["fp8_recipes"], "delayed")
        gathered = "fp32" if compute == "fp32" else "fp8" if self.flag("fp8-param-gather") else None
        gather = {"parameter_gather": gathered} if self.sharding()["zero"] or gathered == "fp8" else {}
        if compute == "fp32":
            return {"compute": "fp32", "gradients": "fp32", "gradient_reduce": "fp32", **gather}
        sums = self.flag("accumulate-allreduce-grads-in-fp32") or not self.flag("fp16")
        state = self.state_formats(gathered == "fp8") if self.flag("use-precision-aware-optimizer") else {}
        narrow = self.flag("grad-reduce-in-bf16") or state.pop("main_grads", "fp32") == "bf16"
        gradients = "fp32" if sums and not narrow else "bf16"
        return {"compute": compute, "gradients": gradients, "gradient_reduce": gradients, **gather, **state}

    def state_formats(self, has_fp8_parameters: bool) -> dict[str, Any]:
        """Return the formats that the precision-aware optimizer keeps; a job has one for both moments, the wider.

        Of the fp32 copy of a bf16 parameter it keeps the 16 bits that this lacks (`store_param_remainders`).
        """
        kinds = {kind: f"{kind.replace('_', '-')}-dtype" for kind in ("exp_avg", "exp_avg_sq", "main_grads")}
        state = {kind: self.choice(name, WORDS["state_formats"], "fp32") for kind, name in kinds.items()}
        moments = sorted({state.pop("exp_avg"), state.pop("exp_avg_sq")}, key=["fp32", "bf16", "fp8"].index)
        if len(moments) > 1:
            self.notes.append(f"--exp-avg-dtype unlike --exp-avg-sq-dtype (both are taken as {moments[0]})")
        kept = self.choice("main-params-dtype", WORDS["state_formats"], "fp32")
        is_split = self.flag("bf16") and not has_fp8_parameters
        return {**state, "moments": moments[0], "master_weights": "remainder" if is_split or kept == "bf16" else "fp32"}

    def recompute(self) -> dict[str, Any]:
        # What releases before 2022 and Megatron-DeepSpeed call it.
        is_full = any([self.flag("checkpoint-activations"), self.flag("activations-checkpoint-method")])
        usual = "selective" if self.flag("recompute-activations") else "full" if is_full else "none"
        granularity = self.text("recompute-granularity") or usual
        if granularity not in ("none", "selective", "full"):
            raise InputError(f"--recompute-granularity is {granularity!r}", "it is selective or full")
        fields: dict[str, Any] = {"granularity": granularity}
        if granularity == "full":
            fields["distribute"] = self.flag("distribute-saved-activations")
        # Megatron-Core reads modules where recomputation is selective (transformer_config.py).
        modules = self.values("recompute-modules") if granularity == "selective" else ()
        if modules:
            unknown = next((name for name in modules if name not in RECOMPUTED), None)
            if unknown:
                raise InputError(f"--recompute-modules has {unknown!r}", f"known are {', '.join(WORDS['recomputed'])}")
            fields["modules"] = [RECOMPUTED[name] for name in modules]
        # Megatron's `block` recomputes this many layers of a chunk; `uniform` all layers, in groups of this many.
        if granularity == "full" and self.text("recompute-method") == "block":
            fields["num_layers"] = self.number("recompute-num-layers", 1)
        elif granularity == "full" and self.number("recompute-num-layers", 1) > 1:
            self.notes.append("--recompute-num-layers (every layer's input is taken to be kept)")
        return fields

    def overlap(self, fields: dict[str, Any]) -> dict[str, bool | None]:
        interleaves = fields["virtual_stages"] > 1
        flags: dict[str, bool | None] = {field: self.flag(name) for field, name in WORDS["overlaps"].items()}
        # What Megatron does where it gathers parameters is the framework's default.
        flags["parameter_gather"] = None if flags["parameter_gather"] else False
        return {**flags, "pipeline": interleaves and not self.flag("no-overlap-p2p-communication")}

    def attention_kernel(self) -> str:
        if self.text("attention-backend") in ("unfused", "local"):
            return "unfused"
        is_local = self.text("transformer-impl") == "local"
        return "unfused" if is_local and not self.flag("use-flash-attn") else "flash"

    def graphs(self) -> str | None:
        """Return what is launched as CUDA graphs; layers with dropless experts cannot be as a whole."""
        is_on = any([self.flag("enable-cuda-graph"), self.flag("external-cuda-graph")])
        scope = set(",".join(self.values("cuda-graph-scope") or ["full"]).split(","))
        if (self.text("cuda-graph-impl") or ("local" if is_on else "none")) == "none":
            return None
        if scope & {"full", "full_iteration", "moe"}:
            return "full"
        if "moe_router" not in scope:
            self.notes.append(f"--cuda-graph-scope {' '.join(sorted(scope))} (experts' launches are taken to wait)")
            return None
        return "partial" if "attn" in scope else "routing"

    def has_learned_positions(self) -> bool:
        default = "rope" if self.flag("use-rotary-position-embeddings") else "learned_absolute"
        return (self.text("position-embedding-type") or default) == "learned_absolute"


def _uneven(num_layers: int, pp: int, first: int | None, last: int | None) -> list[int]:
    """Return the layers of each stage where the first or last has another number than the others."""
    inner = pp - (first is not None) - (last is not None)
    left = num_layers - (first or 0) - (last or 0)
    if left < 0 or (inner == 0 and left) or (inner and left % inner):
        raise InputError(f"{left} layers of the other stages do not split evenly over {inner} stages")
    share = left // inner if inner else 0
    return [*([first] if first is not None else []), *[share] * inner, *([last] if last is not None else [])]


def _with_ends(num_layers: int, num_chunks: int, has_embedding: bool, has_loss: bool) -> list[int]:
    """Return the layers of each chunk where the embedding, the loss or both count as a layer."""
    share, rest = divmod(num_layers + has_embedding + has_loss, num_chunks)
    if rest:
        raise InputError(
            f"{num_layers} layers with the ends that are counted as one do not split evenly over {num_chunks} chunks"
        )
    layers = [share] * num_chunks
    layers[0] -= has_embedding
    layers[-1] -= has_loss
    return layers


def _layers_in(layout: str) -> list[int]:
    """Return the layers of each chunk of a layout such as `Et*3|(tt|)*29m|L`: `t` is a layer, `E`, `m` and `L` the
    embedding, a layer of multi-token prediction and the loss, `x*n` or `(x)*n` n of x (Megatron-Core
    transformer/pipeline_parallel_layer_layout.py, `parse_str_to_list`).
    """
    text = layout.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^()]+)\)\*(\d{1,3})(?!\d)", r"(\w)\*(\d{1,3})(?!\d)"):
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    if not re.fullmatch(r"[EtmL|]+", text):
        raise InputError(
            f"--pipeline-model-parallel-layout is {layout!r}, which is not read", "it is like 'Et*3|(tt|)*29m|L'"
        )
    return [chunk.count("t") for chunk in text.split("|")]


def _evaluated(text: str) -> Any:
    """Evaluate a Python expression of numbers, lists, + and *; None for anything else."""

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.List):
            return [value(element) for element in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            left, right = value(node.left), value(node.right)
            return left + right if isinstance(node.op, ast.Add) else left * right
        raise ValueError

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        return None
