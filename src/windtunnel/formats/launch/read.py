"""Read server command lines as deployments.

Every option is one of four: it decides a field of the deployment; it has no effect on time (addresses, names, logs); it
has one that is not modelled; or it is unknown. All four are reported.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replace_field

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.files import is_file, is_folder, read_text
from windtunnel.formats.launch import shell
from windtunnel.formats.launch.autoscalers import scaling_remark
from windtunnel.formats.launch.containers import VISIBLE_DEVICES, Command, commands_of, parsed, table
from windtunnel.formats.launch.loads import client_load, recipe_load
from windtunnel.formats.launch.recipes import read_recipe, recipe_commands
from windtunnel.formats.launch.roles import PROXY, as_pools, roles_of, says_role, servers_of
from windtunnel.model.parallelism import Parallelism
from windtunnel.schema import Schema, dotted, read_yaml, set_path
from windtunnel.serving.engines.command_line import DRAFTS, PLAIN, SERVER, SPLIT, Options, Reading, Unmodelled, shares
from windtunnel.serving.engines.contract import engine_of
from windtunnel.units import format_count


class OtherOptions(Schema):
    """Options that decide no setting, by kind (`catalog/launch_options.yaml`)."""

    sources: dict[str, str]
    without_effect: frozenset[str]
    not_modelled: frozenset[str]
    effects: dict[str, str]
    """Option that is not modelled -> what it would do."""
    switches: frozenset[str]
    several: frozenset[str]
    environment: tuple[str, ...]
    """Patterns of variables that change times in a way that is not modelled, but for those without effect: a name, or
    `NAME=value`."""
    environment_without_effect: tuple[str, ...]

    def changes_times(self, name: str, value: str) -> bool:
        """Whether a variable of the environment may change times."""
        silent = self.environment_without_effect
        is_silent = any(fnmatchcase(name, each) or each == f"{name}={value}" for each in silent)
        return not is_silent and any(fnmatchcase(name, each) for each in self.environment)


class DynamoImages(Schema):
    """`dynamo_images.yaml`."""

    images: dict[str, tuple[str, ...]]
    releases: dict[str, dict[str, str]]

    def version(self, engine: str, repository: str, tag: str) -> str | None:
        """Return the version of an engine in an image of NVIDIA Dynamo; None for others and for unknown releases."""
        is_own = repository.rpartition("/")[2] in self.images.get(engine, ())
        return self.releases.get(tag, {}).get(engine) if is_own else None


@cache
def dynamo_images() -> DynamoImages:
    """Return the engines in the images of NVIDIA Dynamo."""
    return catalog.entry(catalog.shipped("dynamo_images.yaml"), DynamoImages)


@cache
def other_options() -> OtherOptions:
    """Return the options that are reported and not taken."""
    return catalog.entry(catalog.shipped("launch_options.yaml"), OtherOptions)


def read_launch_command(text: str, acceptance_fraction: float | str | None = None) -> Reading:
    """Read how a server is started as a deployment. InputError for no such command or several, no model, or a value
    that its option does not take.

    Args:
        text: `vllm serve ...`, `python -m vllm.entrypoints.openai.api_server ...`, `python -m sglang.launch_server ...`
            or `trtllm-serve ...`, alone, in a script or behind `docker run ...`; a Kubernetes manifest, Helm values or
            a compose file; or the path of a file with one of these, of a recipe of srt-slurm, or of a Helm chart's
            folder.
        acceptance_fraction: share of draft tokens that are right, of speculative decoding, which no command says: one
            for all, or one for each position as `0.8,0.6`.
    """
    file, variant = _file(text)
    commands, recipe = _commands_in(text, file, variant)
    found, roles = _servers_in(commands, text, file)
    readings = [_read(*server, acceptance_fraction) for server in found]
    drafts = (name.startswith(DRAFTS) for each in readings for name in (*each.taken, *each.not_modelled))
    if any("acceptance_fraction" in each.later for each in readings) and not any(drafts):
        raise InputError(
            "--acceptance-fraction is how often draft tokens are right, and the server makes none",
            "leave it out, or add the options of speculative decoding to the command",
        )
    reading = readings[0] if roles is None else as_pools(readings, roles)
    reading.load = recipe_load(table(recipe.get("benchmark"))) if recipe else client_load(commands)
    if file is not None and file != Path(text) and not variant:
        reading.container.append(f"read {file}; the templates of the chart are not rendered")
    return reading


def _commands_in(text: str, file: Path | None, variant: str) -> tuple[list[Command], dict[str, Any]]:
    """Return the commands of a text, or of its `file`, and the recipe that they come from, or nothing."""
    content = text if file is None else read_text(file)
    is_yaml = file is not None and file.suffix in (".yaml", ".yml")
    recipe = read_recipe(content, variant, str(file)) if is_yaml else {}
    if variant and not recipe:
        raise InputError(f"--from-command: {file} is no recipe with variants", f"leave :{variant} out")
    return recipe_commands(recipe) or commands_of(content, is_yaml), recipe


def name_options(error: InputError, text: str) -> None:
    """Put, behind each setting that an error names, the options of the command in `text` that decide it."""
    with suppress(InputError):
        file, variant = _file(text)
        commands, _ = _commands_in(text, file, variant)
        for engine, server, command in _servers_in(commands, text, file)[0]:
            options = _options_of_settings(engine, server, command)

            def named(match: re.Match[str], options: Mapping[str, str] = options) -> str:
                return f"{match[0]} ({option})" if (option := options.get(match[1])) else match[0]

            pattern = r"(?<![\w.])(?:\$\.)?(?:deployment\.)?((?:engine|parallelism|precision)\.\w+(?:\.\w+)*)(?! \()"
            error.message = re.sub(pattern, named, error.message)
            error.hint = error.hint and re.sub(pattern, named, error.hint)
            off = r"\bset [\w.]+ \((--(?:no|disable)-[\w-]+)\)"  # the option that turned off what the hint asks for
            error.hint = error.hint and re.sub(off, r"leave \1 out", error.hint)
            for path, option in options.items():
                name = re.escape(path.rpartition(".")[2])
                bare = rf"(?<![\w.$'(-])(?<!x ){name}( =(?= \d)|(?= is \d|, which))"
                error.hint = error.hint and re.sub(rf"(?<=er ){name}\b", option, error.hint)
                if (message := re.sub(bare, option, error.message)) != error.message:
                    error.message = re.sub(r" at \$\.deployment\.\w+$", "", message)


def _options_of_settings(engine: str, server: Options, command: Command) -> dict[str, str]:
    """Return path of a setting below `deployment`, or of a format -> the option that sets it, or the options of this
    command without which an engine's setting is read as another value."""
    flags = {name: flag for name in server.flags if (flag := server.flag(name)) is not None}
    found = {f"deployment.{path}": name for path, name in server.decides.items()}
    found |= {flag.path: name for name, flag in reversed(flags.items()) if flag.path}
    write_split, several = engine_of(engine).command_line.write_split, Parallelism(tp=2)
    for degree in ("tp", "pp", "ep", "attention_dp", "dcp"):
        split = write_split(Parallelism() if degree == "tp" else several)
        wider = write_split(replace_field(several, **{degree: 2}))
        with suppress(InputError):  # a server without the option
            found |= {f"{SPLIT}{degree}": server.option(sets) for sets, to in wider.items() if split.get(sets) != to}
    names = {path.removeprefix("deployment."): spelt(server, name) for path, name in found.items()}
    present, deciding = dotted(_read(engine, server, command, None).raw), dict[str, list[str]]()
    for name in dict.fromkeys(name for name, _ in _options_of(server, command)):
        with suppress(InputError):
            without = dotted(_read(engine, server, command, None, leaves_out=name).raw)
            for path in present.keys() | without.keys():
                if present.get(path) != without.get(path) and not path.startswith(SPLIT):
                    deciding.setdefault(path.removeprefix("deployment."), []).append(spelt(server, name))
    return names | {path: ", ".join(options) for path, options in deciding.items()}


def spelt(server: Options, name: str) -> str:
    """Return an option as its server spells it: in its YAML file where it stands there only."""
    if name in server.in_file_only:
        return next((path for path, to in server.other_names.items() if to == name), name).replace("-", "_")
    option, dot, key = name.partition(".")
    return f"--{option.replace('-', '_') if server.spelt_with_underscores else option}{dot}{key.replace('-', '_')}"


def _read(
    engine: str,
    server: Options,
    command: Command,
    acceptance_fraction: float | str | None,
    leaves_out: str | None = None,
) -> Reading:
    """Read the words of one server, but for the option that it `leaves_out`."""
    reading = Reading()
    for variable, option in server.environment.items():
        if (value := command.environment.get(variable)) is not None and not shell.referenced([value]):
            _take(reading, server, option, value)
    options = [pair for pair in _options_of(server, command) if pair[0] != leaves_out]
    _check_set(server, options)
    for name, value in options:
        _take(reading, server, name, value)
    if "model" not in reading.raw:
        raise InputError(
            "--from-command: the command names no model", f"as in {' '.join(server.command)} Qwen/Qwen3-8B"
        )
    _name_model(reading, next((str(value) for name, value in options if name == "served-model-name"), ""))
    if acceptance_fraction is not None:
        try:
            reading.later["acceptance_fraction"] = shares(acceptance_fraction)
        except ValueError as error:
            raise InputError(f"--acceptance-fraction is {acceptance_fraction}; {error}") from None
    reading.set_engine(name=engine)
    engine_of(engine).command_line.read(reading)
    _keep_published_weights(reading)
    given = {name: int(value) for name, value in options if str(value).isdecimal()}
    ranks = max(given.get("data-parallel-size", 1), 1)
    nodes = max(given.get("nnodes", 1), ranks // (given.get("data-parallel-size-local") or ranks))
    if nodes > 1 and "LWS_GROUP_SIZE" not in command.environment:  # a group is all of its nodes
        reading.container += [f"{command.replicas} replicas are nodes: {nodes} make a server"] * (command.replicas > 1)
        gpus = command.gpus and command.gpus * nodes
        command = replace(command, gpus=gpus, replicas=max(command.replicas // nodes, 1))
    _note_container(reading, engine, server, command)
    if leaves_out is None:
        reading.others = {SERVER: _unmodelled(reading, engine, server, command)}
    return reading


def _check_set(server: Options, options: Sequence[tuple[str, Any]]) -> None:
    """Raise InputError where the model or a number is a variable that the text does not set."""
    flags = ((server.flag(name), name == server.model_option, str(value)) for name, value in options)
    values = [value for flag, is_model, value in flags if flag and (is_model or flag.type in ("whole", "number"))]
    unset = dict.fromkeys(name for value in values for name in re.findall(r"^\$[{(]?([A-Za-z_]\w*)[})]?$", value))
    if unset:
        names = ", ".join(f"${name}" for name in unset)
        hint = f"write before the command: {' '.join(f'{name}=...' for name in unset)}"
        raise InputError(f"--from-command: the text does not set {names}", hint)


SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(?:API|ACCESS|AUTH)_?KEY")
"""What the names of variables have whose values no file should hold."""


def _variables(server: Options, command: Command) -> dict[str, str]:
    """Return the variables of a server's environment that decide no setting."""
    apart = command.of_shell | server.environment.keys()
    return {name: value for name, value in command.environment.items() if name not in apart}


def _unmodelled(reading: Reading, engine: str, server: Options, command: Command) -> Unmodelled:
    """Return what a command has beside its settings; values of secrets, and what only Dynamo's workers read, are left
    out and named.
    """
    variables = {name: value for name, value in _variables(server, command).items() if name not in OF_GROUP}
    own = {name: not value or name in shell.referenced([value]) for name, value in variables.items()}
    kept = {name: value for name, value in variables.items() if not own[name] and not SECRET.search(name)}
    words = tuple(_other_words(reading, engine, server, command))
    of_dynamo = dict.fromkeys(name for name, _ in _typed_options(server, command) if _is_dynamos(server, name))
    reasons = {
        "set in the environment, as before": list(
            dict.fromkeys(name for name in (*variables, *shell.referenced(words)) if name not in kept)
        ),
        "left out, of Dynamo's workers only": [spelt(server, name) for name in of_dynamo],
    }
    return Unmodelled(
        words=words,
        file=_other_keys(reading, engine, server, command),
        variables=kept,
        image=command.image,
        left_out=tuple(f"{reason}: {', '.join(names)}" for reason, names in reasons.items() if names),
    )


def _other_keys(reading: Reading, engine: str, server: Options, command: Command) -> dict[str, Any]:
    """Return the keys of the server's YAML file that decide no setting, for an engine that reads some there only."""
    keys: dict[str, Any] = {}
    if engine_of(engine).command_line.write_file is PLAIN.write_file:
        return keys
    for name, value in _typed_options(server, command):
        content = _content(command.files, value) if name in server.config_options else {}
        for path, each in dotted(content).items():
            part = _name(server, path)
            flag = server.flag(part)
            is_taken = f"--{part}" in reading.taken and not _decides_nothing(reading, engine, server, command, part)
            if not is_taken and part != server.model_option and not (flag and flag.path.startswith("precision.")):
                set_path(keys, path, each)
    return keys


def _other_words(reading: Reading, engine: str, server: Options, command: Command) -> Iterator[str]:
    """Yield the words of the options that decide no setting, as the server spells them on a command line.

    Those of a YAML file are among them, but for an engine that reads some from its file only.
    """
    has_file = engine_of(engine).command_line.write_file is not PLAIN.write_file
    for name, value in _typed_options(server, command):
        is_file = name in server.config_options
        for part, each in [] if is_file and has_file else _in_parts(server, command.files, name, value):
            flag = server.flag(part)
            is_format = flag is not None and flag.path.startswith("precision.")  # of one checkpoint
            if part == server.model_option or _is_dynamos(server, part) or is_format:
                continue
            if f"--{part}" not in reading.taken or _decides_nothing(reading, engine, server, command, part):
                option = spelt(server, part)
                yield option[1:] if len(part) == 1 or part[0].isupper() else option
                yield from () if each is True else str(each).split() if part in other_options().several else [str(each)]


def _is_dynamos(server: Options, name: str) -> bool:
    """Whether Dynamo's workers have an option, and not the engine's server."""
    known = r"dyn-.*|is-(prefill|decode)-worker|connector.*|request-plane|publish-events-and-metrics|kv-block-size"
    return re.fullmatch(known, name) is not None or (name == "disaggregation-mode" and name not in str(server.roles))


def _decides_nothing(reading: Reading, engine: str, server: Options, command: Command, name: str) -> bool:
    """Whether a command is read the same without an option."""
    with suppress(InputError):
        return _read(engine, server, command, None, leaves_out=name).raw == reading.raw
    return False


def _keep_published_weights(reading: Reading) -> None:
    """Leave the weights as published where an option names their format, or that of the experts: it quantises none."""
    precision = reading.raw.get("precision", {})
    with suppress(InputError):  # an unknown model is an error once it is looked up
        published = reading.model.precision if "weights" in precision else None
        if published and precision["weights"] in (str(published.weights), str(published.experts)):
            del precision["weights"]
    if not precision:
        reading.raw.pop("precision", None)


def _name_model(reading: Reading, served: str) -> None:
    """Take a path of another machine for the model that it says, by its last part or as a folder of Hugging Face's
    cache, or for the one that the server says it serves, and say so."""
    path = str(reading.raw["model"])
    is_path = path.startswith(("/", "./", "~", "$")) or "://" in path
    if "/" not in path or is_file(Path(path)) or is_folder(Path(path)) or not is_path:
        return
    cached = re.search(r"models--([^/]+)", path)
    says = {
        "its path": cached[1].replace("--", "/") if cached else path.rstrip("/").rpartition("/")[2],
        "--served-model-name": served.split(maxsplit=1)[0] if served else "",
    }
    for source, name in says.items():
        with suppress(InputError):
            reading.raw["model"] = catalog.known_name("models", name)
            reading.container.append(f"{path} is not on this machine: {source} says {reading.raw['model']}")
            return


def _note_container(reading: Reading, engine: str, server: Options, command: Command) -> None:
    """Take the version and the replicas of the server's container; note GPUs and variables that are not taken."""
    repository, tag, known = *_parted(command.image), server.image.rpartition(":")[0]
    version = re.match(r"v?(\d+\.\d+\.\d+(?:\.?(?:post|rc|dev|a|b)\d+)?)", tag)
    if version and f"/{repository}".endswith(f"/{known}"):
        reading.set_engine(version=version[1])
    elif version and f"/{repository}".endswith(f"/{known.rpartition('/')[2]}") and OWN_RELEASES not in repository:
        reading.set_engine(version=version[1])
        reading.container.append(f"the image {command.image} is taken for {engine} {version[1]}, by its tag")
    elif of_dynamo := dynamo_images().version(engine, repository, tag):
        reading.set_engine(version=of_dynamo)
        reading.container.append(f"the image {command.image} has {engine} {of_dynamo}")
    elif command.assumed:
        assumed = f"{engine} is assumed, by its {command.assumed}; --engine-version gives its version"
        reading.container.append(f"the image {command.image} is not known: {assumed}")
    elif command.image:
        reading.container.append(f"the image {command.image} names no version of {engine}: --engine-version gives one")
    deployment = reading.raw["deployment"]
    copies, split = deployment.get("replicas", 1), deployment.get("parallelism", {})
    needed = copies * split.get("tp", 1) * split.get("pp", 1) * split.get("attention_dp", 1)
    if command.gpus is not None and command.gpus != needed:
        has = format_count(command.gpus, "GPU")
        reading.container.append(f"the container has {has}, and its command takes {needed}")
    if command.product:
        try:
            deployment["device"] = catalog.known_name("devices", command.product)
        except InputError:
            reading.container.append(f"the GPU {command.product} of nodeSelector is not known: --device gives one")
    if command.replicas != 1:
        deployment["replicas"] = copies * command.replicas
    reading.container += [scaling_remark(command)] * bool(command.scaling)
    reading.container += [f"not read, of unknown kinds: {', '.join(command.unread)}"] * bool(command.unread)
    if command.routing not in ("", "roundrobin"):
        reading.container.append(
            f"the router's logic {command.routing} is not taken: --set deployment.router=... gives one"
        )
    variables = _variables(server, command).items()
    changing = (name for name, value in variables if other_options().changes_times(name, value))
    reading.not_modelled += [f"{name} of the environment" for name in changing]


def _parted(image: str) -> tuple[str, str]:
    match = re.fullmatch(r"(.*?)(?::([^:/]*))?", image.partition("@")[0])
    return (match[1], match[2] or "") if match else (image, "")


def servers() -> dict[str, Options]:
    """Return the options of the engines whose commands are read and written, by name."""
    files = {name: catalog.engine_file(name, "command_line.yaml") for name in catalog.names("engines")}
    return {name: catalog.entry(file, Options) for name, file in files.items() if file is not None}


OF_GROUP = (*VISIBLE_DEVICES, "LWS_GROUP_SIZE")
"""Variables that follow from the number of devices, which a change may change."""
OWN_RELEASES = "lmcache/"
"""Owner of images of an engine whose tags are releases of something else."""
Started = tuple[str, Options, Command]
"""An engine, the options that it knows, and the words behind its program."""


def _file(text: str) -> tuple[Path | None, str]:
    """Return the file that a text names, or the values of the Helm chart whose folder it names, None for a command; and
    the variant of a recipe behind a colon. InputError where the folder holds no chart."""
    path, match = Path(text), re.fullmatch(r"(\S+\.ya?ml):(.+)", text)
    if match and is_file(Path(match[1])):
        return Path(match[1]), match[2]
    is_path = is_folder(path) or is_file(path) or re.fullmatch(r"\S+\.(ya?ml|json|sh)", text)
    if not text or "\n" in text or not is_path:
        return None, ""
    if not is_folder(path):
        return path, ""
    if not is_file(path / "Chart.yaml"):
        files = sorted(each.name for each in path.iterdir() if each.suffix in (".yaml", ".yml", ".sh"))
        hint = f"name one of its files: {', '.join(files[:6])}" if files else "name a file"
        raise InputError(f"--from-command: {text} is a folder without a Helm chart (Chart.yaml)", hint)
    return path / "values.yaml", ""


def _one_of_equal(found: Sequence[Started]) -> Started | None:
    """Return one server in place of several in containers with names of their own and the same settings, with their
    number as its replicas; None where they differ, or are said to be one side of a deployment."""
    commands = [command for _, _, command in found]
    names = {command.name for command in commands if command.image and not says_role(command)}
    if len(names) < len(commands):
        return None
    with suppress(InputError):
        raws = [_read(*server, None).raw for server in found]
        copies = [raw["deployment"].pop("replicas", 1) for raw in raws]
        if all(raw == raws[0] for raw in raws):
            engine, options, first = found[0]
            return engine, options, replace(first, replicas=first.replicas * sum(copies) // copies[0])
    return None


def _servers_in(commands: Sequence[Command], text: str, file: Path | None) -> tuple[list[Started], list[str] | None]:
    """Return the server that the commands of a text, or of its `file`, start, and no role; or several, some of which
    prefill for others that decode, with the role of each."""
    known = servers()
    started = [server for command in commands for server in _started(known, command)]
    found = [server for server in started if server[2].words[:1] != [PROXY]]
    found = [server for server in found if not _is_further_node(*server[1:])] or found
    if not found:
        found = [(engine, options, each) for engine, options, proxy in started for each in servers_of(proxy)]
    found = found or [server for command in commands for server in _assumed(known, command)]
    roles = roles_of([(command, server.port) for _, server, command in found], commands) if len(found) > 1 else None
    if roles is None and len(found) > 1 and (same := _one_of_equal(found)):
        found = [same]
    if len(found) == 1 or roles is not None:
        return found, roles
    if found:
        names = ", ".join(command.name or f"{engine} {' '.join(command.words)}"[:40] for engine, _, command in found)
        what = "the text" if file is None else str(file)
        hint = (
            "keep the one to predict; of servers that prefill and that decode, options or names must say which do what"
        )
        raise InputError(f"--from-command: {what} starts {len(found)} servers: {names}", hint)
    image = f"the image {commands[0].image}" if commands and commands[0].image else ""
    shown = image or repr(" ".join(commands[0].words[:4]) if commands else text[:60])
    shown = shown if file is None else str(file)
    if file is not None and file != Path(text):
        rendered = f"render it: helm template {shlex.quote(text)} > manifests.yaml; then --from-command manifests.yaml"
        raise InputError(f"--from-command: {shown} of the chart starts no server that is known", rendered)
    starts = [f"{' '.join(server.command)} MODEL ..." for server in known.values()]
    raise InputError(
        f"--from-command: {shown} starts no server that is known",
        f"{', '.join(starts)}, or a container of one: docker run, a Kubernetes manifest, Helm values, a compose file; "
        "a file of options goes behind --config",
    )


def _started(known: dict[str, Options], command: Command) -> Iterator[tuple[str, Options, Command]]:
    """Yield the engine that a command starts, with the words behind its program.

    Options alone, or a model's name, go to the program that the image of the container starts.
    """
    words = command.words
    if re.fullmatch(r"|-.*|[\w.-]+/[\w.-]+", words[0], re.DOTALL):
        words = [_parted(command.image)[0], *words]
    for i, word in enumerate(words):
        for engine, server in known.items():
            for start in server.starts:
                program, *subcommand = start.split()
                rest = words[i + 1 :]
                if fnmatchcase(word.rpartition("/")[2], program) and rest[: len(subcommand)] == subcommand:
                    yield engine, server, replace(command, words=rest[len(subcommand) :])
                    return


OTHER_SERVERS = re.compile(r"text-(generation|embeddings)-inference|lmdeploy|llama\.?cpp|ollama")
"""Images of servers that are not known, whatever names their options have."""


def _assumed(known: dict[str, Options], command: Command) -> Iterator[Started]:
    """Yield the engine that a container's image names, or the one that knows most of the options of its command.

    The command is options with the model among them, behind a script or no program.
    """
    image, words = _parted(command.image)[0].rpartition("/")[2], command.words
    words = words[1:] if re.fullmatch(r"/.*|.*\.sh", words[0]) else words
    has_server = words and re.fullmatch(r"-.*|[\w.-]+/[\w.-]+", words[0], re.DOTALL) and not OTHER_SERVERS.search(image)
    image = image if has_server else ""
    typed = [word.lstrip("-").partition("=")[0].replace("_", "-") for word in words if word.startswith("-")]
    scores = {}
    for engine, server in known.items() if image else ():
        names = [name for name, _ in _typed_options(server, replace(command, words=words))]
        if server.model_option in names:
            # Other names are often another engine's own.
            scores[engine] = tuple(len(server.flags.keys() & some) for some in (names, typed))
    named = [engine for engine in scores if engine in image.replace("tensorrt-llm", "trtllm")]
    likely = named or [engine for engine, score in scores.items() if score == max(scores.values())]
    if len(likely) == 1:
        yield likely[0], known[likely[0]], replace(command, words=words, assumed="name" if named else "options")


def _is_further_node(server: Options, command: Command) -> bool:
    """Whether a command starts another node than the first of a server on several."""
    options = dict(_typed_options(server, command))
    ranks = [str(options.get(name)) for name in ("node-rank", "data-parallel-rank", "data-parallel-start-rank")]
    return "headless" in options or any(rank.isdecimal() and int(rank) > 0 for rank in ranks)


def _options_of(server: Options, command: Command) -> list[tuple[str, Any]]:
    """Return (name, value) of every option, and of those in YAML files and in JSON."""
    typed = _typed_options(server, command)
    return [pair for name, value in typed for pair in _in_parts(server, command.files, name, value)]


def _typed_options(server: Options, command: Command) -> list[tuple[str, Any]]:
    """Return (name, value) of every option of a command; True for a switch. A word alone is the model."""
    options: list[tuple[str, Any]] = []
    words, position = command.words, 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("-"):
            named = next((value for name, value in options if name == server.model_option), word)
            if word and named != word:
                if shell.is_unset(word):
                    hint = "write it before the command, or leave it out"
                    raise InputError(f"--from-command: the text does not set {word}", hint)
                raise InputError(f"--from-command: the command names two models: {named} and {word}", "leave one out")
            options += [(server.model_option, word)] if word else []
            continue
        name, has_value, value = word.lstrip("-").partition("=")
        name = _name(server, name)
        if has_value:
            options.append((name, value))
            continue
        flag = server.flag(name)
        is_switch = flag.value is not None if flag else name in other_options().switches
        values: list[str] = []
        several = flag.type == "sizes" if flag else name in other_options().several
        while not is_switch and position < len(words) and not is_option(words[position]) and (several or not values):
            values.append(words[position])
            position += 1
        options.append((name, " ".join(values) if values else True))
    return options


def is_option(word: str) -> bool:
    """Whether a word is an option's name, and no negative number."""
    return word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)


def _name(server: Options, name: str) -> str:
    name = name.replace("_", "-")
    option, dot, key = name.partition(".")
    full = f"{server.other_names.get(option, option)}{dot}{key}"
    return server.other_names.get(name) or server.other_names.get(full, full)


def _in_parts(server: Options, files: Mapping[str, str], name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the option, or the options of the YAML file that it names, or of the JSON that it holds."""
    has_parts = any(each.startswith(f"{name}.") for each in server.flags) and str(value).lstrip().startswith("{")
    if name not in server.config_options and not has_parts:
        return [(name, value)]
    try:
        content = json.loads(value) if has_parts else _content(files, value)
    except json.JSONDecodeError as error:
        raise InputError(f"--from-command: --{name} is no JSON object: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{value} holds no options: keys and values are needed")
    parts = _flattened(server, content, f"{name}." if has_parts else "")
    if has_parts:
        return [(part, "true" if each is True else each) for part, each in parts]
    return [pair for part, each in parts for pair in _in_parts(server, {}, part, each)]


def _content(files: Mapping[str, str], path: Any) -> Any:
    """Return the content of a YAML file that an option names: of the text's own files, or of this machine."""
    text = files.get(Path(str(path)).name)
    return read_yaml(Path(str(path))) if text is None else parsed(str(path), text)


def _flattened(server: Options, content: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = []
    for key, value in content.items():
        name = _name(server, f"{prefix}{key}")
        if isinstance(value, dict):
            options += _flattened(server, value, f"{name}.")
        elif value is False or value is None:
            opposite = f"disable-{name.removeprefix('enable-')}" if value is False else ""
            options += [(negation, True) for negation in (f"no-{name}", opposite) if negation in server.flags]
        else:
            options.append((name, ",".join(map(str, value)) if isinstance(value, list) else value))
    return options


def _take(reading: Reading, server: Options, name: str, value: Any) -> None:
    """Take an option, or note why it is not; the value of a switch is True."""
    if not name:
        raise InputError("--from-command: dashes without a name", "was the command line cut?")
    if value == "":  # of a variable that is not set
        return
    option, _, key = name.partition(".")
    flag, of_json = server.flag(name), server.flag(option)
    spelling = name if name in server.environment else f"--{name}"
    if key and of_json is not None and of_json.type == "json":
        reading.later.setdefault(of_json.word, {})[key.replace("-", "_")] = value
    elif flag is None:
        known = other_options()
        lists = ((known.without_effect, reading.without_effect), (known.not_modelled, reading.not_modelled))
        dashes = "-" if len(option) == 1 or name[0].isupper() else "--"
        effect = f" ({known.effects[name]})" if name in known.effects else ""
        into = next((into for names, into in lists if {name, option} & names), reading.unknown)
        longer = [each for each in server.flags if len(name) > 2 and each.startswith(name)]
        if into is reading.unknown and (near := longer or get_close_matches(name, server.flags, 1, cutoff=0.9)):
            effect = f" (did you mean --{near[0]}?)"
        into.append(f"{dashes}{name}{effect}")
        return
    else:
        converted: Any = flag.value
        if converted is None:
            if value is True:
                raise InputError(f"--from-command: {spelling} has no value")
            try:
                converted = flag.read(str(value))
            except ValueError as error:
                if flag.is_lenient:
                    reading.not_modelled.append(f"--{name} {value}")
                    return
                raise InputError(
                    f"--from-command: {spelling} is {value}; {error}",
                    "correct the command line" + ", or leave it out if the server has it" * bool(flag.known_words),
                ) from None
        if not flag.path:
            reading.later[flag.word] = converted
        elif converted is not None:
            set_path(reading.raw, flag.path, converted)
    reading.taken[spelling] = "" if value is True and flag is not None else str(value)
