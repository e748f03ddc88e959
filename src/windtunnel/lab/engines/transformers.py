"""Step the continuous batching of transformers inside this process, on a clock of CPU time or of the wall.

Written for transformers 5.19, whose manager runs the same three calls (prepare a batch, compute it, take in its tokens)
in a thread of its own.
"""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.errors import InputError
from windtunnel.lab.servers import OFFLINE, EngineServer
from windtunnel.lab.stepped import OVERHEAD_TOKENS, EngineStep

PAGE_TOKENS = 256
"""Tokens of a block: the engine's own default."""
SERVER = EngineServer(
    ("-c", "from transformers.cli.transformers import main; main()", "serve", "--continuous-batching"),
    environment=OFFLINE,
)


def version() -> str:
    """Return the installed version.

    Raises:
        InputError: transformers is not installed, or older than the present form of continuous batching.
    """
    from importlib import metadata

    try:
        installed = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise InputError("transformers is not installed", "see docs/guides/bench.md") from None
    if int(installed.partition(".")[0]) < 5:
        raise InputError(f"transformers {installed} is too old to be stepped", "install transformers 5.19 or newer")
    return installed


class TransformersEngine:
    """A `ContinuousBatchingManager` of transformers with random weights for a config.json, first in, first out.

    Args:
        num_blocks: blocks of `PAGE_TOKENS` tokens in every layer.

    Raises:
        InputError: transformers is not installed.
    """

    def __init__(
        self, config: Mapping[str, Any], max_num_seqs: int, max_num_batched_tokens: int, num_blocks: int = 64
    ) -> None:
        version()
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        of_type = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **of_type), dtype=torch.float32
        )
        self.now = time.process_time
        self.manager = model.init_continuous_batching(
            # An end that is never drawn: answers have the requested length.
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=num_blocks,
                max_batch_tokens=max_num_batched_tokens,
                max_requests_per_batch=max_num_seqs,
                allow_block_sharing=False,
                use_async_batching=False,
                use_cuda_graph=False,
                scheduler_type="fifo",
            ),
        )
        self.processor = self.manager._create_batch_processor()
        self.manager.batch_processor = self.processor
        self._batch: list[Any] = []
        self._watch_schedule()

    def add(self, name: str, prompt: Sequence[int], output_tokens: int) -> None:
        """Queue a request that ends after exactly `output_tokens`."""
        self.manager.add_request(list(prompt), name, max_new_tokens=output_tokens)

    def step(self) -> EngineStep:
        """Schedule, compute and process one batch."""
        self._batch = []
        begin_s = self.now()
        if not self.processor.prepare_next_batch():
            return EngineStep({}, self.now() - begin_s, 0.0, 0.0, 0.0, {})
        prepared_s = self.now()
        self.processor._generation_step(self.manager.model)
        computed_s = self.now()
        self.processor.update_batch()
        end_s = self.now()
        states = {entry.state.request_id: entry.state for entry in self._batch}
        return EngineStep(
            scheduled={entry.state.request_id: int(entry.query_length) for entry in self._batch},
            step_s=end_s - begin_s,
            schedule_s=prepared_s - begin_s,
            forward_s=computed_s - prepared_s,
            process_s=end_s - computed_s,
            progressed={name: int(state.generated_len()) for name, state in states.items()},
        )

    def close(self) -> None:
        """End the engine."""
        self.processor.reset()

    def drop(self, names: Sequence[str]) -> None:
        """Abort requests; the next step clears them away."""
        for name in names:
            self.processor.scheduler.set_request_cancellation(name)

    def _watch_schedule(self) -> None:
        """Record the scheduler's choice for the current step."""
        schedule = self.processor.scheduler.schedule_batch

        def watched(*arguments: Any) -> Any:
            scheduled = schedule(*arguments)
            self._batch = list(scheduled[0] or ())
            return scheduled

        self.processor.scheduler.schedule_batch = watched


def start_stepped(config: Mapping[str, Any], batch: int) -> TransformersEngine:
    """Start the engine for the overheads of up to `batch` requests."""
    return TransformersEngine(config, batch, max(OVERHEAD_TOKENS, batch), 2 * batch + 2)
