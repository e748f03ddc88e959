"""The commands of `windtunnel`, made from `verbs.yaml` and `options.yaml`: `--help` imports none of their modules."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from windtunnel.errors import InputError, check_known
from windtunnel.limits import set_limits
from windtunnel.serving.other_names import other_names
from windtunnel.units import whole


class WrittenFile(click.Path):
    """A file that a verb writes; one that cannot be written is refused before any work."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from windtunnel.files import check_writable

        path = super().convert(value, param, ctx)
        check_writable(Path(str(path)))
        return path


class Whole(type(click.INT)):  # type: ignore[misc]
    """A whole number, also as `8k`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        with suppress(ValueError):
            value = whole(value) if isinstance(value, str) else value
        return super().convert(value, param, ctx)


class Tokens(type(click.FLOAT)):  # type: ignore[misc]
    """Tokens of a training run, also as `15T`; `M` is a million."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        with suppress(ValueError):
            value = whole(value.lower()) if isinstance(value, str) else value
        return super().convert(value, param, ctx)


class Rate(type(click.FLOAT)):  # type: ignore[misc]
    """Requests a second, above 0."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        rate = super().convert(value, param, ctx)
        if not rate > 0:
            name = param.opts[0] if param is not None else "the rate"
            raise InputError(f"{name} is {rate:g}; more than 0 requests/s are needed", f"for instance {name} 2, or 0.5")
        return rate


TYPES = {
    "text": str,
    "int": Whole(),
    "positive": click.IntRange(min=1),
    "float": float,
    "rate": Rate(),
    "tokens": Tokens(),
    "path": click.Path(path_type=Path),
    "written_file": WrittenFile(path_type=Path),
}
"""Types of values as the YAML files name them; a flag has none."""
METAVARS = {"int": "N", "float": "X", "rate": "X", "tokens": "N", "path": "FILE", "written_file": "FILE"}
"""Type of an option -> how `--help` shows its value; others are a NAME."""


class Options(SimpleNamespace):
    """Values of a command's arguments and options, by the names that the YAML files give them."""

    def of(self, *groups: str) -> dict[str, Any]:
        """Return the values of some groups of options by name, as far as the command has them; None: not given."""
        names = (str(option.name) for group in groups for option in options_in(group))
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def given(self, *groups: str) -> dict[str, Any]:
        return {name: value for name, value in self.of(*groups).items() if value is not None}


class SectionedOption(click.Option):
    """An option with the heading that `--help` shows it under, and the least value that it takes."""

    def __init__(self, *names: Any, section: str, least: int | None = None, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.section, self.least = section, least

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        flags = {flag for option in ctx.command.params for flag in (*option.opts, *option.secondary_opts)}
        for given in value if isinstance(value, tuple | list) else (value,):
            if given in flags and given[:1] == "-":  # click takes what is behind an option for its value
                raise click.BadOptionUsage(self.opts[0], f"requires an argument, before {given}", ctx)
        return super().type_cast_value(ctx, value)

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        number = super().process_value(ctx, value)
        if isinstance(number, int) and self.least is not None and number < self.least:
            raise InputError(f"{self.opts[0]} is {number}; at least {self.least} is needed")
        return number


class Verb(click.Command):
    """A command whose options stand under headings, and have vLLM's names too."""

    other_options: str | None = None
    """Hint for an option that is not known and near none."""
    instead: Mapping[str, str] = {}
    """Option that other commands have -> the hint for it here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "" in args:
            before = args[args.index("") - 1] if args.index("") else "the first argument"
            raise InputError(f"{before} is empty", "give it a value, or leave it out")
        try:
            several = (
                each for each in self.params if isinstance(each.type, click.Path) and getattr(each, "multiple", False)
            )
            flags, spread, flag, kind = {name for each in several for name in each.opts}, list[str](), "", None
            for word in args:
                if word.startswith("-"):
                    flag, kind = word if word in flags else "", None
                elif flag and kind is not None and Path(word).suffix == kind:
                    spread.append(flag)
                else:
                    flag, kind = (flag, Path(word).suffix) if kind is None else ("", None)
                spread.append(word)
            left = super().parse_args(ctx, spread)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise
        written = [each for each in self.params if isinstance(each.type, WrittenFile) or each.name == "out"]
        places = {each: Path(ctx.params[str(each.name)]).absolute() for each in written if ctx.params[str(each.name)]}
        for file, path in places.items():
            inside = [other for other, place in places.items() if other is not file and path in (place, *place.parents)]
            if inside and isinstance(file.type, WrittenFile) and (path.is_file() or not path.exists()):  # not /dev/null
                raise InputError(f"{inside[0].opts[0]} and {file.opts[0]} both write to {path}", "name two places")
        return left

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


class Verbs(VerbGroup):
    """The group of all verbs, each of which is made when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(declared("verbs"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        verb = declared("verbs").get(cmd_name)
        return None if verb is None else _command(cmd_name, verb)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        sections, width = dict[str, list[tuple[str, str]]](), max(map(len, declared("verbs")))
        for name, verb in declared("verbs").items():
            sections.setdefault(verb["under"], []).append((name.ljust(width), verb["line"]))
        for heading, lines in sections.items():
            with formatter.section(heading):
                formatter.write_dl(lines)


def _check_rules(rules: Iterable[Mapping[str, Any]], values: Mapping[str, Any]) -> None:
    """Raise InputError for the first rule that applies: all options `with` are given, `any` of some, none `without`."""
    given = {name for name, value in values.items() if value or type(value) in {int, float}}  # 0 is given
    for rule in rules:
        some = [f"--{name.replace('_', '-')}" for name in rule.get("any", ()) if name in given]
        has_all = given.issuperset(rule.get("with", ())) and (some or "any" not in rule)
        if has_all and given.isdisjoint(rule.get("without", ())):
            message = rule["says"].format(any=some[0] if some else "", **values)
            raise InputError(message, rule.get("hint", "leave it out"))


@cache
def declared(file: str) -> Mapping[str, Any]:
    """Return the content of a YAML file beside this module."""
    from windtunnel.schema import read_yaml

    content: Mapping[str, Any] = read_yaml(Path(__file__).with_name(f"{file}.yaml"))
    return content


def _command(name: str, verb: Mapping[str, Any]) -> click.Command:
    """Return a command, or a group of commands, as `verbs.yaml` declares it."""
    # click keeps the lines of a paragraph that begins with this mark.
    examples = f"\n\b\n{verb['examples']}" if "examples" in verb else ""
    texts: dict[str, Any] = {
        "help": f"{verb['help']}{examples}",
        "short_help": verb.get("line"),
        "epilog": verb.get("epilog"),
    }
    if "commands" in verb:
        commands = {below: _command(below, part) for below, part in verb["commands"].items()}
        return VerbGroup(name, commands, callback=_show_help, invoke_without_command=True, **texts)
    declared_arguments = [dict(settings, name=argument) for argument, settings in verb.get("arguments", {}).items()]
    meant = {settings["name"]: option for settings in declared_arguments if (option := settings.pop("option", None))}
    arguments = [
        click.Argument([settings.pop("name")], **{**settings, "type": TYPES[settings.get("type", "path")]})
        for settings in declared_arguments
    ]
    options = [option for group in (*verb["options"], "limits") for option in options_in(group)]
    flags = {flag.lstrip("-") for option in options for flag in (*option.opts, *option.secondary_opts)}
    named = {} if verb.get("keeps_names_of_vllm") else other_names()
    meant_names = {other: name for other, name in named.items() if name in flags and other not in flags}

    def normalised(name: str) -> str:
        dashed = name.replace("_", "-")
        return meant_names.get(dashed, dashed)

    module, _, function = verb["in"].partition(":")

    def run(memory_limit: str | None, time_limit: str | None, **values: Any) -> None:
        set_limits(memory_limit, time_limit)
        for argument, option in meant.items():
            if value := values.pop(argument):
                if values[option]:
                    flag = next(each.opts[0] for each in options if each.name == option)
                    first = value if isinstance(value, str) else value[0]
                    raise InputError(f"{first} and {flag} both say it", f"leave {flag} out")
                values[option] = value
        _check_rules(verb.get("rules", ()), values)
        try:
            getattr(import_module(f"windtunnel.cli.{module}"), function or "command")(Options(**values))
        except InputError as error:
            from windtunnel.cli.naming import name_settings

            error.hint = _reader_of_any(values, error) or error.hint
            name_settings(error, values)
            if values.get("from_command") and any(option.name == "model" for option in options):
                said = "give the path of its config.json"
                error.hint = error.hint and error.hint.replace(said, f"{said}, or a model like it, by --model")
            raise

    made = Verb(
        name,
        callback=run,
        params=[*arguments, *options],
        context_settings={"token_normalize_func": normalised},
        **texts,
    )
    made.other_options, made.instead = verb.get("other_options"), verb.get("instead", {})
    return made


def _reader_of_any(values: Mapping[str, Any], error: InputError) -> str | None:
    """Return a hint that names the command that reads a file which `error` is about, where it is another command."""
    from windtunnel.cli.other_files import reader_of
    from windtunnel.files import is_file

    given = [part for value in values.values() for part in (value if isinstance(value, tuple) else (value,))]
    files = [Path(part) for part in given if isinstance(part, Path | str) and is_file(Path(part))]
    verb, trace = click.get_current_context().command_path.split()[1], values.get("trace")
    hints = (reader_of(file, "--trace" if str(file) == trace else verb) for file in files if file.name in error.message)
    return next(filter(None, hints), None)


@cache
def options_in(group: str) -> tuple[click.Option, ...]:
    """Return the options of a group of `options.yaml`."""
    return tuple(
        _option(text.split(), section, settings)
        for section, declarations in declared("options")[group].items()
        for text, settings in declarations.items()
    )


def _option(names: list[str], section: str, given: str | Mapping[str, Any]) -> click.Option:
    """Return an option from its flags, the name of its value where it is another, and its help or its settings."""
    settings: dict[str, Any] = {"help": given} if isinstance(given, str) else dict(given)
    kind, choices = settings.pop("type", "text"), settings.pop("choices", None)
    if kind == "flag":
        settings["is_flag"] = True
    else:
        settings["type"] = click.Choice(choices, case_sensitive=False) if choices else TYPES[kind]
        settings.setdefault("metavar", METAVARS.get(kind, "NAME"))
    flags = [name for name in names if name.startswith("-")]
    field = next((name for name in names if not name.startswith("-")), None)
    # As click does: of an option and its opposite, the first names the field.
    field = field or flags[0].partition("/")[0].strip("-").replace("-", "_")
    return SectionedOption([field, *flags], section=section, **settings)


def _show_version(ctx: click.Context, _param: click.Parameter, is_set: bool) -> None:
    if is_set:
        from windtunnel.report.render.json import version

        click.echo(f"windtunnel {version()}")
        ctx.exit()


@click.pass_context
def _show_help(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


windtunnel = Verbs(
    "windtunnel",
    callback=_show_help,
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_version,
            help="Show the version.",
        )
    ],
    help="Predict how an LLM deployment performs before anyone rents the GPUs.",
    epilog="Start with: windtunnel simulate --model llama-3.1-8b --device h100_sxm --input-tokens 1024 "
    "--output-tokens 256 --concurrency 32",
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
