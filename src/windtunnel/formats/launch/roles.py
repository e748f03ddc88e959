"""Servers of one deployment that prefill and that decode: what says which does, and the pools that they are."""

import re
from collections.abc import Sequence
from typing import Any

from windtunnel.errors import InputError
from windtunnel.formats.launch.containers import Command
from windtunnel.serving.engines.command_line import Reading

PREFILL, DECODE = "prefill", "decode"
SAID_BY_POOLS = ("--disaggregation-", "--is-prefill-worker", "--is-decode-worker", "--kv-transfer-config")
"""How the options begin that pools stand for."""


def roles_of(commands: Sequence[Command]) -> list[str] | None:
    """Return the role of each of several servers; None where they are not the two sides of one deployment.

    An option says it (SGLang's and Dynamo's `--disaggregation-mode`, Dynamo's `--is-prefill-worker`, the `kv_role` of
    vLLM's `--kv-transfer-config`), else the name of the container or of what holds it. Where only prefill is said, as
    in Dynamo's manifests, the others decode.
    """
    roles = [_role(command) for command in commands]
    if PREFILL in roles:
        roles = [role or DECODE for role in roles]
    found = [role for role in roles if role is not None]
    return found if len(found) == len(roles) and set(found) == {PREFILL, DECODE} else None


def _role(command: Command) -> str | None:
    words = " ".join(command.words).lower()
    for text in (words, command.name.lower()):
        for role, says in (
            (PREFILL, r"disaggregation-mode[= ]prefill|is-prefill-worker|kv_producer"),
            (DECODE, r"disaggregation-mode[= ]decode|is-decode-worker|kv_consumer"),
        ):
            if re.search(says if text is words else role, text):
                return role
    return None


def as_pools(readings: Sequence[Reading], roles: Sequence[str]) -> Reading:
    """Return the servers of a deployment as its pools.

    Raises:
        InputError: they serve different models, or keep different formats.
    """
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
    for role, each in zip(roles, deployments, strict=True):
        engine = {name: value for name, value in each.pop("engine").items() if name not in shared}
        same = [pool for pool in pools if pool["role"] == role]
        kept = {name: value for name, value in each.items() if name != "device" or "device" not in deployment}
        name = f"{role}-{len(same) + 1}" if same else role
        pools.append({"name": name, "role": role, **kept, **({"engine": engine} if engine else {})})
    deployment["pools"] = pools
    joined = Reading({**first.raw, "deployment": deployment}, taken=first.taken)
    for field in ("without_effect", "not_modelled", "unknown", "container"):
        every = (line for reading in readings for line in getattr(reading, field))
        setattr(joined, field, [line for line in dict.fromkeys(every) if not line.startswith(SAID_BY_POOLS)])
    return joined
