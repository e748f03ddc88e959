"""A deployment as something to run: a command that is read back the same, a shell script, manifests, a Helm chart."""

import copy
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise, takewhile
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
import yaml

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.formats.launch.containers import PRODUCT
from windtunnel.formats.launch.read import is_option, servers, spelt
from windtunnel.formats.launch.shell import REFERENCE, quoted
from windtunnel.model.config import known_architectures
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.shape import ModelSpec
from windtunnel.schema import dotted, read_yaml
from windtunnel.serving.deployment import Deployment, EngineSettings
from windtunnel.serving.engines.command_line import ENGINE, SERVER, Options, Reading, Unmodelled
from windtunnel.serving.engines.contract import behaviour_of, engine_of, split_columns
from windtunnel.serving.engines.defaults import ENGINE_SCHEDULERS
from windtunnel.serving.scenario import Scenario, Setup, pool_scenario, resolve
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.setup.memory import plan_memory
from windtunnel.serving.setup.speculation import drafter_of, with_drafter
from windtunnel.serving.shorthand import lay_over
from windtunnel.workload.generate.requests import generate

RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "intel": "habana.ai/gaudi", "google": "google.com/tpu"}
ROUTER_IMAGE = "nginx:1.29"
"""At least 1.27.3, which looks the replicas of a Service up again."""
TOKEN = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token", "optional": True}}}
TOKEN_REMARK = "# For a gated checkpoint: kubectl create secret generic hf-token --from-literal=token=YOUR_TOKEN\n"
REMARKS = {
    "prefill": "requests reach it first; its KV cache goes to the decode pool",
    "decode": "takes requests that were prefilled elsewhere",
}


NOTHING = Unmodelled()


def server_of(engine: EngineSettings) -> Options:
    """Return the options of an engine's server. InputError where nothing is known of its command."""
    known, name = servers(), catalog.spelling("engines", engine.name)
    if name not in known:
        raise InputError(f"no command of {name} is known", f"known: those of {', '.join(known)}")
    return known[name]


def named_option(engine: EngineSettings, setting: str) -> str:
    """Return a setting of an engine with the option that decides it, where its server calls it otherwise."""
    with suppress(InputError):
        server = server_of(engine)
        option = spelt(server, server.option(f"engine.{setting}"))
        return setting if option.lstrip("-").replace("-", "_") == setting else f"{setting} ({option})"
    return setting


def write_launch_command(
    model: str,
    parallelism: Parallelism,
    engine: EngineSettings,
    weights: str | None = None,
    kv_cache: str | None = None,
    state: str | None = None,
    task: str = "generate",
    is_encoder: bool = False,
) -> tuple[str, ...]:
    """Return the words of a command that starts one replica; settings that are None keep the engine's default.

    Args:
        model: model name that the engine loads.
        parallelism: parallelism of one replica.
        engine: settings as requested, not resolved.
        weights, kv_cache, state: formats that differ from the published checkpoint's; an engine without an option for
            recurrent states has no word for the last.
        task: of the workload.
        is_encoder: whether the model sees a prompt in both directions.
    """
    server, line = server_of(engine), engine_of(engine.name).command_line
    words, separator = [*server.command, model], "_" if server.spelt_with_underscores else "-"
    for name, value in (
        *((server.option(sets), None if to is True else to) for sets, to in line.write_split(parallelism).items()),
        *_engine_options(server, engine),
        *line.write_rest(engine, weights, kv_cache),
        *_state_options(server, state),
        *line.write_task(task, is_encoder),
    ):
        option, dot, key = name.partition(".")
        words.append("--" + option.replace("-", separator) + dot + key.replace("-", "_"))
        if value is not None:
            words += str(value).split() if (flag := server.flag(name)) and flag.type == "sizes" else [str(value)]
    return tuple(words)


def _state_options(server: Options, state: str | None) -> Iterator[tuple[str, Any]]:
    """Yield the option that sets the format of recurrent states."""
    for name in server.flags if state is not None else ():
        flag = server.flag(name)
        if flag is not None and flag.path == "precision.recurrent_state":
            yield name, flag.word_for(state)


def _engine_options(server: Options, engine: EngineSettings) -> Iterator[tuple[str, Any]]:
    """Yield options for the settings of `engine` that one option decides."""
    written: set[str] = set()
    for name in server.flags:
        flag = server.flag(name)
        assert flag is not None
        setting = flag.path.removeprefix(ENGINE)
        value = getattr(engine, setting, None) if setting != flag.path else None
        if value is None or setting in written or name in server.in_file_only:
            continue
        if flag.value is None:
            word = None if setting == "max_cudagraph_capture_size" and value == 0 else flag.word_for(value)
            if word is not None:
                yield name, word
                written.add(setting)
        elif flag.value == value and isinstance(flag.value, bool) == isinstance(value, bool):
            yield name, None
            written.add(setting)


def launch_script(scenario: Scenario, version: dict[str, str], others: Mapping[str, Unmodelled] = {}) -> str:
    """Return a shell script with the command of one replica of each kind, and comments on the remaining work.

    Args:
        scenario: the scenario as requested: missing settings are the engine's defaults.
        version: engine -> simulated version.
        others: name of a pool -> what its server has that decides no setting, as in `Reading.others`.
    """
    lines = ["#!/bin/sh", f"# {scenario.model_name}: each command starts one replica."]
    for name, role, deployment in _parts(scenario):
        engine = deployment.engine
        copies = f"{deployment.replicas} replica{'s' if deployment.replicas > 1 else ''}"
        what = f"{copies} of {deployment.parallelism.num_devices} x {deployment.device}"
        lines += ["", f"# {name}: {what}; simulated as {engine.name} {version[engine.name]}"]
        lines += [f"# {_role_remark(server_of(engine), role)}"] if role in REMARKS else []
        unmodelled = others.get(name, NOTHING)
        lines += [f"# image: {unmodelled.image}"] if unmodelled.image else []
        if content := _file(scenario, deployment, unmodelled):
            lines += [f"cat > {_file_name(engine)} <<'END'", yaml.safe_dump(content, sort_keys=False).rstrip(), "END"]
        variables = "".join(f"{name}={quoted(value)} " for name, value in _environment(engine, unmodelled).items())
        lines += [f"{variables}{' '.join(map(quoted, _command(scenario, deployment, role, unmodelled)))}"]
        lines += [f"# {text}" for text in (*_unsaid(scenario, deployment), *unmodelled.left_out)]
    return "\n".join(lines) + "\n"


def _role_remark(server: Options, role: str) -> str:
    """Say what a server of a role does, and what remains to be done for it."""
    return f"{REMARKS[role]}: {'put a proxy before both' if server.roles else 'add the KV connector of your engine'}"


Value = Callable[[str, str, Any], Any]
"""Turns a server's name, a setting's name and its value into the manifest's value."""


def shown_script(script: str, width: int = 78) -> list[str]:
    """Return the lines of a launch script below its head, long commands broken before their options."""
    lines: list[str] = []
    for line in script.splitlines()[2:]:
        words = [] if len(line) <= width or line.startswith("#") else shlex.split(line)
        lines.append(quoted(words[0]) if words else line)
        for place, word in enumerate(words[1:], start=1):
            group = " ".join(map(quoted, [word, *takewhile(lambda each: not is_option(each), words[place + 1 :])]))
            if is_option(word) and len(lines[-1]) + len(group) > width - 3:
                lines[-1] += " \\"
                lines.append(" ")
            lines[-1] += f" {quoted(word)}"
    return lines


def kubernetes_manifests(scenario: Scenario, version: dict[str, str], others: Mapping[str, Unmodelled] = {}) -> str:
    """Return what serves each kind of replica, as YAML for `kubectl apply -f`.

    A Deployment, a Service, a volume for the checkpoint and an autoscaler; before several replicas, nginx as a router.
    """
    return TOKEN_REMARK + _text(_documents(scenario, version, lambda _server, _name, value: value, others))


def helm_chart(scenario: Scenario, version: dict[str, str], others: Mapping[str, Unmodelled] = {}) -> dict[str, str]:
    """Return the same manifests as a Helm chart: path -> text. Settings of the cluster are in `values.yaml`."""
    values: dict[str, dict[str, Any]] = {}

    def placeholder(server: str, name: str, value: Any) -> str:
        key = re.sub(r"\W", "_", server)
        values.setdefault(key, {})[name] = value
        return f"{{{{ .Values.{key}.{name} | toJson }}}}"

    template = _text(_documents(scenario, version, placeholder, others))
    model = scenario.model_name.rsplit("/", 1)[-1]
    chart = {
        "apiVersion": "v2",
        "name": _label(model, ""),
        "version": "0.1.0",
        "description": f"{scenario.model_name}, as windtunnel search found it",
    }
    return {
        "Chart.yaml": _text([chart]),
        "values.yaml": _text([values]),
        # YAML would quote what begins with a brace; toJson writes the quotes that a value needs.
        "templates/servers.yaml": TOKEN_REMARK + re.sub(r"'(\{\{ \.Values\.[\w.]+ \| toJson \}\})'", r"\1", template),
    }


def _text(documents: list[dict[str, Any]]) -> str:
    return yaml.safe_dump_all(documents, sort_keys=False, width=120)


def _documents(
    scenario: Scenario, version: dict[str, str], value: Value, others: Mapping[str, Unmodelled] = {}
) -> list[dict[str, Any]]:
    templates: dict[str, Any] = read_yaml(Path(__file__).with_name("manifests.yaml"))
    documents: list[dict[str, Any]] = []
    for name, role, deployment in _parts(scenario):
        engine, server, of_part = deployment.engine, server_of(deployment.engine), partial(value, name)
        unmodelled = others.get(name, NOTHING)
        app, content = _label(scenario.model_name, name), _file(scenario, deployment, unmodelled)
        has_router = deployment.most_replicas > 1 and role not in REMARKS
        role_remarks = [_role_remark(server, role)] if role in REMARKS else []
        remarks = [*role_remarks, *_unsaid(scenario, deployment), *unmodelled.left_out]
        device = catalog.device(deployment.device)
        if not catalog.product_labels(device.name):
            remarks.append(f"fill in nodeSelector: the label of the nodes with {device.title}, and its value")
        if has_router and scenario.deployment.router not in templates["balance"]:
            remarks.append(f"nginx cannot route as {scenario.deployment.router} does: it takes turns")
        if server.waiting_metric:
            remarks.append(f"the autoscaler needs the metric {server.waiting_metric}, by an adapter of Prometheus")
        balance = templates["balance"].get(scenario.deployment.router, "")
        # Where it listens is the pod's matter: at all its addresses.
        own = replace(unmodelled, words=tuple(_without(unmodelled.words, server.listening)))
        words = [REFERENCE.sub(r"$(\1\2)", word) for word in _command(scenario, deployment, role, own)]
        port = next(
            (int(value) for option, value in pairwise(words) if option == "--port" and value.isdigit()), server.port
        )
        nginx = templates["nginx"] % {"balance": balance, "replicas": f"{app}-replicas", "port": port}
        values = {
            "app": app,
            "metadata": {"name": app} | ({"annotations": {"windtunnel/to-do": "; ".join(remarks)}} if remarks else {}),
            "image": of_part("image", unmodelled.image or server.image.format(version=version[engine.name])),
            "command": of_part("command", [*words, *server.listening]),
            **_settings(deployment, server, port, of_part, unmodelled),
            **{f"{kind}Name": f"{app}-{kind}" for kind in ("cache", "replicas", "router")},
            "routerConfig": nginx,
            "routerImage": of_part("routerImage", ROUTER_IMAGE) if has_router else "",
        }
        if content:
            values["data"] = {_file_name(engine): of_part("config", yaml.safe_dump(content, sort_keys=False))}
            documents.append(_filled(templates["config"], values))
        server_document = _filled(templates["deployment"], values)
        pod = server_document["spec"]["template"]["spec"]
        if len(products := catalog.product_labels(device.name)) > 1:
            pod["affinity"] = of_part("affinity", _filled(templates["affinity"], {"products": products}))
        if content:
            _mount(pod, app)
        routed = ("replicas", "router_config", "router", "router_service") if has_router else ("service",)
        kinds = ("cache", *routed, *(("autoscaler",) if server.waiting_metric else ()))
        documents += [server_document, *(_filled(templates[kind], values) for kind in kinds)]
    return documents


def _settings(
    deployment: Deployment, server: Options, port: int, of_part: Callable[[str, Any], Any], unmodelled: Unmodelled
) -> dict[str, Any]:
    """Return what depends on the cluster: devices, environment, replicas, and the volume of the checkpoint."""
    device, num_devices = catalog.device(deployment.device), deployment.parallelism.num_devices
    products = catalog.product_labels(device.name)
    environment = _environment(deployment.engine, unmodelled) | {"HF_HOME": "/cache"}
    variables = [{"name": name, "value": REFERENCE.sub(r"$(\1\2)", text)} for name, text in environment.items()]
    resource = RESOURCES.get(device.vendor.lower(), "nvidia.com/gpu")
    least, most = deployment.fewest_replicas, deployment.most_replicas
    return {
        "port": port,
        "replicas": of_part("replicas", deployment.replicas),
        "minReplicas": of_part("minReplicas", least),
        "maxReplicas": of_part("maxReplicas", most if most > least else 2 * most),
        "waitingMetric": server.waiting_metric,
        "env": of_part("env", [TOKEN, *variables]),
        "devices": of_part("devices", {resource: num_devices}),
        "nodeSelector": of_part("nodeSelector", {PRODUCT: products[0]} if len(products) == 1 else {}),
        "accessModes": of_part("cacheAccessModes", ["ReadWriteMany"]),
        "storage": of_part("cacheSize", f"{ceil(num_devices * device.memory_bytes / 2**30)}Gi"),
    }


def _filled(template: Any, values: Mapping[str, Any]) -> Any:
    """Return a template with the values in place of their names, `$name`."""
    if isinstance(template, dict):
        return {key: _filled(part, values) for key, part in template.items()}
    if isinstance(template, list):
        return [_filled(part, values) for part in template]
    return values[template[1:]] if isinstance(template, str) and template.startswith("$") else template


def _mount(pod: dict[str, Any], app: str) -> None:
    """Mount the replica's configuration map, where its server starts."""
    (container,) = pod["containers"]
    container["workingDir"] = "/config"
    container["volumeMounts"].append({"name": "config", "mountPath": "/config"})
    pod["volumes"].append({"name": "config", "configMap": {"name": app}})


def _parts(scenario: Scenario) -> list[tuple[str, str, Deployment]]:
    """Return (name, role, deployment) of each kind of replica."""
    if scenario.deployment.encoder is not None:
        raise InputError(
            f"pool {scenario.deployment.encoder.name} encodes images, and commands for such servers are not written",
            "leave the pool with role encode out",
        )
    groups = scenario.deployment.groups
    return [(pool.name or SERVER, pool.role, _startable(pool_scenario(scenario, pool))) for pool in groups]


def start_remark(scenario: Scenario, reading: Reading, is_written: bool = False) -> str:
    """Say that a server would not start, and what lets it; empty where it starts, or chooses itself, or where its
    command `is_written` here, as without a `reading`, with a length that fits where none is given.
    """
    if scenario.deployment.pools:
        pools = (pool_scenario(scenario, pool) for pool in scenario.deployment.groups)
        return next(filter(None, (start_remark(pool, reading, is_written) for pool in pools)), "")
    engine, is_written = scenario.deployment.engine, is_written or not reading.taken
    option = named = named_option(engine, "max_model_len")
    with suppress(InputError):
        option = f"--{server_of(engine).option('engine.max_model_len')}"
        named = option if reading.taken else named
    setup = resolve(scenario)
    name, fitting, split = setup.engine.name, _fitting_model_len(setup), setup.parallelism.experts_tp
    longest, ways = setup.model.max_context_tokens, behaviour_of(name).lengthened_by
    if ways and setup.max_model_len > longest and not setup.model.is_encoder and not reading.has_any(ways):
        takes = f"{named} is {setup.max_model_len:,}, and {setup.model.name} takes {longest:,} tokens"
        return f"{name} would not start: {takes}; give {longest} at most, or override that limit ({' or '.join(ways)})"
    if (columns := split_columns(name, setup.model, setup.precision.experts_format, split)) is not None:
        parts = f"TP {split} leaves {columns} columns of an expert, in blocks of 128 with one scale"
        return f"{name} would not start: {parts}; spread the experts (expert parallelism) or take fewer devices"
    if fitting is None or ((is_written or option in reading.taken) and setup.engine.max_model_len is None):
        return ""
    why = f"a request of {setup.max_model_len:,} tokens is taken, and the KV cache holds {fitting:,}"
    return f"{name} would not start: {why}; give {named} {fitting} at most"


def _fitting_model_len(setup: Setup) -> int | None:
    """Return the tokens of the longest request that the KV cache holds, where the server takes longer ones and so does
    not start; None where it starts."""
    if not behaviour_of(setup.engine.name).holds_longest or setup.parallelism.ffn is not None:
        return None
    shard, most = shard_of(setup), setup.max_model_len
    memory = plan_memory(shard, setup.device, with_drafter(setup, drafter_of(setup, shard)).engine, most)
    fitting = memory.most_tokens(most, setup.engine.max_num_batched_tokens)
    return None if fitting == most else fitting


def _startable(scenario: Scenario) -> Deployment:
    """Return the deployment of a scenario without pools, with a greatest length that lets its server start: what fits,
    or the power of two below it where no request is longer."""
    try:
        fitting = _fitting_model_len(resolve(scenario))
    except InputError:
        return scenario.deployment
    if fitting is None or scenario.deployment.engine.max_model_len is not None:
        return scenario.deployment
    requests, rounded = generate(scenario.workload, scenario.seed), 1 << fitting.bit_length() - 1
    longest = int((requests.input_tokens + requests.output_tokens).max())
    length = rounded if rounded >= longest else fitting
    engine = msgspec.structs.replace(scenario.deployment.engine, max_model_len=length)
    return msgspec.structs.replace(scenario.deployment, engine=engine)


def _checkpoint(scenario: Scenario) -> ModelSpec:
    """Return the checkpoint to load: that of the catalog in the formats of the scenario, else the one that it names."""
    named, wanted = catalog.model(scenario.model), scenario.precision
    if wanted is None or named.precision.weights == wanted.weights or not isinstance(scenario.model, str):
        return named
    others = catalog.checkpoints(named, catalog.device(scenario.deployment.device).vendor).values()
    formats = wanted.weights, wanted.experts_format
    fitting = (each for each in others if (each.precision.weights, each.precision.experts_format) == formats)
    return next(fitting, named)


def _formats(scenario: Scenario) -> tuple[str | None, str | None, str | None]:
    """Return the formats of weights and KV cache that differ from the checkpoint's, and of recurrent states."""
    published, precision = _checkpoint(scenario).precision, scenario.precision
    if precision is None:
        return None, None, None
    weights = str(precision.weights) if precision.weights != published.weights else None
    kv_cache = str(precision.kv_cache) if precision.kv_cache != published.kv_cache else None
    return weights, kv_cache, precision.recurrent_state


def _words(scenario: Scenario, deployment: Deployment, unmodelled: Unmodelled = NOTHING) -> tuple[str, ...]:
    checkpoint = _checkpoint(scenario)
    served = *_formats(scenario), scenario.workload.task, checkpoint.is_encoder
    words = write_launch_command(checkpoint.name, deployment.parallelism, deployment.engine, *served)
    architecture = known_architectures().get(checkpoint.architecture)
    if architecture is not None and architecture.own_code:
        separator = "_" if server_of(deployment.engine).spelt_with_underscores else "-"
        words += (separator.join(("--trust", "remote", "code")),)
    return (*words, "--config", _file_name(deployment.engine)) if _file(scenario, deployment, unmodelled) else words


def _command(scenario: Scenario, deployment: Deployment, role: str, unmodelled: Unmodelled) -> tuple[str, ...]:
    """Return the words that start a replica in its role, with the unmodelled ones that are not among them."""
    words = _words(scenario, deployment, unmodelled)
    further = _without(unmodelled.words, words)
    return (*words, *further, *_without(server_of(deployment.engine).roles.get(role, ()), further))


def _without(words: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return words of options, and their values, but for the options among `others`."""
    kept, is_kept = list[str](), True
    for word in words:
        is_kept = word not in others if is_option(word) else is_kept
        kept += [word] if is_kept else []
    return kept


def _environment(engine: EngineSettings, unmodelled: Unmodelled = NOTHING) -> dict[str, str]:
    return dict(unmodelled.variables) | engine_of(engine.name).command_line.write_environment(engine)


def _file(scenario: Scenario, deployment: Deployment, unmodelled: Unmodelled = NOTHING) -> dict[str, Any]:
    """Return the YAML file beside the command, its settings over its other keys; empty where it needs none."""
    line = engine_of(deployment.engine.name).command_line
    content = copy.deepcopy(dict(unmodelled.file))
    lay_over(content, line.write_file(deployment.engine, deployment.parallelism, _formats(scenario)[1]))
    return content


def changed_options(before: Scenario, after: Scenario) -> str:
    """Say what to change in the command of one deployment to get another's; empty where no option says the difference.

    `Add --x 1`, `Set --x 2 (now 1)`, `Remove --y`, `Replace --y by --x 1`.
    """
    old, new = _options(before), _options(after)
    added = [f"{name} {value}".strip() for name, value in new.items() if name not in old]
    removed = [name for name in old if name not in new]
    texts = [f"Set {name} {value} (now {old[name]})" for name, value in new.items() if old.get(name, value) != value]
    texts = [text.replace("Set the model", "Serve", 1) for text in texts]
    if added and removed:
        texts.append(f"Replace {', '.join(removed)} by {', '.join(added)}")
    else:
        texts += [f"{verb} {', '.join(options)}" for verb, options in (("Add", added), ("Remove", removed)) if options]
    return "; ".join(texts)


def _options(scenario: Scenario) -> dict[str, str]:
    """Return option -> value of a deployment's command, and of the file beside it; its first word is `the model`."""
    deployment = scenario.deployment
    options, name = {"the model": ""}, "the model"
    for word in _words(scenario, deployment)[len(server_of(deployment.engine).command) :]:
        if word.startswith("--"):
            name, options[word] = word, ""
        else:
            options[name] = f"{options[name]} {shlex.quote(word)}".strip()
    options.pop("--config", None)
    file, content = _file_name(deployment.engine), dotted(_file(scenario, deployment))
    options |= _environment(deployment.engine)
    return options | {f"{path}: {json.dumps(value)} in {file}": "" for path, value in content.items()}


def _file_name(engine: EngineSettings) -> str:
    return f"{engine.name}.yaml"


def _unsaid(scenario: Scenario, deployment: Deployment) -> list[str]:
    """Return the remaining work: parts of the deployment that no option of the command says."""
    engine, split, weights = deployment.engine, deployment.parallelism, _formats(scenario)[0]
    line, drafts = engine_of(engine.name).command_line, engine.speculative
    work = []
    if weights is not None and "--quantization" not in _words(scenario, deployment):
        work.append(f"name a checkpoint with {weights} weights: the engine does not make one of {scenario.model_name}")
    if drafts is not None and not line.writes_drafts(drafts):
        work.append(f"add speculative decoding: {drafts.method}, {drafts.num_draft_tokens} draft tokens a step")
    work += line.remaining_work(deployment)
    flags = [flag for name in server_of(engine).flags if (flag := server_of(engine).flag(name)) is not None]
    for setting, usual in {"scheduler": ENGINE_SCHEDULERS, "scheduling_policy": ("fcfs",)}.items():
        value = getattr(engine, setting)
        is_said = any(flag.path == f"{ENGINE}{setting}" and flag.word_for(value) for flag in flags)
        if value not in (None, *usual) and not is_said:
            work.append(f"{setting} {value} is simulated; no option of {engine.name} sets it")
    if split.dcp > 1 and "parallelism.dcp" not in line.write_split(split):
        work.append(f"divide each context over {split.dcp} ranks (decode context parallelism)")
    is_said = "--kv-offloading-size" in _words(scenario, deployment)
    if names := ", ".join(tier.name for tier in engine.kv_tiers or () if not (is_said and tier.name == "host")):
        work.append(f"let the engine keep KV blocks below its devices ({names}): the command does not say so")
    node = catalog.node(deployment.node) if deployment.node else catalog.default_node(catalog.device(deployment.device))
    if split.num_devices > node.num_devices:
        work.append(f"a replica takes more than one node of {node.num_devices} devices: start it on each of them")
    return work


def _label(model: str, name: str) -> str:
    """Return a DNS label, as Kubernetes needs for names, that leaves room for an ending."""
    text = f"{model.rsplit('/', 1)[-1]}-{name}".lower()
    return "".join(letter if letter.isalnum() else "-" for letter in text).strip("-")[:50].rstrip("-")
