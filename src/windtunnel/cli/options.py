"""Options of the command line: their declaration, the ones that verbs share, and the scenario that they describe."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import click

from windtunnel.cli.output import remark_left_out
from windtunnel.errors import InputError, check_known

if TYPE_CHECKING:
    from windtunnel.serving.scenario import Scenario

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

OTHER_NAMES = {
    "tensor-parallel-size": "tp",
    "pipeline-parallel-size": "pp",
    "expert-parallel-size": "ep",
    "quantization": "quant",
    "request-rate": "rate",
    "max-concurrency": "concurrency",
    "num-prompts": "num-requests",
    "random-input-len": "input-tokens",
    "random-output-len": "output-tokens",
}
"""Option of `vllm serve` or `vllm bench serve` -> the same option here."""

LIMITS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}
"""Name in `--slo` -> field."""


class WrittenFile(click.Path):
    """A file that a verb writes; one that cannot be written is refused before any work."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from windtunnel.files import check_writable

        path = super().convert(value, param, ctx)
        check_writable(Path(str(path)))
        return path


PATH, WRITTEN_FILE = click.Path(path_type=Path), WrittenFile(path_type=Path)
METAVARS = {int: "N", float: "X", PATH: "FILE", WRITTEN_FILE: "FILE"}
"""Type of an option -> how `--help` shows its value; others are a NAME."""


class SectionedOption(click.Option):
    """An option with the heading that `--help` shows it under."""

    def __init__(self, *names: Any, section: str, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.section = section


class Verb(click.Command):
    """A command whose options stand under headings, and have vLLM's names too."""

    def __init__(self, *names: Any, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.context_settings = {"token_normalize_func": _our_name, **self.context_settings}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "" in args:
            before = args[args.index("") - 1] if args.index("") else "the first argument"
            raise InputError(f"{before} is empty", "give it a value, or leave it out")
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                sections.setdefault(getattr(parameter, "section", "General"), []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)


class VerbGroup(click.Group):
    """A group of commands that answers an unknown one with a "did you mean"."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if not args[0].startswith("-"):
            message = f"{ctx.command_path} has no command {args[0]!r}"
            check_known(args[0], names, message, f"it has {', '.join(names)}")
        return super().resolve_command(ctx, args)


def _our_name(name: str) -> str:
    name = name.replace("_", "-")
    return OTHER_NAMES.get(name, name)


class Option:
    """An option of the command line, under a heading of `--help`: a decorator of commands, or the default of a field.

    Args:
        names: names and flags for click.
        section: the heading.
        settings: further settings for click; without a metavar, values are shown by their type (`METAVARS`).
    """

    def __init__(self, *names: str, section: str, **settings: Any) -> None:
        self.names, self.settings = names, {"cls": SectionedOption, "section": section, **settings}

    def __call__(self, function: Decorated, *names: str, **implied: Any) -> Decorated:
        """Add the option to a command, under further `names`; `implied` settings fill those that are not given."""
        settings = {**implied, **self.settings}
        if not settings.get("is_flag"):
            settings.setdefault("metavar", METAVARS.get(settings.get("type"), "NAME"))
        return click.option(*names, *self.names, **settings)(function)


class HelpSection:
    """A heading of `--help`, with the options below it."""

    def __init__(self, heading: str) -> None:
        self.heading = heading

    def __call__(self, *names: str, **settings: Any) -> Any:
        """Return an option as the default of a NamedTuple's field, whatever the field's type."""
        return self.option(*names, **settings)

    def option(self, *names: str, **settings: Any) -> Option:
        """Return an option as a decorator of commands."""
        return Option(*names, section=self.heading, **settings)


def options_of(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that a NamedTuple's fields declare; it gets their values as one first argument.

    A field's default is its `Option`, and its type says whether the option is a flag, may be repeated, or is a number;
    or the default is another such NamedTuple.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def command(*bundles: Any, **values: Any) -> None:
            function(*bundles, _gathered(kind, values), **values)

        for name, hint, option in reversed(list(_declared(kind))):
            option(command, name, **_settings_of_type(hint))
        return command

    return decorate


def _declared(kind: type[Any]) -> Iterator[tuple[str, Any, Option]]:
    """Yield the name, type and option of each field of a NamedTuple, those of nested ones included."""
    for name, hint in get_type_hints(kind).items():
        default = kind._field_defaults[name]
        if isinstance(default, Option):
            yield name, hint, default
        else:
            yield from _declared(hint)


def _gathered(kind: type[Any], values: dict[str, Any]) -> Any:
    """Take the options of `kind` out of `values`, as one object."""
    fields = kind._field_defaults.items()
    return kind(
        *(
            values.pop(name) if isinstance(default, Option) else _gathered(type(default), values)
            for name, default in fields
        )
    )


def _settings_of_type(hint: Any) -> dict[str, Any]:
    """Return click's settings for a field of type `hint`: a scalar, one or None, or a tuple of scalars."""
    if get_origin(hint) is tuple:
        return {**_settings_of_type(get_args(hint)[0]), "multiple": True}
    scalar = next((part for part in get_args(hint) if part is not NoneType), hint)
    return {"is_flag": True} if scalar is bool else {"type": PATH if scalar is Path else scalar}


def all_of(*options: Callable[[Decorated], Decorated]) -> Callable[[Decorated], Decorated]:
    """Join several options as one decorator, in the order in which `--help` shows them."""

    def decorate(function: Decorated) -> Decorated:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


scenario_file = click.argument("scenario", required=False, type=PATH, metavar="[SCENARIO.yaml]")

SERVED, ENGINE, GENERAL = HelpSection("What is served, on what"), HelpSection("Engine"), HelpSection("General")

json_option = GENERAL.option("--json", "as_json", is_flag=True, help="Print JSON.")
hub_option = GENERAL.option("--hub", is_flag=True, help="Look unknown models up on huggingface.co.")

deployment_options = all_of(
    SERVED("--model", help="A model of the catalog, or a config.json."),
    SERVED("--device", help="A device of the catalog, or a YAML file."),
    SERVED("--node", help="A node of the catalog, or a YAML file.  [the device's usual one]"),
    SERVED("--tp", "-tp", type=int, help="Tensor parallelism.  [1]"),
    SERVED("--pp", "-pp", type=int, help="Pipeline parallelism.  [1]"),
    SERVED("--ep", type=int, help="Expert parallelism.  [1]"),
    SERVED("--attention-dp", type=int, help="Replicas of attention that share experts.  [1]"),
    SERVED("--quant", metavar="FORMAT", help="Format of the weights: bf16, fp8, int4, ...  [as published]"),
    SERVED("--kv-cache-dtype", metavar="FORMAT", help="Format of the KV cache: bf16, fp8.  [as published]"),
    SERVED("--profile", metavar="FOLDER", help="Operators that `windtunnel profile` measured on the device."),
    SERVED(
        "--estimator",
        help="How a profile is read: interpolation, auto, forest, ... (`windtunnel profile check`).  [interpolation]",
    ),
    ENGINE("--engine", help="vllm, sglang or trtllm.  [vllm]"),
    ENGINE("--engine-version", metavar="VERSION", help="Version of the engine.  [the newest that was measured]"),
    ENGINE(
        "--scheduler",
        help="vllm_v0, sarathi, orca, faster_transformer, lightllm, or your own: module:function.  [the engine's]",
    ),
    ENGINE("--max-num-seqs", type=int, help="Most running requests.  [the engine's]"),
    ENGINE("--max-num-batched-tokens", type=int, help="Token budget of a step.  [the engine's]"),
    ENGINE("--gpu-memory-utilization", type=float, help="Share of memory to use.  [the engine's]"),
    ENGINE(
        "--calibration",
        help="A calibration of the catalog, its file, or none.  [the shipped one, for measured versions]",
    ),
)

_SAMPLING = HelpSection("Sampling")

sampling_options = all_of(
    _SAMPLING("--temperature", type=float, help="0: greedy.  [greedy; for a trace, the model's generation config]"),
    _SAMPLING("--top-p", type=float, help="Share of the probability of the tokens kept.  [the model's]"),
    _SAMPLING("--top-k", type=int, help="Number of the likeliest tokens kept; 0: all.  [the model's]"),
    _SAMPLING("--min-p", type=float, help="Least probability of a token, relative to the likeliest.  [the model's]"),
    _SAMPLING("--logprobs", type=int, help="Log probabilities returned with every token.  [none]"),
    _SAMPLING(
        "--structured-output/--no-structured-output",
        is_flag=True,
        default=None,
        help="A grammar masks the logits of every token.  [no]",
    ),
)
"""Options of the requests' sampling; penalties are fields of `workload.sampling`, for --set."""

general_options = all_of(
    GENERAL(
        "--set",
        "settings",
        multiple=True,
        metavar="PATH=VALUE",
        help="Set any field of the scenario, as workload.arrivals.rate_per_s=6.5. May be repeated.",
    ),
    hub_option,
    json_option,
)


def scenario_of(file: Path | None, options: Mapping[str, Any], base: dict[str, Any] | None = None) -> "Scenario":
    """Return the scenario of a command line: the file's, if there is one, with every option that was given over it.

    `options` are those of a deployment and its load, `--set`, `--hub` and `--slo`; None stands for one not given.
    `base`, the deployment of a server's command line, goes over the file and below the options.

    Raises:
        InputError: names the option or the path in the scenario that is wrong.
    """
    from windtunnel import catalog
    from windtunnel.schema import read_table
    from windtunnel.serving.scenario import SCENARIO_HINT, scenario_from
    from windtunnel.serving.shorthand import lay_over

    raw = read_table(file, "a scenario", SCENARIO_HINT) if file is not None else {}
    lay_over(raw, base or {})
    given = {name: value for name, value in options.items() if value is not None}
    if "estimator" in given and not (given.get("profile") or _value_at(raw, "deployment", "profile", "folder")):
        raise InputError("--estimator says how a profile is read, and --profile is missing")
    slo = given.get("slo")
    try:
        raw = with_load(raw, given)
        if file is None:
            _require_enough(raw)
        # A trace named in the file lies beside it; one named on the command line, where the command runs.
        folder = file.parent if file is not None and "trace" not in given else None
        scenario = scenario_from(raw, "" if file is None else str(file), folder)
    except InputError as error:
        raise InputError(_as_typed(error.message, set(given), slo), error.hint) from None
    # A model that cannot be read is refused where the scenario is resolved.
    with suppress(InputError):
        remark_left_out(catalog.model(scenario.model))
    return scenario


def with_load(raw: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `given` options over a raw scenario: fields by their short names, lengths, load, limits and `--set`."""
    from windtunnel.serving.shorthand import parse_lengths, raw_scenario

    apart = ("rate", "concurrency", "trace", "slo", "settings", "hub")
    fields = {name: value for name, value in given.items() if name not in apart and value is not None}
    for stream in ("input_tokens", "output_tokens"):
        if stream in fields:
            fields[stream] = parse_lengths(f"--{stream.replace('_', '-')}", fields[stream])
    rate, concurrency, trace, slo, settings, hub = (given.get(name) for name in apart)
    return raw_scenario(
        raw, fields, rate, concurrency, trace, limits(slo), assignments(settings or ()), allow_download=bool(hub)
    )


def _value_at(raw: Any, *path: str) -> Any:
    for name in path:
        raw = raw.get(name) if isinstance(raw, dict) else None
    return raw


def assignments(texts: tuple[str, ...]) -> dict[str, Any]:
    """Parse `("a.b=1", ...)` as {"a.b": 1, ...}; values are YAML.

    Raises:
        InputError: a text without `=`, or a value that is not YAML.
    """
    import yaml

    from windtunnel.schema import parse_yaml

    values = {}
    for text in texts:
        path, separator, value = text.partition("=")
        if not separator or not path:
            raise InputError(
                f"--set: {text!r} is not of the form path=value", "for instance --set workload.num_requests=500"
            )
        try:
            values[path.strip()] = parse_yaml(value)
        except yaml.YAMLError:
            raise InputError(f"--set: the value of {text!r} is not valid YAML") from None
    return values


def quantity(option: str, name: str, text: str) -> float:
    """Parse the value of an option in the unit of the field `name`.

    Raises:
        InputError: it is no such quantity; the message names the option.
    """
    from windtunnel.units import parse_quantity

    try:
        return parse_quantity(name, text)
    except InputError as error:
        raise InputError(error.message.replace(name, option), error.hint) from None


def limits(text: str | None) -> dict[str, Any]:
    """Parse `ttft=2s,tpot=50ms` as fields of an SLO.

    Raises:
        InputError: another form, or a limit that does not exist.
    """
    from windtunnel.search.capacity.limits import named_values

    values = named_values((text or "").replace(":", "="), "for instance --slo ttft=2s,tpot=50ms")
    for name in values:
        check_known(name, LIMITS, f"--slo: there is no limit {name!r}")
    return {LIMITS[name]: value for name, value in values.items()}


def _require_enough(raw: Mapping[str, Any]) -> None:
    """Raise InputError for the first option that a command line without a scenario file lacks.

    Tables of a wrong type are left to the decoder, which refuses them.
    """
    deployment, workload = raw.get("deployment", {}), raw.get("workload", {})
    if not (isinstance(deployment, dict) and isinstance(workload, dict)):
        return
    has_whole = any(workload.get(name) for name in ("trace", "clients", "tenants", "total_tokens"))
    needed = [
        ("--model", "model" in raw, "list them with `windtunnel catalog models`"),
        ("--device", "device" in deployment, "list them with `windtunnel catalog devices`"),
        ("--rate, --concurrency or --trace", has_whole or "arrivals" in workload, None),
        ("--input-tokens", has_whole or "input_tokens" in workload, None),
        ("--output-tokens", has_whole or "output_tokens" in workload, None),
    ]
    for name, is_given, hint in needed:
        if not is_given:
            raise InputError(f"{name} is missing", hint or "give it, a --trace, or a scenario file")


def _as_typed(message: str, typed: set[str], slo: str | None) -> str:
    """Replace paths in the scenario by the options that set them."""
    from windtunnel.serving.shorthand import PATHS

    paths = {**PATHS, "rate": "workload.arrivals.rate_per_s", "concurrency": "workload.arrivals.concurrency"}
    names = {f"$.{paths[name]}": f"--{name.replace('_', '-')}" for name in typed if name in paths}
    if slo is not None:
        names |= {f"$.slo.{field}": f"--slo {name}" for name, field in LIMITS.items()}
    for path, name in names.items():
        message = message.replace(path, name)
    return message
