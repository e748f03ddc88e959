"""Command line of an engine's server: its options as data, and what several of them decide together.

Sources, beside those in each `command_line.yaml`: for drafts, docs.vllm.ai (features, 0.26), docs.sglang.io (advanced
features) and nvidia.github.io/TensorRT-LLM (features, 1.4).
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.exchange import MEGA_MOE
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.shape import ModelSpec
from windtunnel.schema import Schema, set_path
from windtunnel.serving.deployment import Deployment, EngineSettings, Speculative
from windtunnel.units import whole
from windtunnel.workload.client_load import ClientLoad

Words = dict[str, str | bool | None]
"""Words that an option takes, and our name of each; None: as if the option were left out."""

DEPLOYMENT = "deployment."
ENGINE = f"{DEPLOYMENT}engine."
SPLIT = f"{DEPLOYMENT}parallelism."

ALL_RANKS = "all"
"""Degree of expert parallelism, in a space: experts are spread over all ranks of a point."""

SERVER = "server"
"""Name of what serves where there are no pools."""

DRAFTS = "--speculative"
"""How the options of speculative decoding begin."""


def sizes(text: str) -> list[int]:
    """Read `1 2 4`, `1,2,4` or `[1, 2, 4]`."""
    return [whole(part) for part in re.split(r"[\s,]+", text.strip("[] ")) if part]


def table(text: str) -> dict[str, Any]:
    """Read a JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("a JSON object is needed")
    return value


def shares(value: Any) -> float | tuple[float, ...]:
    """Read `0.7` or `70%`, or one share for each position, `0.8,0.6,0.4`; of JSON, a number or a list of them.
    ValueError where it is none of these, or a share is not from 0 to 1."""
    parts = re.split(r"\s*,\s*|\s+", str(value).strip("[] "))
    with suppress(ValueError):
        found = tuple(float(part.rstrip("%")) / (100 if part.endswith("%") else 1) for part in parts)
        if all(0 <= share <= 1 for share in found):
            return found if len(found) > 1 else found[0]
    raise ValueError("shares from 0 to 1 are needed: 0.7, 70%, or one for each position: 0.8,0.6,0.4")


READERS: Mapping[str, Callable[[str], Any]] = {
    "whole": whole,
    "signed": int,
    "number": float,
    "text": str,
    "sizes": sizes,
    "json": table,
    "shares": shares,
}


class Flag(Schema):
    """The setting that one option decides."""

    sets: str
    """Path in a scenario below `deployment`, or `model`, or `precision.FORMAT`; or a word in brackets that is resolved
    once all options are known."""
    type: Literal["whole", "signed", "number", "text", "sizes", "json", "shares"] = "whole"
    words: dict[str, str | bool | None] | str | None = None
    """Words that it takes, or the name of a list in `words.yaml`; None: any text of the type."""
    value: bool | int | str | None = None
    """Value of an option without an argument; None: it has one."""
    left_out: tuple[str, ...] = ()
    """Words that leave the choice to the server, as if the option were left out."""
    is_lenient: bool = False
    """Whether an unknown value is reported as not modelled instead of refused."""

    @property
    def word(self) -> str:
        """The word in brackets; empty for a path."""
        return self.sets.strip("[]") if self.sets.startswith("[") else ""

    @property
    def path(self) -> str:
        """Path of the setting in a scenario; empty for a word in brackets."""
        if self.word:
            return ""
        return self.sets if self.sets == "model" or self.sets.startswith("precision.") else DEPLOYMENT + self.sets

    @property
    def known_words(self) -> Words | None:
        if not isinstance(self.words, str):
            return self.words
        return catalog.entry(Path(__file__).with_name("words.yaml"), dict[str, dict[str, str | bool | None]])[
            self.words
        ]

    def read(self, text: str) -> Any:
        """Return the value that the option's argument means; ValueError where it means none."""
        if text in self.left_out:
            return None
        if self.known_words is None:
            return READERS[self.type](text)
        if text not in self.known_words:
            raise ValueError(f"known: {', '.join(self.known_words)}")
        return self.known_words[text]

    def word_for(self, value: Any) -> Any:
        """Return the first word that means `value`, None where there is none; without a list of words, the value."""
        if self.known_words is None:
            return " ".join(map(str, value)) if isinstance(value, tuple) else value
        return next((word for word, meaning in self.known_words.items() if meaning == value), None)


class Options(Schema):
    """An engine's `command_line.yaml`."""

    command: tuple[str, ...]
    """Words that start a server, the model's name behind them."""
    starts: tuple[str, ...]
    """Programs, modules or images that start one, as patterns, with the subcommand behind some."""
    image: str
    """Container image, with `{version}`."""
    port: int
    flags: dict[str, Flag | str]
    """Option -> the setting that it decides; a text alone is `sets` of a whole number."""
    other_names: dict[str, str] = {}
    """Other name of an option, or its path in the engine's YAML file -> its name in `flags`."""
    environment: dict[str, str] = {}
    """Variable of the environment -> the option that it stands for, or its own name in `flags`."""
    model_option: str = "model"
    config_options: tuple[str, ...] = ("config",)
    """Options that name a YAML file of further options."""
    waiting_metric: str = ""
    """Number of waiting requests, as an adapter of Prometheus names it; empty where the server reports none."""
    in_file_only: frozenset[str] = frozenset()
    """Options that the server takes from its YAML file or environment and not from its command line."""
    listening: tuple[str, ...] = ()
    """Options without which the server answers its own machine only."""
    spelt_with_underscores: bool = False
    decides: dict[str, str] = {}
    """Setting, as in `Flag.sets`, that an option decides beside others -> that option."""
    roles: dict[str, tuple[str, ...]] = {}
    """Role of a pool -> words that give a server that role; empty where other programs give it."""

    def flag(self, name: str) -> Flag | None:
        flag = self.flags.get(name)
        return Flag(sets=flag) if isinstance(flag, str) else flag

    def option(self, sets: str) -> str:
        """Return the first option that decides a setting, by `Flag.sets`; InputError where none does."""
        known = (name for name in self.flags if (flag := self.flag(name)) is not None and flag.sets == sets)
        if name := self.decides.get(sets) or next(known, None):
            return name
        raise InputError(f"no option of `{' '.join(self.command)}` that decides {sets.strip('[]')} is known")


@dataclass(frozen=True)
class Unmodelled:
    """What starts a server and decides no setting, for the files that start a changed one."""

    words: tuple[str, ...] = ()
    """Options of the command line, and their values."""
    file: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the server's YAML file, for an engine that reads some from its file only."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of the environment."""
    image: str = ""
    """The container's image; empty where none is said."""
    left_out: tuple[str, ...] = ()
    """Sentences on what the files of a changed server do not have."""


@dataclass(eq=False)
class Reading:
    """A server's command line as a deployment, option by option."""

    raw: dict[str, Any] = field(default_factory=dict)
    """Model, precision and deployment of a scenario, as builtins; without a device."""
    later: dict[str, Any] = field(default_factory=dict)
    """Values of options that are resolved once all are known, by their words in brackets."""
    taken: dict[str, str] = field(default_factory=dict)
    """Option -> its value."""
    without_effect: list[str] = field(default_factory=list)
    """Options that do not change any time."""
    not_modelled: list[str] = field(default_factory=list)
    """Options that change times in a way that is not modelled."""
    unknown: list[str] = field(default_factory=list)
    container: list[str] = field(default_factory=list)
    """Sentences on the server's container: an image without a version, GPUs that its command does not take."""
    not_starting: list[str] = field(default_factory=list)
    """Sentences on why the server would not start as the command has it, once its scenario is known."""
    others: dict[str, Unmodelled] = field(default_factory=dict)
    """Name of a pool, `SERVER` without pools -> what its server has that decides no setting."""

    load: ClientLoad | None = None
    """Load of the benchmark client beside the server."""
    load_taken: list[str] = field(default_factory=list)
    """Sentences on what of that load is taken."""

    @property
    def remarks(self) -> list[str]:
        """Sentences on the load that is taken, and those that name the options which are not in the prediction."""
        reasons = {
            "unknown, ignored": self.unknown,
            "not modelled": self.not_modelled,
            "without effect on time": self.without_effect,
        }
        lists = [f"{reason}: {', '.join(names)}" for reason, names in reasons.items() if names]
        return [*self.load_taken, *lists, *self.container]

    @property
    def document(self) -> dict[str, Any]:
        """The same, option by option; without a command line only why the scenario's server would not start."""
        lists = ("unknown", "not_modelled", "without_effect", "container")
        further = {"load": self.load_taken, "would_not_start": self.not_starting}
        known = {name: getattr(self, name) for name in lists} | {name: each for name, each in further.items() if each}
        if not self.taken:
            return {"would_not_start": self.not_starting} if self.not_starting else {}
        return {"from_command": known}

    def has_any(self, options: Iterable[str]) -> bool:
        """Whether the server has one of some options, or of variables (`NAME=1`), that decide no setting."""
        said = [*(word for each in self.others.values() for word in (*each.words, *each.variables))]
        return any(word.startswith(option.removesuffix("=1")) for word in said for option in options)

    @cached_property
    def model(self) -> ModelSpec:
        return catalog.model(str(self.raw["model"]))

    @property
    def has_experts(self) -> bool:
        return self.model.has_experts

    @property
    def spreads_experts(self) -> bool:
        """Whether an option spreads the experts over all ranks, however many there are."""
        return bool(self.later.get("expert_parallel")) and self.has_experts

    def for_any_split(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the scenario `raw` of this server for a space: experts are spread over the ranks that a point has."""
        if self.spreads_experts:
            set_path(raw, f"{SPLIT}ep", ALL_RANKS)
        return raw

    @property
    def engine(self) -> dict[str, Any]:
        """The engine's settings so far."""
        return dict(self.raw.get("deployment", {}).get("engine", {}))

    def set_engine(self, **settings: Any) -> None:
        """Set fields of the engine's settings."""
        for name, value in settings.items():
            set_path(self.raw, ENGINE + name, value)

    def split(self, tp: int, dp: int = 1, is_attention: bool = False) -> None:
        """Set tensor and data parallelism: ranks of one replica where `dp` `is_attention`'s, else copies of it."""
        set_path(self.raw, f"{SPLIT}tp", tp)
        if is_attention:
            set_path(self.raw, f"{SPLIT}attention_dp", dp)
        elif dp > 1:
            set_path(self.raw, "deployment.replicas", dp)
        if self.spreads_experts:
            set_path(self.raw, f"{SPLIT}ep", tp * (dp if is_attention else 1))

    def set_drafts(self, word: str, method: str | None, num_drafts: int | None, draft_model: str | None) -> None:
        """Set the speculative decoding that the server calls `word`; without method or number it is not modelled.

        How often drafts are right is no option of a server, so that it must be said.
        """
        acceptance = self.later.get("acceptance_fraction")
        if method is None or num_drafts is None or acceptance is None:
            options = dict.fromkeys(name.partition(".")[0] for name in self.taken if name.startswith(DRAFTS))
            self.taken = {name: value for name, value in self.taken.items() if not name.startswith(DRAFTS)}
            missing = "say how often drafts are right: --acceptance-fraction 0.7" if method and num_drafts else ""
            *others, last = options
            self.not_modelled += [*others, f"{last} ({missing or f'{word} is not modelled so'})"]
            return
        if isinstance(acceptance, tuple) and len(acceptance) != num_drafts:
            raise InputError(
                f"--acceptance-fraction has {len(acceptance)} shares, and the server drafts {num_drafts} tokens a step",
                f"give one share for all, or {num_drafts}",
            )
        drafts = {"method": method, "num_draft_tokens": num_drafts, "acceptance_fraction": acceptance}
        self.set_engine(speculative=drafts | ({"draft_model": draft_model} if method == "draft_model" else {}))

    def set_moe_backend(self) -> None:
        """Set the kernels of experts that an option named; those of Mega MoE exchange tokens too."""
        backend = self.later.get("moe_backend")
        if backend == MEGA_MOE:
            self.set_engine(all2all_backend=MEGA_MOE)
        elif backend is not None:
            self.set_engine(moe_backend=backend)


NO_COMMAND = Reading()
"""What is read where no command line is given."""


def read_copies(reading: Reading) -> None:
    """Take data parallelism as copies of the server."""
    reading.split(reading.later.get("tp", 1), reading.later.get("data_parallel", 1))


def plain_split(split: Parallelism) -> dict[str, Any]:
    """Return the parallelism of one server, by what its options set; degrees of 1 are left out."""
    degrees = {"parallelism.pp": split.pp, "parallelism.ep": split.ep}
    return {"[tp]": split.tp * split.attention_dp} | {name: degree for name, degree in degrees.items() if degree > 1}


@dataclass(frozen=True)
class CommandLine:
    """Functions of an engine's command line."""

    read: Callable[[Reading], None] = read_copies
    """Sets what several options decide together: how the replica is split, and the words in brackets.

    Raises InputError for options that do not go together.
    """
    write_split: Callable[[Parallelism], Mapping[str, Any]] = plain_split
    """`Flag.sets` -> value of the options of the parallelism, in order; True for a switch."""
    write_rest: Callable[[EngineSettings, str | None, str | None], Iterable[tuple[str, Any]]] = lambda *_: ()
    """(settings, format of the weights, format of the KV cache) -> options that several settings decide."""
    write_environment: Callable[[EngineSettings], dict[str, str]] = lambda _: {}
    """(settings) -> variables of the environment, for settings without an option."""
    write_file: Callable[[EngineSettings, Parallelism, str | None], dict[str, Any]] = lambda *_: {}
    """(settings, parallelism, format of the KV cache) -> content of the YAML file that the server needs beside it."""
    write_task: Callable[[str, bool], Iterable[tuple[str, Any]]] = lambda *_: ()
    """(the workload's task, whether the model is an encoder) -> options of a server of embeddings and scores."""
    writes_drafts: Callable[[Speculative], bool] = lambda _: False
    """Whether a command can say these drafts."""
    remaining_work: Callable[[Deployment], Iterable[str]] = lambda _: ()
    """Sentences on settings that the command cannot say."""


PLAIN = CommandLine()
"""A command whose every option decides one setting."""
