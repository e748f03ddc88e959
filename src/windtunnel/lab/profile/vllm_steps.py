"""Steps of a real vLLM engine, timed operator by operator inside its forward."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from windtunnel.errors import InputError
from windtunnel.lab.engines.vllm import VllmEngine, VllmSettings
from windtunnel.lab.profile.compute import ComputePlan
from windtunnel.lab.profile.model import StepShape, check_profilable, operators_of
from windtunnel.lab.profile.samples import MeasuredStep, Repeats
from windtunnel.lab.stepped import EngineStep
from windtunnel.lab.timing import CLOCKS_OF_HOST, Stopwatch
from windtunnel.model.precision import Format
from windtunnel.model.shape import Shard

DECODE_REPEATS = 16
"""Pairs of decode steps; most of the time goes into the prompts, not into the steps."""
WARM_UPS = 2


@dataclass
class VllmStepper:
    """Steps of a real engine, alternately with timers inside the forward and without."""

    engine: VllmEngine
    shard: Shard
    clock: Callable[[], float] = time.process_time
    host: list[EngineStep] = field(default_factory=list)
    """Every step without timers inside."""
    contexts: list[float] = field(default_factory=list)
    """Mean keys of the decoding requests, the new one included, at every step of the last measurement."""
    num_added: int = 0

    def __post_init__(self) -> None:
        self.hook_s = hook_cost_s(self.clock)
        self.max_cached = self.engine.num_blocks * self.engine.block_size // 2

    def fits(self, shape: StepShape) -> bool:
        settings = self.engine.settings
        return (
            shape.num_tokens <= settings.max_num_batched_tokens
            and shape.batch <= settings.max_num_seqs
            and shape.batch * (shape.context + shape.chunk) <= self.max_cached
        )

    def measure(self, shape: StepShape) -> MeasuredStep:
        repeats, self.contexts = Repeats(), []
        runs = self._prefills(shape, repeats) if shape.chunk else self._decodes(shape)
        core = "attention_prefill" if shape.chunk else "attention_decode"
        durations: dict[str, list[float]] = {}
        for number, run in enumerate(runs, -WARM_UPS):
            if number < 0:
                run()
            elif number % 2 == 0:
                watch = Stopwatch(self.clock, mark_s=self.hook_s)
                with self.engine.watched(watch):
                    run()
                durations = watch.durations()
                durations[core] = durations.pop("attention")
            else:
                step = run()
                repeats.add(durations, step.forward_s)
                self.host.append(step)
        met = shape if shape.chunk else replace(shape, context=round(float(np.mean(self.contexts))))
        return replace(repeats.step(met, operators_of(self.shard, self.shard.model.layers[0], met)), shape=shape)

    def _decodes(self, shape: StepShape) -> Iterator[Callable[[], EngineStep]]:
        """Yield decode steps with contexts around the one of `shape`.

        Requests that prefill early decode while the others do; prompts are so much shorter that the mean comes out.
        """
        total = 2 * DECODE_REPEATS + WARM_UPS
        early = -(-shape.batch * shape.context // self.engine.settings.max_num_batched_tokens)
        prompt = max(shape.context - 1 - WARM_UPS - DECODE_REPEATS - early // 2, 1)
        names = self._added(shape.batch, prompt, total + early + shape.batch + 1)
        while not all(request.num_computed_tokens >= request.num_prompt_tokens for request in self._requests()):
            self.engine.step()
        for _ in range(total):
            self.contexts.append(float(np.mean([request.num_computed_tokens + 1 for request in self._requests()])))
            yield self.engine.step
        self.engine.drop(names)

    def _prefills(self, shape: StepShape, repeats: Repeats) -> Iterator[Callable[[], EngineStep]]:
        """Yield last chunks of prompts until there are enough repeats; earlier chunks run outside the timers."""
        while not repeats.is_enough:
            names = self._added(shape.batch, shape.context + shape.chunk, 1)
            left = shape.context
            while left:
                with self.engine.token_budget(min(left, self.engine.settings.max_num_batched_tokens)):
                    left -= sum(self.engine.step().scheduled.values())
            yield self.engine.step
            self.engine.drop(names)

    def _added(self, batch: int, prompt: int, output_tokens: int) -> list[str]:
        names = [f"r{self.num_added + number}" for number in range(batch)]
        self.num_added += batch
        vocabulary = -(-self.shard.model.vocab_size // self.shard.tp)
        for number, name in enumerate(names):
            ids = np.random.default_rng(number).integers(3, vocabulary, prompt)
            self.engine.add(name, ids.tolist(), output_tokens)
        return names

    def _requests(self) -> list[Any]:
        return list(self.engine.scheduler.requests.values())


def hook_cost_s(now: Callable[[], float]) -> float:
    """Measure the cost of a mark in a hook: many calls of a module that does nothing, with the hook and without."""
    import torch

    plain, hooked, nothing = torch.nn.Identity(), torch.nn.Identity(), torch.zeros(1)
    watch = Stopwatch(now)
    hooked.register_forward_hook(lambda *_given: watch.mark("empty"))

    def call_s(module: Any) -> float:
        before_s = now()
        for _ in range(100):
            module(nothing)
        return (now() - before_s) / 100

    return float(np.median([call_s(hooked) - call_s(plain) for _ in range(25)]))


def sharded_config(config: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """Return the config of a model as large as one of `tp` shards: fewer heads, narrower layers, smaller vocabulary.
    InputError where the split does not divide it."""
    shard_config = dict(config)
    heads = int(shard_config["num_attention_heads"])
    shard_config.setdefault("head_dim", int(shard_config["hidden_size"]) // heads)
    for name in ("num_attention_heads", "intermediate_size", "moe_intermediate_size", "vocab_size"):
        if name in shard_config:
            if int(shard_config[name]) % tp:
                raise InputError(f"tp = {tp} does not divide {name} = {shard_config[name]}")
            shard_config[name] = int(shard_config[name]) // tp
    kv_heads = int(shard_config.get("num_key_value_heads") or heads)
    shard_config["num_key_value_heads"] = max(kv_heads // tp, 1)
    return shard_config


def vllm_steppers(shard: Shard, plan: ComputePlan, host: list[EngineStep]) -> Iterator[VllmStepper]:
    """Yield the stepper of a vLLM engine that holds one shard; its steps without timers are added to `host`. InputError
    where the model has layers of several kinds, or no config.json."""
    check_profilable(shard)
    if plan.config is None:
        raise InputError(f"vLLM needs the config.json of {shard.model.name}", "give its path as --model")
    if plan.clock not in CLOCKS_OF_HOST:
        raise InputError(
            "the operators of vLLM are timed on the host's clock, and run on the GPU here",
            "lab run --engine vllm --mode torch, then profile from-trace; or --engine torch; or --torch-device cpu",
        )
    if len(shard.model.layers) > 1:
        raise InputError(f"{shard.model.name} has layers of {len(shard.model.layers)} kinds; vLLM's are timed of one")
    now = CLOCKS_OF_HOST[str(plan.clock)]
    # Measured requests decode a while before and after the wanted context.
    longest = 2 * plan.max_context + 4 * plan.max_batch
    positions = max(longest, int(plan.config.get("max_position_embeddings", 0)))
    config = {**plan.config, "max_position_embeddings": positions}
    settings = VllmSettings(
        max_model_len=longest,
        max_num_seqs=plan.max_batch,
        max_num_batched_tokens=plan.max_tokens,
        dtype="float32" if shard.precision.weights == Format.FP32 else "bfloat16",
    )
    engine = VllmEngine(sharded_config(config, shard.tp), settings, now)
    try:
        yield (stepper := VllmStepper(engine, shard, now))
        host += stepper.host
    finally:
        engine.close()
