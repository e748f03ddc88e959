"""Search spaces of deployments or of training jobs: a scenario or a job, what varies in it, the limits and the budget.

docs/guides/search.md shows a file of each kind.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

import msgspec

from windtunnel import schema
from windtunnel.errors import InputError, check_known, did_you_mean
from windtunnel.metrics.limits import Slo, check_limited, limit_values, limits_from, limits_of
from windtunnel.model.shape import ModelSpec
from windtunnel.plugins import Registry
from windtunnel.search.confidence import MOST_SEEDS
from windtunnel.serving.engines.command_line import ALL_RANKS
from windtunnel.serving.scenario import Scenario, beside, keep_published_formats, scenario_from
from windtunnel.serving.shorthand import JOB_PATHS, PATHS
from windtunnel.training.job import BY_OPERATOR, CHUNKED_SCHEDULES, TrainingJob
from windtunnel.training.setup import framework_of, look_up
from windtunnel.units import format_count

STRATEGIES = Registry(
    "windtunnel.strategies", "windtunnel.search.strategies", "search strategy", "evaluate", "IS_EXHAUSTIVE"
)
DEFAULT_STRATEGY = "exhaustive"

_NAMES: Mapping[str, Any] = schema.read_yaml(Path(__file__).with_suffix(".yaml"))
SHORT_PATHS: Mapping[str, str] = PATHS | _NAMES["short_paths"]
"""Short name in `vary` -> path in a scenario."""

ONLY_OF_JOBS = {"sequence_tokens", "global_batch"}
"""Keys that every training job has and no scenario has."""
ONLY_OF_DEPLOYMENTS = ("workloads", "load", "finalists", "finalist_seeds")
"""Keys that a space of training jobs does not have: a step meets no requests and has no randomness."""
LAYOUTS, ALL = "layouts", "all"
"""`vary: {layouts: all}` means every way to spread a training job over its devices."""

CHANGE = "change"
"""Name in `vary` whose values are single changes to a deployment, and say so themselves."""
ENGINE_PREFIX = "deployment.engine."


class Budget(schema.Schema):
    """Limits on a deployment's resources; None: no limit."""

    devices: schema.AtLeastOne | None = None
    usd_per_hour: schema.Positive | None = None
    power_w: schema.Positive | None = None
    """Power with all devices busy."""


class Space(schema.Schema):
    """A search space: the points, the objective and the strategy."""

    scenario: dict[str, Any] = {}
    """Settings that all points share, as in a scenario file; in a space's file these keys stand beside the others."""
    job: dict[str, Any] = {}
    """For training jobs, in place of `scenario`: settings that all points share, as in a job file; in a space's file
    these keys too stand beside the others."""
    vary: dict[str, list[Any] | dict[str, dict[str, Any]]] = {}
    """Path in the scenario, or short name -> its values; or any name -> named alternatives of several settings each."""
    workloads: dict[str, dict[str, Any]] = {}
    """Name -> workload, in place of the scenario's."""
    limits: dict[str, float | str] = {}
    """Limits such as `ttft_p90: 2s`; a file without any takes those of the scenario's `slo`. Without
    either, only the queue must not grow."""
    budget: Budget = Budget()
    objective: str = "requests_per_usd"
    """Figure to optimise; a file of training jobs without one gets `tokens_per_s_per_device`."""
    strategy: str = DEFAULT_STRATEGY
    """Name in `STRATEGIES`."""
    load: Literal["capacity", "given"] = "capacity"
    """Search each point's greatest sustained load, or run it at the workload's own."""
    finalists: int = 5
    """Best points that meet several streams of requests."""
    finalist_seeds: int = 5
    """Most streams that a finalist meets."""
    seed: int = 0

    @property
    def comes_and_goes(self) -> bool:
        """Whether replicas of some point are scaled, or may fail."""
        settings = schema.flattened({"scenario": self.scenario, "vary": self.vary})
        named = (path.split(".") for path, value in settings.items() if value is not None)
        return any({"autoscaling", "faults"} & {*words} for words in named)

    def check(self) -> None:
        schema.check_seed(self.seed)
        schema.check_at_least(1, finalists=self.finalists)
        schema.check_between(1, MOST_SEEDS, finalist_seeds=self.finalist_seeds)
        for name, values in self.vary.items():
            if not values:
                raise ValueError(f"vary.{name} has no values")

    @property
    def is_training(self) -> bool:
        return bool(self.job)

    @property
    def model(self) -> str:
        """The model that all points share; empty where it varies."""
        name = (self.job or self.scenario).get("model", "")
        given = name.get("name", "") if isinstance(name, dict) else name
        return given if isinstance(given, str) else ""

    @property
    def short_paths(self) -> Mapping[str, str]:
        """Short name in `vary` -> path in a scenario or job."""
        return JOB_PATHS if self.is_training else SHORT_PATHS

    @property
    def num_points(self) -> int:
        return prod(len(values) for values in self.vary.values())


def load_space(path: Path, overrides: Mapping[str, Any] = {}) -> Space:
    """Read the space in a YAML or JSON file. InputError where the file is missing or wrong.

    Args:
        path: the file; traces that it names are looked for beside it first.
        overrides: fields of the space, or dotted paths of its scenario, to replace.
    """
    raw = schema.read_table(path, "a space", "see docs/guides/search.md")
    return space_from(raw, str(path), path.parent, overrides)


def space_from(
    raw: dict[str, Any], source: str = "the space", folder: Path | None = None, overrides: Mapping[str, Any] = {}
) -> Space:
    """Build a space from builtins, where the scenario's or job's keys stand beside its own. InputError names the path
    of what is wrong."""
    fields = [name for name in Space.__struct_fields__ if name not in ("scenario", "job")]
    own_keys, shared = _divided(raw, fields, overrides, source)
    is_training = bool(ONLY_OF_JOBS & shared.keys())
    known = list(dict.fromkeys([*(TrainingJob if is_training else Scenario).__struct_fields__, *fields]))
    for name in shared:
        check_known(name, known, f"{source}: unknown key $.{name}", f"known here: {', '.join(known)}")
    if is_training:
        own_keys = _of_jobs(own_keys, shared, source)
    else:
        if "seed" in own_keys:
            shared["seed"] = own_keys["seed"]
        if "limits" not in own_keys and shared.get("slo") is not None:
            kept = limits_of(schema.decode(shared["slo"], Slo, f"{source}: slo"))
            own_keys["limits"] = {limit.name: limit.most_s for limit in kept}
    if own_keys.get("strategy") == DEFAULT_STRATEGY:
        del own_keys["strategy"]  # as in a file without it: the same search to resume
    if not own_keys.get("vary"):
        raise InputError(f"{source}: nothing varies", f"add what does: vary: {_EXAMPLES[is_training]}")
    if folder is not None:
        shared, own_keys = (beside(table, folder.resolve()) for table in (shared, own_keys))
    space = schema.decode({**own_keys, "job" if is_training else "scenario": shared}, Space, source)
    if not is_training:
        workload = shared.get("workload")
        if isinstance(workload, dict):
            check_limited(workload.get("task", "generate"), [limit.metric for limit in limits_from(space.limits)])
    strategies = STRATEGIES.names()
    message = f"{source}: $.strategy is {space.strategy!r}, which is not known"
    check_known(space.strategy, strategies, message, f"known here: {', '.join(strategies)}")
    for name, values in space.vary.items():
        if isinstance(values, list):
            _check_path(name, space.is_training, f"{source}: $.vary.")
    return space


def _divided(
    raw: dict[str, Any], fields: list[str], overrides: Mapping[str, Any], source: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the space's own keys, the `fields`, and those of its scenario or job, with overrides over both."""
    own_keys = {name: value for name, value in raw.items() if name in fields}
    shared = {name: copy.deepcopy(value) for name, value in raw.items() if name not in own_keys}
    if isinstance(limits := own_keys.get("limits"), str):
        own_keys["limits"] = limit_values(limits, option=f"{source}: $.limits")
    for name in ("vary", "workloads"):
        if not isinstance(own_keys.get(name) or {}, dict):
            raise InputError(f"{source}: $.{name} is {own_keys[name]!r:.60}; a table of keys and values is needed")
    for dotted, value in overrides.items():
        name, _, below = dotted.partition(".")
        if name in ("vary", "workloads") and below:
            own_keys[name] = {**(own_keys.get(name) or {}), below: value}
        else:
            schema.set_path(own_keys if name in fields else shared, dotted, value)
    return own_keys, shared


_EXAMPLES = {False: "{tp: [1, 2, 4]}", True: "{layouts: all}"}


def _check_path(name: str, is_training: bool, source: str) -> None:
    short = JOB_PATHS if is_training else SHORT_PATHS
    if "." not in name and name not in (*short, *(TrainingJob.__struct_fields__ if is_training else ())):
        hint = f"short names: {', '.join(short)}; or {name}: {{first: {{tp: 2}}, second: {{tp: 4}}}}"
        what = "training job" if is_training else "scenario"
        raise InputError(f"{source}{name} is no path in a {what} and no short name", did_you_mean(name, short, hint))


def _of_jobs(own_keys: dict[str, Any], shared: dict[str, Any], source: str) -> dict[str, Any]:
    """Adapt the space's own keys to training jobs; `shared` loses the keys that follow from others."""
    for name in ONLY_OF_DEPLOYMENTS:
        if own_keys.get(name) not in (None, 1):
            raise InputError(
                f"{source}: $.{name} is for deployments; a training step meets no requests", f"leave {name} out"
            )
    own_keys = {"objective": "tokens_per_s_per_device", "finalist_seeds": 1, **own_keys}
    vary = dict(own_keys.get("vary") or {})
    layouts = vary.pop(LAYOUTS, None)
    if layouts is not None:
        if layouts != ALL:
            raise InputError(f"{source}: $.vary.{LAYOUTS} is {layouts!r}; it is {ALL}", "or name degrees: tp: [1, 2]")
        vary = vary_layouts(shared, vary, source)
    return {**own_keys, "vary": vary}


@dataclass(frozen=True)
class Point:
    """One point of a space."""

    index: int
    """Position in the space; the last name of `vary` changes fastest."""
    choice: dict[str, Any]
    """Name in `vary` -> the value, or the name of the alternative."""
    settings: dict[str, Any]
    """Path in the scenario -> value."""

    @property
    def knobs(self) -> dict[str, Any]:
        """Engine settings that change nothing but themselves: name -> value."""
        prefix = len(ENGINE_PREFIX)
        return {path[prefix:]: value for path, value in self.settings.items() if is_knob(path)}

    @property
    def others(self) -> dict[str, Any]:
        return {path: value for path, value in self.settings.items() if not is_knob(path)}

    @cached_property
    def title(self) -> str:
        """`device h100_sxm, tp 4`."""
        names = {name: "" if name in (CHANGE, "deployment") else f"{schema.short_path(name)} " for name in self.choice}
        return ", ".join(f"{names[name]}{value_text(value)}" for name, value in self.choice.items())


def is_knob(path: str) -> bool:
    """Whether a path leads to an engine's setting that no other's default depends on."""
    name = path.removeprefix(ENGINE_PREFIX)
    return name != path and "." not in name and name not in _NAMES["engine_identity"]


def value_text(value: Any) -> str:
    """Format a value of `vary` for a table."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "+".join(str(entry.get("name", "...")) for entry in value)
    return "default" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def point_at(space: Space, index: int) -> Point:
    """Return the point at a position."""
    choice: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    rest, short = index, space.short_paths
    for name, values in reversed(space.vary.items()):
        rest, position = divmod(rest, len(values))
        if isinstance(values, dict):
            label = list(values)[position]
            choice[name] = label
            settings |= {short.get(path, path): value for path, value in values[label].items()}
        else:
            choice[name] = values[position]
            settings[short.get(name, name)] = values[position]
    return Point(index, dict(reversed(choice.items())), settings)


def scenario_at(space: Space, settings: Mapping[str, Any], workload: str | None = None) -> Scenario:
    """Return the scenario of a workload (None: its own) with `settings`, path -> value; InputError where it is none."""
    raw = copy.deepcopy(space.scenario)
    if workload is not None:
        raw["workload"] = copy.deepcopy(space.workloads[workload])
    for path, value in sorted(settings.items(), key=lambda item: item[0].count(".")):
        schema.set_path(raw, path, copy.deepcopy(value))
    split = (raw.get("deployment") or {}).get("parallelism") or {}
    if split.get("ep") == ALL_RANKS:
        split["ep"] = split.get("tp", 1) * split.get("attention_dp", 1)
    raw.pop("slo", None)
    keep_published_formats(raw)
    return scenario_from(raw)


def workload_names(space: Space) -> list[str | None]:
    """Return the names of the space's workloads, or None for the scenario's own."""
    return list(space.workloads) or [None]


def as_builtins(space: Space) -> dict[str, Any]:
    """Return the space as it stands in a file."""
    raw: dict[str, Any] = msgspec.to_builtins(space)
    return {**raw.pop("scenario", {}), **raw.pop("job", {}), **raw}


MOST_POINTS = 10_000

_NUMBER = r"(-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_RANGE = re.compile(f"{_NUMBER}:{_NUMBER}(?::{_NUMBER})?$")


def axes_of(vary: Sequence[str]) -> dict[str, list[Any]]:
    """Parse `--vary` options, `PATH=1,2,4`, `PATH=FIRST:LAST:STEP` or `PATH=[...]` with YAML, into path -> values.
    InputError for another form, or a name that is not known."""
    axes = dict(_axis(text) for text in vary)
    for name in axes:
        _check_path(name, False, "--vary: ")
    return axes


def grid_of(raw: dict[str, Any], vary: Sequence[str] | Mapping[str, Sequence[Any]]) -> Space:
    """Return the space that `--vary` options, or values by path, make of a scenario, given as builtins. InputError as
    `axes_of`; a path that leads nowhere, or more than `MOST_POINTS` points."""
    axes, source = (dict(vary), "vary") if isinstance(vary, Mapping) else (axes_of(vary), "--vary")
    space = space_from({**raw, "vary": axes, "load": "given"}, source)
    if space.num_points > MOST_POINTS:
        raise InputError(
            f"{source}: {format_count(space.num_points, 'point')}; a grid has {MOST_POINTS:,} at most", "use a search"
        )
    return space


def _axis(text: str) -> tuple[str, list[Any]]:
    path, separator, value = text.partition("=")
    path = path.strip()
    if not separator or not path or not value.strip():
        raise InputError(f"--vary: {text!r} is not of the form path=values", "for instance tp=1,2,4 or rate=1:20:2")
    if match := _RANGE.match(value.strip()):
        return path, _steps(text, *match.groups())
    return path, list(schema.parse_yaml(value if value.lstrip().startswith("[") else f"[{value}]"))


def _steps(text: str, first: str, last: str, step: str | None) -> list[float]:
    low, high, by = float(first), float(last), float(step or 1)
    if by <= 0 or high < low:
        raise InputError(f"--vary: {text!r} has no values", "write first:last:step, step above 0")
    count = int((high - low) / by + 1e-9) + 1
    if count > MOST_POINTS:
        raise InputError(
            f"--vary: {text!r} has {format_count(count, 'value')}; a grid has {MOST_POINTS:,} points at most"
        )
    values = [low + by * index for index in range(count)]
    return [int(value) if value.is_integer() and "." not in first + (step or "") else value for value in values]


MICRO_BATCHES = (1, 2, 4)
VIRTUAL_STAGES = (1, 2, 3, 4, 5, 6, 8)
MOST_STAGES, MOST_CONTEXT, MOST_RANKS = 64, 8, 1024
LONG_SEQUENCE_TOKENS = 8192
"""Shortest sequences that are split among devices too, and the shortest part of those beyond `MOST_CONTEXT`."""
CHEAP_MODULES = ("core_attention", "norms", "activation")
"""Modules that selective recomputation drops: much memory, little time; Megatron-Core drops activations of experts."""
FOLLOWING = ("dp", "experts_dp", "experts_tp", "layers_per_stage")
"""Fields of a job's parallelism that follow from the degrees that vary."""


VARIED = ("tp", "cp", "pp", "vpp", "ep", "micro_batch", "recompute", "zero")
"""Short names of what a search over layouts varies."""


def vary_layouts(raw: dict[str, Any], varied: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the values of a search over every layout: tensor, context, pipeline and expert parallelism, virtual
    stages, micro-batch, recomputation and the framework's stages of ZeRO. Tensor parallelism stays within a node.
    InputError where the job is wrong, or says nothing of the number of devices.

    Args:
        raw: the job as in a file; degrees that only one value suits are set there, those that follow are taken out.
        varied: values of further settings by short name; a name in it is not varied here.
        source: named in errors.
    """
    job = _with_first_values(raw, varied, source)
    if job.num_devices is None:
        raise InputError("a search over layouts needs num_devices", "give the number of devices in all")
    counts = [n for n in varied.get("num_devices", ()) if isinstance(n, int)] or [job.num_devices]
    for name in FOLLOWING:
        raw.get("parallelism", {}).pop(name, None)
    raw.pop("num_microbatches", None)
    model, _, node = look_up(job)
    divisors = [n for n in range(1, min(max(counts), MOST_RANKS) + 1) if any(count % n == 0 for count in counts)]
    num_heads = [getattr(group.attention, "num_heads", 0) for group in model.layers]
    most_context = max(MOST_CONTEXT, job.sequence_tokens // LONG_SEQUENCE_TOKENS)
    long = job.sequence_tokens >= LONG_SEQUENCE_TOKENS
    chunked = job.schedule in (None, *CHUNKED_SCHEDULES)
    framework = framework_of(job.framework)
    own = framework["defaults"]["sharding"]["zero"] if job.sharding.zero is None else job.sharding.zero
    values: dict[str, Any] = {
        "tp": [n for n in divisors if n <= min(node.num_devices, 16) and all(heads % n == 0 for heads in num_heads)],
        "cp": [n for n in divisors if n <= most_context and n & (n - 1) == 0] if long else [1],
        "pp": [n for n in divisors if n <= min(MOST_STAGES, model.num_layers)],
        "vpp": [n for n in VIRTUAL_STAGES if 2 * n <= model.num_layers] if chunked else [1],
        "ep": [n for n in divisors if _divides_experts(model, n)],
        "micro_batch": [n for n in MICRO_BATCHES if job.global_batch % n == 0],
        "recompute": _recompute(job, model),
        "zero": sorted({*framework["zero_stages"], own}, key=lambda stage: (stage != own, stage)),
    }
    axes = dict(varied)
    for name, choices in values.items():
        if name not in varied and len(choices) == 1:
            schema.set_path(raw, JOB_PATHS[name], choices[0])
        elif name not in varied:
            axes[name] = choices
    return axes


def _with_first_values(raw: dict[str, Any], varied: dict[str, Any], source: str) -> TrainingJob:
    """Return the job with the first value of everything else that varies, to look its names up."""
    filled: dict[str, Any] = msgspec.to_builtins(raw)
    for name, values in varied.items():
        if isinstance(values, list) and values:
            schema.set_path(filled, JOB_PATHS.get(name, name), values[0])
    return schema.decode(filled, TrainingJob, source)


def _recompute(job: TrainingJob, model: ModelSpec) -> dict[str, dict[str, Any]]:
    has_experts = model.has_experts
    can_drop_activation = has_experts or job.framework != "megatron"
    modules = [name for name in CHEAP_MODULES if name != "activation" or can_drop_activation]
    if job.framework == "fsdp2":
        modules = list(BY_OPERATOR)
    if job.recompute.granularity == "selective" and job.recompute.modules is not None:
        modules = list(job.recompute.modules)
    only_full = {"recompute.num_layers": None, "recompute.distribute": False}
    return {
        "none": {"recompute.granularity": "none", "recompute.modules": None, **only_full},
        "selective": {"recompute.granularity": "selective", "recompute.modules": modules, **only_full},
        "full": {"recompute.granularity": "full", "recompute.modules": None},
    }


def _divides_experts(model: ModelSpec, ep: int) -> bool:
    """Whether so many devices can hold different experts; of a model without any, only one."""
    counts = [part.num_experts for _, part in model.feed_forwards if part.num_experts]
    return ep == 1 or (bool(counts) and all(count % ep == 0 for count in counts))
