"""Options of the command line: their declaration, the ones that verbs share, and the scenario that they describe."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import click

from windtunnel.cli.output import remark, remark_left_out, remark_node, remark_version
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
TYPES = {"int": int, "float": float, "path": PATH, "written_file": WRITTEN_FILE, "positive": click.IntRange(min=1)}
"""Types as `options.yaml` names them."""


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


class Option(NamedTuple):
    """An option as `options.yaml` declares it."""

    field: str
    """Name of its value."""
    flags: tuple[str, ...]
    settings: dict[str, Any]
    """Further settings for click; without a metavar, values are shown by their type (`METAVARS`)."""

    def added_to(self, function: Decorated, **implied: Any) -> Decorated:
        """Return a command with the option; `implied` settings fill those that are not given."""
        settings = {**implied, **self.settings}
        if not settings.get("is_flag"):
            settings.setdefault("metavar", METAVARS.get(settings.get("type"), "NAME"))
        return click.option(self.field, *self.flags, cls=SectionedOption, **settings)(function)


@cache
def _declarations() -> Any:
    from windtunnel.schema import read_yaml

    return read_yaml(Path(__file__).with_suffix(".yaml"))


def _declared(group: str) -> Iterator[Option]:
    """Yield the options of a group; where only the help is given, the value is a text."""
    for section, declarations in _declarations()[group].items():
        for text, declared in declarations.items():
            settings = {"help": declared} if isinstance(declared, str) else dict(declared)
            choices, kind = settings.pop("choices", None), settings.pop("type", None)
            if choices or kind:
                settings["type"] = click.Choice(choices) if choices else TYPES[kind]
            flags = [name for name in text.split() if name.startswith("-")]
            field = next((name for name in text.split() if not name.startswith("-")), None)
            # As click does: of an option and its opposite, the first names the field.
            field = field or flags[0].partition("/")[0].strip("-").replace("-", "_")
            yield Option(field, tuple(flags), {"section": section, **settings})


def options_in(*groups: str) -> Callable[[Decorated], Decorated]:
    """Return the options of groups of `options.yaml` as one decorator; a command gets their values by name."""

    def decorate(function: Decorated) -> Decorated:
        for option in reversed([option for group in groups for option in _declared(group)]):
            function = option.added_to(function)
        return function

    return decorate


def options_of(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a NamedTuple's fields; it gets their values as one first argument.

    The group of the NamedTuple's name in `options.yaml` declares them. A field's type says whether its option is a
    flag, may be repeated, or is a number; or the type is another such NamedTuple.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def command(*bundles: Any, **values: Any) -> None:
            function(*bundles, _gathered(kind, values), **values)

        for hint, option in reversed(list(_declared_of(kind))):
            option.added_to(command, **_settings_of_type(hint))
        return command

    return decorate


def _declared_of(kind: type[Any]) -> Iterator[tuple[Any, Option]]:
    """Yield the type and option of each field of a NamedTuple, those of nested ones included."""
    options = {option.field: option for option in _declared(kind.__name__)}
    for name, hint in get_type_hints(kind).items():
        if hasattr(hint, "_fields"):
            yield from _declared_of(hint)
        else:
            yield hint, options[name]


def _gathered(kind: type[Any], values: dict[str, Any]) -> Any:
    """Take the options of `kind` out of `values`, as one object."""
    hints = get_type_hints(kind).items()
    return kind(*(_gathered(hint, values) if hasattr(hint, "_fields") else values.pop(name) for name, hint in hints))


def _settings_of_type(hint: Any) -> dict[str, Any]:
    """Return click's settings for a field of type `hint`: a scalar, one or None, or a tuple of scalars."""
    if get_origin(hint) is tuple:
        return {**_settings_of_type(get_args(hint)[0]), "multiple": True}
    scalar = next((part for part in get_args(hint) if part is not NoneType), hint)
    return {"is_flag": True} if scalar is bool else {"type": PATH if scalar is Path else scalar}


scenario_file = click.argument("scenario", required=False, type=PATH, metavar="[SCENARIO.yaml]")


def scenario_of(file: Path | None, options: Mapping[str, Any], base: dict[str, Any] | None = None) -> "Scenario":
    """Return the scenario of a command line: the file's, if there is one, with every option that was given over it.

    `options` are those of a deployment and its load, `--set`, `--hub` and `--slo`; None stands for one not given.
    `base`, the deployment of a server's command line, goes over the file and below the options.

    Raises:
        InputError: names the option or the path in the scenario that is wrong.
    """
    from windtunnel import catalog
    from windtunnel.schema import read_table
    from windtunnel.serving.scenario import SCENARIO_HINT, pool_scenario, scenario_from
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
        for pool in scenario.deployment.groups:
            deployment = (pool_scenario(scenario, pool) if scenario.deployment.pools else scenario).deployment
            remark_version(deployment.engine)
            if deployment.parallelism.num_devices > 1:
                remark_node(deployment.device, deployment.node)
    return scenario


def launched(text: str | None) -> dict[str, Any] | None:
    """Return the deployment of a server's command line; name on stderr those of its settings that are not predicted."""
    from windtunnel.formats.launch.read import read_launch_command

    if text is None:
        return None
    launch = read_launch_command(text)
    for line in launch.remarks:
        remark(line)
    return launch.raw


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
