"""Servers of one deployment that prefill and that decode: what says which does, and the pools that they are."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from windtunnel.errors import InputError
from windtunnel.formats.launch.containers import Command, parsed, table
from windtunnel.schema import read_yaml
from windtunnel.serving.engines.command_line import SERVER, Reading, Unmodelled

PREFILL, DECODE = "prefill", "decode"
SAID_BY_POOLS = ("--disaggregation-", "--is-prefill-worker", "--is-decode-worker", "--kv-transfer-config")
"""How the options begin that pools stand for."""
SAID = {
    PREFILL: r"disaggregation[-_]mode[=: ]+prefill|is-prefill-worker|kv_producer",
    DECODE: r"disaggregation[-_]mode[=: ]+decode|is-decode-worker|kv_consumer",
}
"""What of a server's options says its role."""


ROUTED = {PREFILL: ("--prefill", "context_servers"), DECODE: ("--decode", "generation_servers")}
"""How the options of a proxy begin that name the servers of a role, and the key of TensorRT-LLM's `disaggregated`."""
OF_PROXY = {"hostname", "port", "urls", "num_instances", "router", "conditional_disagg_config", "disagg_cluster"}
"""Keys of TensorRT-LLM's `disaggregated` that set nothing of a server."""
PROXY = "disaggregated"
"""Subcommand of `trtllm-serve` that stands before the servers, and serves nothing."""


def roles_of(servers: Sequence[tuple[Command, int]], proxies: Sequence[Command] = ()) -> list[str] | None:
    """Return the role of each of several servers; None where they are not the two sides of one deployment.

    An option says it (SGLang's and Dynamo's `--disaggregation-mode`, Dynamo's `--is-prefill-worker`, the `kv_role` of
    vLLM's `--kv-transfer-config`), else a proxy that names their ports, else the name of the container or of what holds
    it. Where only prefill is said, as in Dynamo's manifests, the others decode. Beside each server
    stands the port where it listens unless its options say otherwise.
    """
    named = {role: set[str]().union(*(_ports(proxy, role) for proxy in proxies)) for role in ROUTED}
    roles = [_role(command, str(port), named) for command, port in servers]
    words = " ".join(word for command, _ in servers for word in command.words)
    if PREFILL in roles and not re.search(r"kv_role\W+(?!kv_(?:producer|consumer|both)\b)\w", words):
        roles = [role or DECODE for role in roles]
    found = [role for role in roles if role is not None]
    return found if len(found) == len(roles) and set(found) == {PREFILL, DECODE} else None


def says_role(command: Command) -> bool:
    """Whether a server's options or the tables around it say that it prefills or decodes."""
    words = " ".join(command.words).lower()
    return bool(command.role) or any(re.search(says, words) for says in SAID.values())


def _role(command: Command, port: str, ports: Mapping[str, set[str]]) -> str | None:
    files = (command.files.get(word.rpartition("/")[2], "") for word in command.words)
    words = " ".join([*command.words, *files]).lower()
    option = re.search(r"--port[= ](\d+)", words)
    name = command.name.lower()  # the last part is that of the container, or of what holds it
    of_port = [role for role, named in ports.items() if (option[1] if option else port) in named]
    said = [
        [command.role] * bool(command.role),
        [role for role, says in SAID.items() if re.search(says, words)],
        of_port if len(of_port) == 1 else [],
        sorted((role for role in SAID if role in name), key=name.rfind, reverse=True),
    ]
    return next((roles[0] for roles in said if roles), None)


def _ports(proxy: Command, role: str) -> set[str]:
    """Return the ports of the servers that a proxy sends the work of a role to."""
    option, key = ROUTED[role]
    urls = table(_config(proxy).get(key)).get("urls")
    named, is_named = list(map(str, urls)) if isinstance(urls, list) else [], False
    for word in proxy.words:
        is_named = word.startswith(option) if word.startswith("-") else is_named
        named += [word] if is_named else []
    return {match[1] for word in named if (match := re.search(r"(?:^|[:=])(\d{2,5})/?$", word))}


def _config(command: Command) -> dict[str, Any]:
    """Return what the file says that `trtllm-serve disaggregated` is given; nothing of another command, or without."""
    words = command.words
    path = next((words[i + 1] for i, word in enumerate(words[:-1]) if word in ("-c", "--config", "--config_file")), "")
    if PROXY not in words or not path:
        return {}
    name = path.rpartition("/")[2]
    return table(parsed(name, command.files[name]) if name in command.files else read_yaml(Path(path)))


def servers_of(proxy: Command) -> list[Command]:
    """Return the servers whose settings stand in the file of `trtllm-serve disaggregated`, as the commands of each."""
    content, servers = _config(proxy), []
    shared = {key: value for key, value in content.items() if key not in OF_PROXY and not isinstance(value, dict)}
    for role, (_, key) in ROUTED.items():
        if not table(content.get(key)):
            raise InputError(f"--from-command: trtllm-serve {PROXY} has no file (-c) that describes {key}")
        settings, name = shared | content[key], f"{role}.yaml"
        own = {key: value for key, value in settings.items() if key not in OF_PROXY}
        replicas = settings.get("num_instances", 1)
        if not isinstance(replicas, int) or replicas < 1:
            raise InputError(f"--from-command: {key}.num_instances is {replicas!r}; a number above zero is needed")
        words, files = ["--config", name], {**proxy.files, name: yaml.safe_dump(own)}
        servers.append(replace(proxy, words=words, name=role, replicas=replicas, files=files))
    return servers


def as_pools(readings: Sequence[Reading], roles: Sequence[str]) -> Reading:
    """Return the servers of a deployment as its pools. InputError where they serve different models, or keep different
    formats."""
    first = readings[0]
    deployments: list[dict[str, Any]] = [dict(reading.raw["deployment"]) for reading in readings]
    for name, of in (
        ("model", [reading.raw["model"] for reading in readings]),
        ("precision", [reading.raw.get("precision") for reading in readings]),
        ("engine", [reading.engine["name"] for reading in readings]),
    ):
        other = next((value for value in of if value != of[0]), of[0])
        if other != of[0]:
            raise InputError(
                f"--from-command: servers that prefill and that decode have one {name}, and these have {of[0]} and "
                f"{other}",
                "keep the servers of one deployment",
            )
    versions = {reading.engine.get("version") for reading in readings}
    shared = ("name", "version") if len(versions) == 1 else ("name",)
    deployment: dict[str, Any] = {"engine": {name: first.engine[name] for name in shared if name in first.engine}}
    devices = {each.get("device") for each in deployments} - {None}
    if len(devices) == 1:
        deployment["device"] = devices.pop()
    pools: list[dict[str, Any]] = []
    unmodelled: dict[str, Unmodelled] = {}
    for role, each, reading in zip(roles, deployments, readings, strict=True):
        engine = {name: value for name, value in each.pop("engine").items() if name not in shared}
        kept = {name: value for name, value in each.items() if name != "device" or "device" not in deployment}
        replicas = kept.pop("replicas", 1)
        settings = {"role": role, **kept, **({"engine": engine} if engine else {})}
        others = [pool for pool in pools if pool["role"] == role]
        equal = next((pool for pool in others if settings.items() <= pool.items()), None)
        if equal is not None:
            equal["replicas"] += replicas
        else:
            name = f"{role}-{len(others) + 1}" if others else role
            pools.append({"name": name, **settings, "replicas": replicas})
            unmodelled[name] = reading.others[SERVER]
    deployment["pools"] = [
        {name: value for name, value in pool.items() if (name, value) != ("replicas", 1)} for pool in pools
    ]
    joined = Reading({**first.raw, "deployment": deployment}, taken=first.taken, others=unmodelled)
    for field in ("without_effect", "not_modelled", "unknown", "container"):
        every = (line for reading in readings for line in getattr(reading, field))
        lines = [line for line in dict.fromkeys(every) if "(" in line or not line.startswith(SAID_BY_POOLS)]
        setattr(joined, field, lines)
    return joined
