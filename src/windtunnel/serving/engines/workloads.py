"""What an engine does for LoRA adapters, and for embeddings and scores: defaults, limits, options of its server."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from windtunnel.errors import InputError
from windtunnel.model.shape import ModelSpec
from windtunnel.schema import set_path
from windtunnel.serving.codes import SCHEDULERS
from windtunnel.serving.deployment import Deployment, EngineSettings
from windtunnel.serving.engines.command_line import Reading
from windtunnel.serving.engines.contract import behaviour_of
from windtunnel.workload.schema import WorkloadAdapters

POOLING = ("async_scheduling", "enable_chunked_prefill", "enable_prefix_caching")
"""Settings that an engine may take otherwise where it serves embeddings and scores."""


GENERATE = "generate"
"""The task of a workload whose requests have outputs."""


def with_lora(resolved: EngineSettings, adapters: WorkloadAdapters | None) -> EngineSettings:
    """Fill in `lora` as the engine does; InputError where only requests have adapters, or it cannot serve them so."""
    lora = resolved.lora
    if lora is None:
        if adapters is not None:
            raise InputError(
                "workload.adapters gives requests LoRA adapters, but the server is started without them",
                "set engine.lora, such as {rank: 16, max_loras: 8}",
            )
        return resolved
    behaviour = behaviour_of(resolved.name).lora
    if behaviour is None:
        raise InputError(
            f"serving LoRA adapters with {resolved.name} is not modelled",
            "leave engine.lora and workload.adapters out, or use vllm or sglang",
        )
    if behaviour.ranks and lora.rank not in behaviour.ranks:
        raise InputError(
            f"engine.lora.rank is {lora.rank}; {resolved.name} has kernels for {', '.join(map(str, behaviour.ranks))}",
            "take the next larger rank, as its --max-lora-rank must",
        )
    max_loras = lora.max_loras or behaviour.max_loras
    count = 0 if adapters is None else adapters.count
    max_cpu_loras = lora.max_cpu_loras or max(max_loras, count if behaviour.holds_all else 0)
    if max_cpu_loras < max_loras:
        raise InputError(
            f"engine.lora.max_cpu_loras is {max_cpu_loras}; at least max_loras = {max_loras} is needed",
            "raise the one or lower the other",
        )
    filled = msgspec.structs.replace(lora, max_loras=max_loras, max_cpu_loras=max_cpu_loras)
    return msgspec.structs.replace(resolved, lora=filled)


def for_pooling(deployment: Deployment, resolved: EngineSettings, model: ModelSpec) -> EngineSettings:
    """Return the settings of an engine that serves embeddings or scores; encoders compute prompts whole, and keep
    nothing of them (vLLM 0.24 `config/vllm.py`; SGLang 0.5.14 `server_args.py`). InputError where the engine cannot, or
    something of the deployment is for outputs alone."""
    behaviour = behaviour_of(resolved.name).pooling
    if behaviour is None or resolved.scheduler not in SCHEDULERS:
        raise InputError(
            f"embeddings and scores with {resolved.name} and its scheduler {resolved.scheduler} are not modelled",
            "use vllm or sglang, or set workload.task to generate",
        )
    if resolved.speculative is not None:
        raise InputError(
            "engine.speculative drafts output tokens, which embeddings and scores do not have",
            "leave engine.speculative out, or set workload.task to generate",
        )
    given = deployment.engine
    if model.is_encoder:
        resolved = msgspec.structs.replace(resolved, enable_chunked_prefill=False, enable_prefix_caching=False)
    taken = {name: getattr(behaviour, name) for name in POOLING if getattr(given, name) is None}
    return msgspec.structs.replace(resolved, **{name: value for name, value in taken.items() if value is not None})


def read_task(reading: Reading) -> None:
    """Set the workload's task where a server's options, or its model, say that it makes vectors or scores.

    An encoder needs no option (vLLM's `--runner auto`; SGLang 0.5 `is_generation_model`). InputError for options that
    do not go together, or with the model.
    """
    asked = {name: str(reading.later[name]) for name in ("task", "convert", "runner") if reading.later.get(name)}
    words = {f"--{name} {reading.taken.get(f'--{name}', '')}".strip(): task for name, task in asked.items()}
    kinds = {task if name != "runner" or task == GENERATE else "" for name, task in asked.items()} - {""}
    if len(kinds) > 1 or (GENERATE in kinds and len(set(asked.values())) > 1):
        raise InputError(f"--from-command: {' and '.join(words)} do not go together", "keep one of them")
    task = next(iter(asked.values()), None)
    with suppress(InputError):  # a model that is not known here is refused where it is needed
        if task is None and reading.model.is_encoder:
            task = "embed"
    if task == GENERATE and reading.model.is_encoder:
        raise InputError(
            f"--from-command: {next(iter(words))}, but {reading.model.name} is an encoder, which makes no text",
            "leave that out: vectors and scores need no option",
        )
    if task not in (None, GENERATE):
        set_path(reading.raw, "workload.task", task)


def lora_options(engine: EngineSettings, max_loras: str, max_cpu_loras: str) -> Iterator[tuple[str, Any]]:
    """Yield the options of a server that serves adapters, with an engine's names of two of them."""
    if engine.lora is None:
        return
    yield "enable-lora", None
    yield "max-lora-rank", engine.lora.rank
    for name, value in ((max_loras, engine.lora.max_loras), (max_cpu_loras, engine.lora.max_cpu_loras)):
        if value is not None:
            yield name, value
