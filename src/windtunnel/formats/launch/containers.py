"""Find the commands of servers: in scripts, `docker run`, Kubernetes manifests, Helm values and compose files.

In YAML, every table with an image is a container; replicas come from the tables around it.
"""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from textwrap import dedent
from typing import Any

import yaml

from windtunnel.errors import InputError
from windtunnel.formats.launch import shell
from windtunnel.schema import parse_yaml
from windtunnel.units import format_count, parse_quantity

SEPARATORS = ";|&\n"
PREFIXES = ("export", "env", "exec", "sudo", "nohup")
SHELLS, RUNTIMES = ("sh", "bash", "dash", "zsh", "ash"), ("docker", "podman", "nerdctl")
DOCKER_SWITCHES = re.compile(
    r"-[ditPq]+|--(rm|detach|interactive|tty|privileged|init|read-only|publish-all|quiet|no-healthcheck|oom-kill-disable)"
)
"""Options of `docker run` that have no value."""
HERE_DOCUMENT = re.compile(r"(?ms)^([^\n]*)<<-?\s*(['\"]?)(\w+)\2([^\n]*)\n(.*?)^[ \t]*\3[ \t]*$")
ECHO = re.compile(r"""(?m)^[ \t]*echo\s+(?:-\w+\s+)?(["'])((?:(?!\1).)*)\1\s*(>>?)\s*(\S+)""", re.DOTALL)
REDIRECTION = re.compile(r"""(?<=\s)[12&]?>>?(?:&[12]|\s*(?:"[^"\n]*"|'[^'\n]*'|[^\s;|&()"']+))""")
WRITES, APPENDS = ":writes", ":appends"
"""Commands in place of what a script writes: before a file and its text in hexadecimal, which no rule changes."""
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
APART = ("image", "initContainers", "leaderTemplate", "workerTemplate")
"""Keys below which no container of a server stands; the leader of a group is looked at, its workers are not."""

COUNTS = ("replicas", "replicaCount", "scale", "minReplicas", "num_replicas", "min_replicas")
"""Keys of the number of copies."""
AUTOSCALERS = ("HorizontalPodAutoscaler", "ScaledObject")
SCALER = ":scaler"
"""Key of the autoscaler that another document holds."""
OF_OPERATOR = ("modelURL", "enableLoRA", "enableTool", "hfTokenSecret", "hfTokenName", "env")
"""Keys of a VLLMRuntime that are no options of its server, or that another key stands for."""
NAMELESS = ("items", "services", "servingEngineSpec", "modelSpec")
"""Keys that name no object."""


PRODUCT, REQUIRED = "nvidia.com/gpu.product", "requiredDuringSchedulingIgnoredDuringExecution"
"""Label of a node that names its GPU, by NVIDIA's gpu-feature-discovery; key of an affinity that must hold."""


@dataclass(frozen=True)
class Command:
    """One command, and what runs it."""

    words: list[str]
    name: str = ""
    """Name of its container, or of the object that has one."""
    role: str = ""
    """`prefill` or `decode`, where the tables around a container say it."""
    image: str = ""
    assumed: str = ""
    """What of an image that is not known says its engine; empty where the command does."""
    environment: dict[str, str] = field(default_factory=dict)
    of_shell: set[str] = field(default_factory=set)
    """Variables of a script that are not exported: they fill in words, and no program sees them."""
    replicas: int = 1
    gpus: int | None = None
    """GPUs of all hosts of a replica; None: not said, or all."""
    files: dict[str, str] = field(default_factory=dict)
    """Files that the text writes or a ConfigMap of it holds: name without folders -> content."""
    served: tuple[str, ...] = ()
    """Words that the tables around a container add to its server's command (KServe, llm-d)."""
    product: str = ""
    """GPU that the pod's nodes are selected by, as their label names it; empty where none is said."""
    scaling: str = ""
    """What a container's autoscaling says of its number, where that is not one number above zero."""
    scaler: dict[str, Any] = field(default_factory=dict)
    """The autoscaler that says it."""
    routing: str = ""
    """The router's `routingLogic`, of vLLM's production stack; empty where none is said."""
    unread: tuple[str, ...] = ()
    """Kinds and names of documents beside it that are of no known kind."""


def commands_in_script(text: str, about: str = "") -> list[Command]:
    """Return the commands of a script; errors say `about`, not `--from-command: `, first."""
    try:
        return commands_of(shell.of_slurm(text) + text)
    except InputError as error:
        raise InputError(f"{about}{error.message.removeprefix('--from-command: ')}", error.hint) from None


def commands_of(text: str, is_yaml: bool = False) -> list[Command]:
    """Return every command of a text. InputError for unbalanced quotes, YAML that is not valid, or a number of replicas
    or GPUs that is none.

    Args:
        text: a command line, a script, or YAML documents with containers.
        is_yaml: whether a text that is not YAML is refused.
    """
    documents = [*_documents(text, is_yaml), *_documents(_here_documents(text)[1], False)]
    _add_autoscalers(documents)
    maps = [document["data"] for document in map(table, documents) if isinstance(document.get("data"), dict)]
    around = Command([], files={str(name): str(content) for part in maps for name, content in part.items()})
    by_document = [list(_containers(document, around)) for document in documents]
    unread = [_shown(each) for each, held in zip(documents, by_document, strict=True) if not held and _is_foreign(each)]
    found: Iterable[Command] = [replace(each, unread=tuple(unread)) for held in by_document for each in held]
    found = found or (replace(around, words=words) for words in shell.live(_parts(text), around.environment))
    return [command for line in found for command in _unwrapped(line)]


def _is_foreign(document: Any) -> bool:
    """Whether a document is of a kind that neither Kubernetes nor this reader has."""
    api, kind = str(table(document).get("apiVersion", "")), table(document).get("kind")
    group = api.partition("/")[0] if "/" in api else ""
    return bool(kind) and "." in group and not group.endswith(".k8s.io") and kind not in AUTOSCALERS


def _shown(document: Mapping[str, Any]) -> str:
    return f"{document['kind']} {table(document.get('metadata')).get('name', '')}".strip()


def _here_documents(text: str) -> tuple[str, str]:
    """Return a script with commands in place of its texts that go to files, and the text in it that goes to none."""
    shown = [""]

    def take(match: re.Match[str]) -> str:
        line = match[1] + match[4]
        if target := re.search(r">>?\s*(\S+)|\btee\s+(?:-\S+\s+)*([^\s<>|]+)", line):
            writes = APPENDS if re.search(r">>|\btee\s+-a", line) else WRITES
            *before, _ = re.split(r"\b(?:sudo|cat|tee)\b", match[1], maxsplit=1)  # that opens a script, or a branch
            return f"{''.join(before)}{writes} {target[1] or target[2]} {(dedent(match[5]) or ' ').encode().hex()}"
        shown[0] = dedent(match[5])
        return line

    text = ECHO.sub(lambda at: f"cat {at[3]} {at[4]} <<ECHO\n{at[2]}\nECHO".replace("\\n", "\n"), text)
    return HERE_DOCUMENT.sub(take, text), shown[0]


def _documents(text: str, is_yaml: bool) -> list[Any]:
    try:
        return [parse_yaml(part) for part in re.split(r"(?m)^---.*$", text)]
    except yaml.YAMLError as error:
        if not is_yaml:
            return []
        hint = "render the chart first: helm template" if "{{" in text else "is it cut off, or indented wrongly?"
        raise InputError(f"--from-command: not valid YAML: {getattr(error, 'problem', error)}", hint) from None


def _add_autoscalers(documents: list[Any]) -> None:
    """Add the bounds of autoscalers of Kubernetes and KEDA to the documents of the workloads that they name."""
    for scaler in (table(each.get("spec")) for each in map(table, documents) if each.get("kind") in AUTOSCALERS):
        name = table(scaler.get("scaleTargetRef")).get("name")
        for document in map(table, documents):
            if table(document.get("metadata")).get("name") == name and document.get("kind") not in AUTOSCALERS:
                table(document.get("spec")).update(_bounds(scaler) | {SCALER: scaler})


def _bounds(scaler: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bounds of an autoscaler's replicas by Kubernetes' names, given as Kubernetes or KEDA names them."""
    given = {end: scaler.get(end, scaler.get(f"{end[:-1]}Count")) for end in ("minReplicas", "maxReplicas")}
    return {end: count for end, count in given.items() if count is not None}


def _parts(text: str) -> list[shell.Part]:
    """Return the simple commands of a script; a line that begins with a dash continues the one above."""
    text = re.sub(r"(?:\\|(?<=\s)[`^])\r?\n", " ", _here_documents(text)[0])  # of POSIX shells, PowerShell and cmd
    text = shell.ARITHMETIC.sub(lambda match: re.sub(r"\s", "", match[0]), text)
    text = shell.with_arrays_as_variables(re.sub(r"(?m)(?:^|(?<=\s))#.*$|^ExecStart=[-@:+!]*", "", text))
    lexer = shlex.shlex(REDIRECTION.sub("", text), posix=True, punctuation_chars=SEPARATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    commands: list[shell.Part] = [("", [])]
    is_over = False
    try:
        for word in lexer:
            if word and not word.strip(SEPARATORS):
                is_over = is_over or bool(word.strip("\n"))
                commands.append((word, []))
                continue
            while word.startswith("-") and not is_over and not commands[-1][1] and len(commands) > 1:
                commands.pop()
            is_over = False
            commands[-1][1].append(word)
    except ValueError as error:
        raise InputError(f"--from-command: {error} in the command line") from None
    return [(before, words) for before, words in commands if words]


def _unwrapped(command: Command) -> Iterator[Command]:
    """Yield the simple commands that a command runs: in a container, behind `sh -c`, or itself.

    Variables that are set before it join its environment, which the commands of a script share, and fill in its words;
    that of a loop has all of its values.
    """
    environment = command.environment
    words = [part for word in command.words for part in shell.unfolded(word, environment)]
    is_exported, known, names = words[:1] == ["export"], set(environment), set[str]()
    while words and (words[0] in PREFIXES or shell.ASSIGNMENT.fullmatch(words[0])):
        if assignment := shell.ASSIGNMENT.fullmatch(words.pop(0)):
            before = environment.get(assignment[1], "") if assignment[2] else ""
            environment[assignment[1]] = before + shell.assigned(assignment[1], assignment[3], environment)
            names.add(assignment[1])
    if is_exported:
        command.of_shell.difference_update(names, words)
    elif not words:
        command.of_shell.update(names - known)
    if words[:1] in ([WRITES], [APPENDS]):
        with suppress(IndexError, ValueError):
            name = shell.filled(words[1], environment).rpartition("/")[2]
            before = command.files.get(name, "") if words[0] == APPENDS else ""
            command.files[name] = before + bytes.fromhex(words[2]).decode()
        return
    words = ["sh", "-c", " ".join(words[1:])] if words[:1] == ["eval"] else words
    if text := shell.command_in_variable(words, environment):
        for each in shell.live(_parts(f"{text} {shlex.join(words[1:])}"), environment):
            yield from _unwrapped(replace(command, words=each))
        return
    if words[:1] == ["for"] and words[2:3] == ["in"]:
        environment[words[1]] = " ".join(shell.filled(word, environment) for word in words[3:])
    programs = [word.rpartition("/")[2] for word in words]
    for index, program in enumerate(programs):
        following = words[index + 1 :]
        if program in RUNTIMES and "run" in following[:2]:
            yield from _unwrapped(_docker_run(command, following[following.index("run") + 1 :]))
            return
        if program in SHELLS and len(following) > 1 and re.fullmatch(r"-[a-z]*c", following[0]):
            # Within double quotes the shell around it fills in commands and options; whatever else may need quotes.
            held = {name: text for name, text in environment.items() if " -" in text and f"{name}=" not in following[1]}
            inner, script = command, shell.filled(following[1], held)
        elif program in command.files and (index == 0 or programs[index - 1] in (*SHELLS, "source", ".")):
            inner, script = replace(command, files={**command.files, program: ""}), command.files[program]
        else:
            continue
        for each in shell.live(_parts(script), environment):
            yield from _unwrapped(replace(inner, words=each))
        return
    gpus = command.gpus
    for name in VISIBLE_DEVICES:
        gpus = _num_devices(f"device={environment[name]}") if name in environment and gpus is None else gpus
    if words:
        fields, image = [part for word in words for part in _fields(word, environment)], command.image
        files = {name: shell.filled(content, environment) for name, content in command.files.items()}
        yield replace(command, words=fields, image=shell.filled(image, environment), gpus=gpus, files=files)


def _fields(word: str, environment: Mapping[str, str]) -> list[str]:
    """Return a word with its variables in place: several words where a variable alone holds options."""
    text = shell.filled(word, environment)
    are_options = word.startswith("$") and text.lstrip().startswith("-")
    return [part for _, line in _parts(text) for part in line] if are_options else [text]


def _docker_run(command: Command, words: list[str]) -> Command:
    """Return the command in the container that `docker run` starts; `words` follow `run`."""
    environment, settings = dict(command.environment), {"--name": "", "--gpus": "all", "--entrypoint": ""}
    position = 0
    while position < len(words) and words[position].startswith("-"):
        name, has_value, value = words[position].partition("=")
        position += 1
        if re.match(r"-[a-z].", name) and not DOCKER_SWITCHES.fullmatch(name):
            name, value = name[:2], f"{name[2:]}{has_value}{value}"
        elif not has_value and not DOCKER_SWITCHES.fullmatch(name):
            value = words[position] if position < len(words) else ""
            position += 1
        if name in ("-e", "--env"):
            variable, _, text = value.partition("=")
            environment[variable] = text
        settings[name] = value
    image = words[position] if position < len(words) else ""
    gpus = _num_devices(settings["--gpus"])
    inner = [*settings["--entrypoint"].split(), *words[position + 1 :]] or [""]
    return replace(command, words=inner, name=settings["--name"], image=image, environment=environment, gpus=gpus)


def _num_devices(text: str) -> int | None:
    """Read `2`, `count=2`, `device=0,1` or a list of ids; None for `all` and for what says no number."""
    value = text.strip("\"' ").removeprefix("count=")
    if value.startswith("device="):
        ids = value.removeprefix("device=").split(",")
        return len(ids) if all(each.strip().isalnum() for each in ids) and ids != ["all"] else None
    return int(value) if value.isdecimal() else None


def _product(node: dict[str, Any]) -> str:
    """Return the GPU that a pod's nodes must have, by its label; of several that an affinity allows, the first."""
    needed = table(table(node.get("affinity")).get("nodeAffinity")).get(REQUIRED)
    terms = _list(table(needed).get("nodeSelectorTerms"))
    matches = [match for term in terms for match in _list(table(term).get("matchExpressions")) if table(match)]
    allowed = [match.get("values") for match in matches if (match.get("key"), match.get("operator")) == (PRODUCT, "In")]
    values = [str(value) for some in allowed for value in _list(some)]
    return str(table(node.get("nodeSelector")).get(PRODUCT, next(iter(values), "")))


def _containers(node: Any, around: Command) -> Iterator[Command]:
    """Yield every container below a table or list, with the name and replicas of the tables around it."""
    if isinstance(node, list):
        for part in node:
            yield from _containers(part, around)
    if not isinstance(node, dict):
        return
    if node.get("create") is False:  # llm-d's prefill pool
        return
    if node.get("kind") == "LLMInferenceService":
        node = {**node, "spec": _with_groups(table(node.get("spec")))}
    if node.get("kind") == "VLLMRuntime":
        node = {**node, "spec": {"modelSpec": [_as_model_spec(table(node.get("spec")))]}}
    if isinstance(services := node.get("services"), dict):  # by name, of compose and Dynamo
        named = [{"name": key, **table(part)} for key, part in services.items() if not str(key).startswith("x-")]
        node = {**node, "services": named}
    is_server = any(key in node for key in ("image", "repository", "modelFormat", "model_loading_config"))
    is_server = is_server or isinstance(node.get("command"), list)
    own = str(node.get("name") or "")
    part_of = f"{around.name}/{own}" if own and around.name and not is_server else around.name or own
    name = table(node.get("metadata")).get("name") or part_of
    around = _with_replicas(around, {**node, **table(node.get("deployment_config"))})
    routing = str(table(node.get("routerSpec")).get("routingLogic", around.routing))
    around = replace(around, product=_product(node) or str(node.get("accelerator_type", around.product)))
    around = replace(around, name=str(name), routing=routing, served=_served(node, around.served))
    image = node.get("image", node if "repository" in node else "")
    if is_server:
        if isinstance(image, dict):
            image = ":".join(str(image[key]) for key in ("repository", "tag") if image.get(key) is not None)
        own, words = name if own in ("", name) else f"{name}/{own}", _words(node) or [""]
        if around.served and not node.get("command"):
            words = ["vllm", "serve", *around.served, *words, "${VLLM_ADDITIONAL_ARGS:-}"]
        yield replace(around, name=own, words=words, image=str(image), environment=_environment(node), gpus=_gpus(node))
    has_sides = around.served and table(node.get("prefill")).get("create", "prefill" in node) is not False
    around = replace(around, role="decode") if has_sides else around
    for key, part in node.items():
        inner = around if around.name or key in NAMELESS else replace(around, name=str(key))
        if has_sides and key == "prefill":  # of its own parallelism, drafts and number
            model = {each: node.get(each) for each in ("model", "modelArtifacts")}
            inner = replace(inner, role="prefill", served=_served(model, ()), replicas=1)
        part = parsed(key, str(part)) if key == "serveConfigV2" else part
        is_routing = around.served and key in ("router", "routing")  # of KServe and llm-d, before the servers
        if key not in APART and not is_routing and not str(key).startswith("x-"):  # which extend a compose file
            yield from _containers(part, inner)
    if (group := node.get("leaderTemplate") or node.get("workerTemplate")) is not None:
        hosts = _whole("size", node.get("size", 1))
        for leader in _containers(group, around):
            around_leader = {"LWS_GROUP_SIZE": str(hosts)} | leader.environment
            yield replace(leader, gpus=leader.gpus and leader.gpus * hosts, environment=around_leader)


def _with_replicas(around: Command, node: Mapping[str, Any]) -> Command:
    """Return a command with the replicas that a table says; of those that come and go the fewest, and one at least."""
    scaler = table(node.get("autoscaling_config")) or table(node.get(SCALER))
    node = {**node, **table(node.get("autoscaling_config"))}
    for each in map(table, (node.get("autoscaling"), node.get("keda"))):  # of Helm charts
        if each.get("enabled") is True:
            scaler, node = each, node | _bounds(each)
    counts = [*(node.get(key) for key in COUNTS), table(node.get("deploy")).get("replicas")]
    given = next((count for count in counts if count is not None), None)
    if given is None:
        return around
    copies = max(_whole("replicas", given), _whole("minReplicas", node.get("minReplicas") or 0))
    ends = {key: value for key, value in node.items() if re.fullmatch("m(in|ax)_?[rR]eplicas", str(key))}
    limits = [f"{key} {_whole(key, value)}" for key, value in ends.items() if value is not None]
    taken = f"{', '.join(limits) or 'replicas 0'}: {format_count(copies or 1, 'replica')} taken"
    says = taken if not copies or limits[1:] else ""
    return replace(around, replicas=copies or 1, scaling=says, scaler=scaler)


def _with_groups(workload: dict[str, Any], image: str = "") -> dict[str, Any]:
    """Return the spec of KServe's LLMInferenceService, or its `prefill`, as the LeaderWorkerSets that it becomes.

    The container `main` serves, by vLLM where it is not given (`config/llmisvcconfig`), here with the other side's
    `image`. A group has a host for every `dataLocal` ranks of `data`, or with `worker` for each pipeline stage.
    """
    split, template = table(workload.get("parallelism")), table(workload.get("template"))
    containers = [table(each) for each in _list(template.get("containers"))] or [{}]
    server = {"image": image, **next((each for each in containers if each.get("name") == "main"), containers[0])}
    data, local, stages = (_whole(key, split.get(key) or 1) for key in ("data", "dataLocal", "pipeline"))
    hosts = max(data // local, 1) if split.get("dataLocal") else stages if "worker" in workload else 1
    group = {key: part for key, part in workload.items() if key not in ("template", "worker")}
    if "prefill" in workload:
        group["prefill"] = _with_groups(table(workload["prefill"]), str(server["image"]))
    return group | {"leaderTemplate": {**template, "containers": [server]}, "size": hosts}


def _as_model_spec(runtime: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of a VLLMRuntime, of the operator of vLLM's production stack, as that of its Helm chart."""
    parts = (table(runtime.get(key)) for key in ("model", "vllmConfig", "deploymentConfig", "lmCacheConfig"))
    model, server, deployment, cache = parts
    image, options = table(deployment.get("image")), {**model, **server}
    repository, _, tag = str(image.get("name", "")).rpartition(":")
    kept = {key: value for key, value in options.items() if value not in ("", None) and key not in OF_OPERATOR}
    return {
        **{key: options[key] for key in ("modelURL", "enableLoRA", "env") if options.get(key)},
        "repository": "/".join(filter(None, (str(image.get("registry", "")), repository))),
        "tag": tag,
        "vllmConfig": kept,
        "lmcacheConfig": cache,
        "replicaCount": deployment.get("replicas", 1),
        "requestGPU": table(deployment.get("resources")).get("gpu"),
    }


def _served(node: Mapping[str, Any], around: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of a model, its parallelism, drafts and KV cache in host memory that a table gives beside its
    containers: of KServe's InferenceService (`model.storageUri`) and LLMInferenceService (`model.uri`, `speculator`,
    `kvCacheOffloading`), and of llm-d (`modelArtifacts.uri`)."""
    model, split = table(node.get("model") or node.get("modelArtifacts")), table(node.get("parallelism"))
    uri = str(model.get("uri") or model.get("storageUri") or "")
    words = [uri.partition("://")[2] if uri.startswith("hf://") else uri] if uri or "modelFormat" in model else []
    words += ["--served-model-name", str(model["name"])] if "://" in "".join(words) and model.get("name") else []
    drafts, host = table(node.get("speculator")), table(node.get("kvCacheOffloading"))
    uri = str(table(drafts.get("model")).get("uri", "")).removeprefix("hf://")
    drafts = {**table(drafts.get("config")), **({"model": uri} if uri else {})}
    words += ["--speculative-config", json.dumps(drafts)] if drafts else []
    if size := table(host.get("cpu")).get("size", host.get("cpu")):
        extra: dict[str, Any] = {"cpu_bytes_to_use": round(parse_quantity("kvCacheOffloading.cpu_bytes", f"{size}B"))}
        extra |= {"secondary_tiers": [*host]} if len(host) > 1 else {}
        connector = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
        words += ["--kv-transfer-config", json.dumps(connector)]
    for key in ("tensor", "pipeline", "data") if words or around else ():
        words += [f"--{key}-parallel-size", str(split[key])] if split.get(key) else []
    words += ["--enable-expert-parallel"] if (words or around) and split.get("expert") else []
    return (*around, *words)


def _words(node: Mapping[str, Any]) -> list[str]:
    """Return the words of a container's command; `modelURL` and `vllmConfig` are those of vLLM's production stack."""
    loading = table(node.get("model_loading_config"))  # of Ray Serve, with `engine_kwargs`
    url = node.get("modelURL") or loading.get("model_source") or loading.get("model_id")
    words = ["vllm", "serve", str(url)] if url else []
    config = {key: value for key, value in table(node.get("vllmConfig")).items() if key != "v1"}  # VLLM_USE_V1
    extra = [node.get("engine_kwargs"), config.pop("extraArgs", None), node.get("extraArgs")]
    if (cache := table(node.get("lmcacheConfig"))).get("enabled"):
        connector = {"kv_connector": "LMCacheConnectorV1", "kv_role": cache.get("kvRole", "kv_both")}
        extra.append(["--kv-transfer-config", json.dumps(connector)])
    if node.get("enableLoRA"):
        extra.append(["--enable-lora"])
    command = table(node.get("image")).get("command")
    for part in (node.get("entrypoint"), command, node.get("command"), node.get("args"), config, *extra):
        if isinstance(part, str):
            words += [word for _, line in _parts(part.replace("\n", " ")) for word in line]
        elif isinstance(part, list):
            words += [str(word) for word in part]
        for key, value in table(part).items():
            option = re.sub(r"(?<=[a-z])[A-Z]", lambda match: f"-{match[0].lower()}", str(key))
            is_off = value is False
            words.append(f"--{'no-' if is_off else ''}{option}")
            shown = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [] if isinstance(value, bool) or value is None else [shown]
    return words


def _environment(node: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a container: a table, a list of `NAME=value`, or of tables with `name` and `value`."""
    given: Any = next((node[key] for key in ("env", "environment") if node.get(key)), {})
    if isinstance(given, dict):
        return {str(name): "" if value is None else str(value) for name, value in given.items()}
    parts = [
        table(part) or dict(zip(("name", "value"), str(part).split("=", 1), strict=False)) for part in _list(given)
    ]
    entries = {str(part.get("name", "")): part for part in parts}
    # One whose value only the cluster knows is as if it were not set.
    return {
        name: f"${{{name}}}" if "valueFrom" in part else str(part.get("value", "")) for name, part in entries.items()
    }


def _gpus(node: Mapping[str, Any]) -> int | None:
    """Return the GPUs of a container: of its resources, of `gpus` and devices in a compose file, or `requestGPU`."""
    resources = table(node.get("resources"))
    named = table(resources.get("requests")) | table(resources.get("limits"))
    counts = [count for name, count in named.items() if str(name).endswith(("/gpu", "/gaudi", "/tpu"))]
    reservations = table(table(table(node.get("deploy")).get("resources")).get("reservations"))
    for device in map(table, _list(reservations.get("devices"))):
        ids = device.get("device_ids")
        counts.append(len(ids) if isinstance(ids, list) else device.get("count", "all"))
    counts += [node[key] for key in ("gpus", "requestGPU") if node.get(key) is not None]
    known = [_num_devices(str(count)) for count in counts]
    return known[0] if known else None


def parsed(name: str, text: str) -> Any:
    """Return the YAML of a file that a text writes or holds. InputError where it is none."""
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise InputError(f"--from-command: {name} is not valid YAML: {getattr(error, 'problem', error)}") from None


def table(value: Any) -> dict[str, Any]:
    """Return a table; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _whole(name: str, value: Any) -> int:
    if not str(value).isdecimal():
        raise InputError(f"--from-command: {name} is {value!r:.60}; a whole number is needed", "render the chart first")
    return int(value)
