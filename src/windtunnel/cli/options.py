"""The scenario that the options of a command line describe, and the values of single options."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from windtunnel import catalog
from windtunnel.cli.naming import PATHS_OF_OPTIONS
from windtunnel.cli.output import remark, remark_left_out, remark_node
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.formats.launch.read import read_launch_command, servers
from windtunnel.schema import dotted, parse_yaml
from windtunnel.search.space.space import SHORT_PATHS
from windtunnel.serving.deployment import Deployment, EngineSettings
from windtunnel.serving.engines.command_line import DEPLOYMENT, ENGINE, NO_COMMAND, Reading
from windtunnel.serving.engines.defaults import newer_than_known
from windtunnel.serving.other_names import other_names
from windtunnel.serving.scenario import DEVICE_HINT, Scenario, pool_scenario, read_raw, scenario_from
from windtunnel.serving.shorthand import lay_over, raw_scenario
from windtunnel.units import parse_quantity

SCENARIO = ("deployment", "load", "requests", "sampling", "general", "hub")
"""Groups of options that describe a scenario."""
OF_LOAD = ("input_tokens", "output_tokens", "num_requests")
"""Fields of a workload that are options too."""


def scenario_of(options: Options, slo: str | None = None, base: dict[str, Any] | None = None) -> Scenario:
    """Return the scenario of a command line: the file's, if there is one, with every option that was given over it.
    InputError names the option or the path in the scenario that is wrong.

    Args:
        options: of the groups `SCENARIO`, as far as the command has them; its argument `scenario` is the file.
        base: the deployment of a server's command line, which goes over the file and below the options.
    """
    file = options.scenario
    given = options.given(*SCENARIO)
    if "," in str(given.get("device", "")):
        names = str(given["device"])
        compare = (
            f"to compare them: windtunnel whatif ... --vary device={names}, or windtunnel recommend --devices {names}"
        )
        raise InputError(f"--device is one device, and {names} are several", compare)
    try:
        raw = read_raw(file) if file is not None else {}
        lay_over(raw, base or {})
        if "estimator" in given and not (given.get("profile") or dotted(raw).get("deployment.profile.folder")):
            raise InputError("--estimator says how a profile is read, and --profile is missing")
        raw = with_load(raw, given, slo)
        if file is None:
            _require_enough(raw)
        # A trace named in the file lies beside it; one named on the command line, where the command runs.
        folder = file.parent if file is not None and "trace" not in given else None
        scenario = scenario_from(raw, "" if file is None else str(file), folder)
    except InputError as error:
        with suppress(InputError):
            if file is not None and hasattr(options, "from_command") and read_launch_command(str(file)).raw:
                error.hint = f"it starts a server: --from-command {file}"
        hint = f"--device h100_sxm, or in the file {error.hint}" if error.hint == DEVICE_HINT else error.hint
        raise InputError(_as_typed(error.message, set(given)), hint) from None
    with suppress(InputError):  # a model that cannot be read is refused where the scenario is resolved
        _remark_assumed(scenario)
        _remark_start(scenario, options)
    return scenario


def _remark_assumed(scenario: Scenario) -> None:
    model = catalog.model(scenario.model)
    remark_left_out(model, scenario.workload.has_media)
    for pool in scenario.deployment.groups:
        deployment = pool_scenario(scenario, pool).deployment
        if sentence := newer_than_known(deployment.engine):
            remark(f"note: {sentence}")
        drafts = deployment.engine.speculative
        if drafts and drafts.method == "mtp" and model.prediction_layers is None:
            remark(f"note: nothing says whether {model.name} has a prediction layer; one like its last is assumed")
        if deployment.parallelism.num_devices > 1:
            remark_node(catalog.device(deployment.device), deployment.node)


def _remark_start(scenario: Scenario, options: Options) -> None:
    """Note why a server that was read would not start."""
    if (launch := getattr(options, "launch", NO_COMMAND)) is NO_COMMAND:
        return
    from windtunnel.formats.launch.scripts import start_remark

    if sentence := start_remark(scenario, launch):
        launch.not_starting.append(sentence)
        if getattr(options, "json", False):
            remark(f"note: {sentence}")


def launched(options: Options) -> Reading:
    """Return the server that `--from-command` describes, empty without one.

    The answer names the settings that are not predicted; beside JSON, so does stderr.
    """
    accepted = getattr(options, "acceptance_fraction", None)
    if accepted is not None and options.from_command is None:
        raise InputError(
            "--acceptance-fraction belongs to a server that --from-command describes",
            "in a scenario it is deployment.engine.speculative.acceptance_fraction",
        )
    launch = Reading() if options.from_command is None else read_launch_command(options.from_command, accepted)
    for line in launch.remarks if getattr(options, "json", False) else ():
        remark(line)
    options.launch = launch
    return launch


def with_read_load(options: Options, launch: Reading, is_sized: bool = False) -> dict[str, Any]:
    """Return the server that was read, with the load of the client beside it where neither a scenario nor options give
    another; the answer says what is taken.

    Args:
        is_sized: whether the greatest load is looked for, with requests as it needs them.
    """
    load, raw = launch.load, dict(launch.raw)
    values = {name: getattr(options, name, None) for name in (*OF_LOAD, "trace", "rate", "concurrency", "space")}
    file = getattr(options, "scenario", None) or values["space"]
    if load is None or values["trace"] or (file and {"workload", "workloads"} & read_raw(file).keys()):
        return raw
    if is_sized and load.concurrencies:
        load = replace(load, rate_per_s=None)  # the most clients are looked for, and each sends as it can
    workload = load.workload(values["concurrency"])
    given = {name for name in OF_LOAD if values[name] is not None}
    given |= {text.partition("=")[0].split(".")[1] for text in options.settings if text.startswith("workload.")}
    if values["rate"] is not None or values["concurrency"] is not None:
        given.add("arrivals")
        if values["concurrency"] is None and not load.num_requests:
            given.add("num_requests")
    if is_sized and hasattr(options, "num_requests"):  # a space's requests are its file's: no option says them
        given.add("num_requests")
    if is_sized and workload.get("arrivals") == {"type": "burst"}:
        given.add("arrivals")
    taken = {name: value for name, value in workload.items() if name not in given}
    if raw.get("workload", {}).get("task", "generate") != "generate":
        taken.pop("output_tokens", None)
    raw["workload"] = raw.get("workload", {}) | taken
    sentences = [load.sentence(workload, taken, is_sized), *load.left_out]
    launch.load_taken = [sentence for sentence in sentences if sentence]
    for line in launch.load_taken if options.json or None in load.lengths else ():
        remark(line)
    return raw


def with_load(raw: dict[str, Any], given: Mapping[str, Any], slo: str | None) -> dict[str, Any]:
    """Lay `given` options over a raw scenario: fields by their short names, lengths, load, limits and `--set`."""
    apart = ("rate", "concurrency", "trace", "settings", "hub")
    typed = assignments(given.get("settings") or ())
    values = {SHORT_PATHS.get(name := setting_name(path), name): value for path, value in typed.items()}
    fields = {name: value for name, value in given.items() if name not in apart and value is not None}
    rate, concurrency, trace, _, hub = (given.get(name) for name in apart)
    return raw_scenario(raw, fields, rate, concurrency, trace, slo, values, allow_download=bool(hub))


def setting_name(typed: str) -> str:
    """Return the short name or path of a setting that is `typed` as options of windtunnel or of a server are.

    `max-num-seqs` and `tensor-parallel-size` are short names; `engine.block_size`, `block-size` and SGLang's
    `page-size` are `deployment.engine.block_size`. Anything else stays as it is.
    """
    dashed = typed.replace("_", "-")
    for name in (dashed.replace("-", "_"), other_names().get(dashed, "").replace("-", "_")):
        if name in SHORT_PATHS:
            return name
    option = dashed.removeprefix(DEPLOYMENT).removeprefix("engine.")
    key = option.replace("-", "_")
    if key in EngineSettings.__struct_fields__:
        return f"{ENGINE}{key}"
    flags = [flag for server in servers().values() if (flag := server.flag(server.other_names.get(option, option)))]
    paths = {flag.path for flag in flags if flag.path and flag.value is None and flag.known_words is None}
    if len(paths) == 1:
        return paths.pop()
    is_deployments = "." in typed and typed.partition(".")[0] in Deployment.__struct_fields__
    return f"{DEPLOYMENT}{typed.replace('-', '_')}" if is_deployments else typed


def assignments(texts: tuple[str, ...]) -> dict[str, Any]:
    """Parse `("a.b=1", ...)` as {"a.b": 1, ...}; InputError for a text without `=`, or a value that is not YAML."""
    values = {}
    for text in texts:
        path, separator, value = text.partition("=")
        if not separator or not path:
            raise InputError(
                f"--set: {text!r} is not of the form path=value", "for instance --set workload.num_requests=500"
            )
        import yaml

        try:
            values[path.strip()] = parse_yaml(value)
        except yaml.YAMLError:
            raise InputError(f"--set: the value of {text!r} is not valid YAML") from None
    return values


def quantity(option: str, name: str, text: str) -> float:
    """Parse an option's value in the unit of the field `name`; InputError names the option where it is no quantity."""
    try:
        return parse_quantity(name, text)
    except InputError as error:
        raise InputError(error.message.replace(name, option), error.hint) from None


def _require_enough(raw: Mapping[str, Any]) -> None:
    """Raise InputError for the first option that a command line without a scenario file lacks.

    Tables of a wrong type are left to the decoder, which refuses them.
    """
    deployment, workload = raw.get("deployment", {}), raw.get("workload", {})
    if not (isinstance(deployment, dict) and isinstance(workload, dict)):
        return
    has_whole = any(workload.get(name) for name in ("trace", "clients", "tenants", "total_tokens"))
    pools = workload.get("task", "generate") != "generate"
    needed = [
        ("--model", "model" in raw, "list them with `windtunnel catalog models`"),
        ("--device", "device" in deployment, "list them with `windtunnel catalog devices`"),
        ("--rate, --concurrency or --trace", has_whole or "arrivals" in workload, "for instance --concurrency 16"),
        ("--input-tokens", has_whole or "input_tokens" in workload, "for instance --input-tokens 1024"),
        (
            "--output-tokens",
            has_whole or "output_tokens" in workload or pools,
            "for instance --output-tokens 256; or --task embed for vectors of prompts",
        ),
    ]
    for name, is_given, hint in needed:
        if not is_given:
            catalog.check_makes_text(str(raw.get("model", "")))
            raise InputError(f"{name} is missing", hint)


def _as_typed(message: str, typed: set[str]) -> str:
    """Replace paths in the scenario by the options that set them."""
    for name in typed & PATHS_OF_OPTIONS.keys():
        option, (place, _, field) = f"--{name.replace('_', '-')}", PATHS_OF_OPTIONS[name].rpartition(".")
        message = message.replace(f"$.{PATHS_OF_OPTIONS[name]}", option)
        if message.startswith(f"{field} ") and message.endswith(f" at $.{place}"):
            message = f"{option}{message.removeprefix(field).removesuffix(f' at $.{place}')}"
    return message
