"""The options that verbs share, and how they become a scenario."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from windtunnel.errors import InputError, did_you_mean

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
"""Names of `vllm serve` and `vllm bench serve` -> ours."""

LIMITS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}
"""Name in `--slo` -> field."""


class WrittenFile(click.Path):
    """A file that a verb writes, refused before any work where it cannot be written."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from windtunnel.files import check_writable

        found = super().convert(value, param, ctx)
        check_writable(Path(str(found)))
        return found


WRITTEN_FILE = WrittenFile(path_type=Path)


class SectionedOption(click.Option):
    """An option with the heading that `--help` shows it under."""

    def __init__(self, *names: Any, section: str, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.section = section


class Verb(click.Command):
    """A command with its options under headings, and vLLM's names for them understood."""

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
    """A verb of several commands, whose unknown ones are answered as those of `windtunnel` are."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not args[0].startswith("-"):
            hint = did_you_mean(args[0], self.commands, f"it has {', '.join(self.commands)}")
            raise InputError(f"windtunnel {ctx.info_name} has no command {args[0]!r}", hint)
        return super().resolve_command(ctx, args)


def _our_name(name: str) -> str:
    name = name.replace("_", "-")
    return OTHER_NAMES.get(name, name)


def option(*names: str, section: str, **settings: Any) -> Callable[[Decorated], Decorated]:
    """`click.option` under a heading."""
    return click.option(*names, cls=SectionedOption, section=section, **settings)


def all_of(*options: Callable[[Decorated], Decorated]) -> Callable[[Decorated], Decorated]:
    """Several options as one decorator, in the order in which `--help` shows them."""

    def decorate(function: Decorated) -> Decorated:
        for one in reversed(options):
            function = one(function)
        return function

    return decorate


scenario_file = click.argument("scenario", required=False, type=click.Path(path_type=Path), metavar="[SCENARIO.yaml]")

_WHAT, _ENGINE = "What is served, on what", "Engine"

deployment_options = all_of(
    option("--model", section=_WHAT, metavar="NAME", help="A model of the catalog, or a config.json."),
    option("--device", section=_WHAT, metavar="NAME", help="A device of the catalog, or a YAML file."),
    option(
        "--node", section=_WHAT, metavar="NAME", help="A node of the catalog, or a YAML file.  [the device's usual one]"
    ),
    option("--tp", "-tp", section=_WHAT, type=int, metavar="N", help="Tensor parallelism.  [1]"),
    option("--pp", "-pp", section=_WHAT, type=int, metavar="N", help="Pipeline parallelism.  [1]"),
    option("--ep", section=_WHAT, type=int, metavar="N", help="Expert parallelism.  [1]"),
    option("--attention-dp", section=_WHAT, type=int, metavar="N", help="Copies of attention that share experts.  [1]"),
    option(
        "--quant", section=_WHAT, metavar="FORMAT", help="Format of the weights: bf16, fp8, int4, ...  [as published]"
    ),
    option(
        "--kv-cache-dtype", section=_WHAT, metavar="FORMAT", help="Format of the KV cache: bf16, fp8.  [as published]"
    ),
    option(
        "--profile", section=_WHAT, metavar="FOLDER", help="Operators that `windtunnel profile` measured on the device."
    ),
    option(
        "--estimator",
        section=_WHAT,
        metavar="NAME",
        help="Of a profile: interpolation, auto, forest, ... (`windtunnel profile check`).  [interpolation]",
    ),
    option("--engine", section=_ENGINE, metavar="NAME", help="vllm, sglang or trtllm.  [vllm]"),
    option("--engine-version", section=_ENGINE, metavar="VERSION", help="Its version.  [the newest that was measured]"),
    option(
        "--scheduler",
        section=_ENGINE,
        metavar="NAME",
        help="vllm_v0, sarathi, orca, faster_transformer, lightllm, or your own: module:function.  [the engine's]",
    ),
    option("--max-num-seqs", section=_ENGINE, type=int, metavar="N", help="Most running requests.  [the engine's]"),
    option(
        "--max-num-batched-tokens",
        section=_ENGINE,
        type=int,
        metavar="N",
        help="Token budget of a step.  [the engine's]",
    ),
    option(
        "--gpu-memory-utilization",
        section=_ENGINE,
        type=float,
        metavar="X",
        help="Share of memory to use.  [the engine's]",
    ),
    option(
        "--calibration",
        section=_ENGINE,
        metavar="NAME",
        help="A calibration of the catalog, its file, or none.  [the shipped one, of versions that were measured]",
    ),
)

general_options = all_of(
    option(
        "--set",
        "settings",
        section="General",
        multiple=True,
        metavar="PATH=VALUE",
        help="Set any field of the scenario, as workload.arrivals.rate_per_s=6.5. May be repeated.",
    ),
    option("--hub", section="General", is_flag=True, help="Look unknown models up on huggingface.co."),
    option("--json", "as_json", section="General", is_flag=True, help="Print JSON."),
)


def scenario_of(
    file: Path | None,
    *,
    settings: tuple[str, ...] = (),
    hub: bool = False,
    rate: float | None = None,
    concurrency: int | None = None,
    trace: str | None = None,
    slo: str | None = None,
    base: dict[str, Any] | None = None,
    **options: Any,
) -> "Scenario":
    """The scenario of a command line: the file's, if there is one, with every option that was given over it.

    `base`, the deployment of a server's command line, goes over the file and below the options.

    Raises:
        InputError: names the option or the path in the scenario that is wrong.
    """
    from windtunnel.schema import read_table
    from windtunnel.serving.scenario import SCENARIO_HINT, scenario_from
    from windtunnel.serving.shorthand import lay_over, parse_lengths, raw_scenario

    raw = read_table(file, "a scenario", SCENARIO_HINT) if file is not None else {}
    lay_over(raw, base or {})
    given = {name: value for name, value in options.items() if value is not None}
    if "estimator" in given and not (given.get("profile") or _value_at(raw, "deployment", "profile", "folder")):
        raise InputError("--estimator says how a profile is read, and --profile is missing")
    for stream in ("input_tokens", "output_tokens"):
        if stream in given:
            given[stream] = parse_lengths(f"--{stream.replace('_', '-')}", given[stream])
    try:
        raw = raw_scenario(raw, given, rate, concurrency, trace, limits(slo), assignments(settings), allow_download=hub)
        if file is None:
            _require_enough(raw)
        # A trace named in the file lies beside it; one named on the command line, where the command runs.
        folder = file.parent if file is not None and trace is None else None
        return scenario_from(raw, "" if file is None else str(file), folder)
    except InputError as error:
        typed = {*given, *(["rate"] if rate is not None else []), *(["concurrency"] if concurrency is not None else [])}
        raise InputError(_as_typed(error.message, typed, slo), error.hint) from None


def _value_at(raw: Any, *path: str) -> Any:
    for name in path:
        raw = raw.get(name) if isinstance(raw, dict) else None
    return raw


def assignments(texts: tuple[str, ...]) -> dict[str, Any]:
    """`("a.b=1", ...)` as {"a.b": 1, ...}; values are YAML.

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


def limits(text: str | None) -> dict[str, Any]:
    """`ttft=2s,tpot=50ms` as fields of an SLO.

    Raises:
        InputError: another form, or a limit that does not exist.
    """
    found = {}
    for part in text.replace(":", "=").replace(",", " ").split() if text else []:
        name, separator, value = part.partition("=")
        if not separator or not value:
            raise InputError(f"--slo: {part!r} is not of the form name=time", "for instance --slo ttft=2s,tpot=50ms")
        if name not in LIMITS:
            raise InputError(
                f"--slo: there is no limit {name!r}", did_you_mean(name, LIMITS, f"known: {', '.join(LIMITS)}")
            )
        found[LIMITS[name]] = value
    return found


def _require_enough(raw: Mapping[str, Any]) -> None:
    """Raise for the first thing that a command line without a scenario file cannot do without.

    Tables that are none are left to the decoder, which says so.
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
    """`message` with paths in the scenario replaced by the options that set them."""
    from windtunnel.serving.shorthand import PATHS

    paths = {
        **PATHS,
        "rate": "workload.arrivals.rate_per_s",
        "concurrency": "workload.arrivals.concurrency",
    }
    names = {f"$.{paths[name]}": f"--{name.replace('_', '-')}" for name in typed if name in paths}
    if slo is not None:
        names |= {f"$.slo.{field}": f"--slo {name}" for name, field in LIMITS.items()}
    for path, name in names.items():
        message = message.replace(path, name)
    return message
