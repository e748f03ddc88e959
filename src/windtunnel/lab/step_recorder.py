"""Record the steps of a vLLM server: what each computed and how long it took.

vLLM loads this plug-in by itself where Windtunnel is installed beside it. It does nothing unless the variable
WINDTUNNEL_STEPS names a file:

    WINDTUNNEL_STEPS=steps.csv vllm serve ...

`windtunnel observe`, `diagnose` and `validate --steps` read the file. For vLLM's V1 scheduler; run with 0.24 and 0.32.
"""

import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import pvariance
from typing import Any

_LOG = logging.getLogger("windtunnel.lab")

VARIABLE = "WINDTUNNEL_STEPS"
"""Environment variable that names the file."""
HEADER = (
    "worker_id,dp_rank,counter_id,sum_prefill_tokens,num_prefill_requests,sum_prefill_kv_tokens,var_prefill_length,"
    "num_decode_requests,sum_decode_kv_tokens,var_decode_kv_tokens,queued_prefill_requests,latency_ms,ended_time_s"
)


def register() -> None:
    """Wrap vLLM's scheduler where `VARIABLE` names a file; vLLM calls this in each of its processes."""
    if path := os.environ.get(VARIABLE):
        from vllm.v1.core.sched.scheduler import Scheduler

        watch(Scheduler, Path(path))


def watch(scheduler_class: Any, path: Path) -> None:
    """Let every scheduler of a class append its steps to a file."""
    if not hasattr(scheduler_class.schedule, "__wrapped__"):
        scheduler_class.schedule = _noting_the_batch(scheduler_class.schedule)
        scheduler_class.update_from_output = _writing_the_step(scheduler_class.update_from_output, path)


class StepRecorder:
    """Lines of one scheduler's steps.

    A step lasts from the moment that it is scheduled, or that the step before it ends where it is scheduled ahead,
    until its tokens are back.
    """

    def __init__(self, path: Path, dp_rank: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.output = path.open("a", buffering=1, encoding="utf-8")  # a line at a time: servers are killed
        self.dp_rank = dp_rank
        self.count = 0
        self.ended_s = 0.0
        if not path.stat().st_size:
            self.output.write(HEADER + "\n")

    def write(self, batch: str, started_s: float, ended_s: float) -> None:
        """Append a step; clocks in seconds."""
        latency_s = ended_s - max(started_s, self.ended_s)
        self.count, self.ended_s = self.count + 1, ended_s
        self.output.write(
            f"{os.getpid()},{self.dp_rank},{self.count},{batch},{latency_s * 1e3:.4f},{time.time():.4f}\n"
        )


def _noting_the_batch(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def noting(scheduler: Any, *arguments: Any, **options: Any) -> Any:
        started_s = time.monotonic()
        output = schedule(scheduler, *arguments, **options)
        if output.num_scheduled_tokens:
            prompts: list[tuple[int, int, int]] = []
            contexts: list[int] = []
            for name, computed in output.num_scheduled_tokens.items():
                request = scheduler.requests[name]
                before = request.num_computed_tokens - computed
                if before < request.num_prompt_tokens:
                    prompts.append((computed, before, request.num_prompt_tokens))
                else:
                    contexts.append(before + computed)
            tokens, cached, lengths = ([prompt[place] for prompt in prompts] for place in range(3))
            output.windtunnel_step = (
                (
                    f"{sum(tokens)},{len(prompts)},{sum(cached)},{pvariance(lengths or [0]):.1f},"
                    f"{len(contexts)},{sum(contexts)},{pvariance(contexts or [0]):.1f},{len(scheduler.waiting)}"
                ),
                started_s,
            )
        return output

    return noting


def _writing_the_step(update: Callable[..., Any], path: Path) -> Callable[..., Any]:
    @functools.wraps(update)
    def writing(scheduler: Any, output: Any, *arguments: Any, **options: Any) -> Any:
        ended_s = time.monotonic()
        step = getattr(output, "windtunnel_step", None)
        if step and getattr(scheduler, "windtunnel_recorder", True):
            try:
                if not hasattr(scheduler, "windtunnel_recorder"):
                    rank = int(getattr(scheduler.vllm_config.parallel_config, "data_parallel_rank", 0))
                    scheduler.windtunnel_recorder = StepRecorder(path, rank)
                recorder: StepRecorder = scheduler.windtunnel_recorder
                recorder.write(step[0], step[1], ended_s)
            except OSError as error:  # a server goes on without its record
                scheduler.windtunnel_recorder = None
                _LOG.warning("steps are not recorded: %s cannot be written: %s", path, error.strerror)
        return update(scheduler, output, *arguments, **options)

    return writing
