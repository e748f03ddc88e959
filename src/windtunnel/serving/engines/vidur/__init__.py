"""The schedulers of Vidur, which may be chosen in place of an engine's own; they have no engine of their own here."""

from pathlib import Path
from typing import Any

from windtunnel.serving.engines.contract import Engine, Scheduler

SETTINGS = Path(__file__).with_name("schedulers.yaml")
LEAST_WHOLE_PROMPT_TOKENS = 2048
"""vllm/config.py, `SchedulerConfig.__post_init__`, 0.4 to 0.7: max(max_model_len, 2048) without chunked prefill."""


def _scheduler(*reads: str, **behaviour: Any) -> Scheduler:
    return Scheduler(reads=(*reads, "fused_all_reduce"), settings=SETTINGS, **behaviour)


ENGINE = Engine(
    schedulers={
        "vllm_v0": _scheduler(
            "max_num_batched_tokens", "watermark_fraction", least_whole_prompt_tokens=LEAST_WHOLE_PROMPT_TOKENS
        ),
        "sarathi": _scheduler("max_num_batched_tokens", "watermark_fraction"),
        "orca": _scheduler(reserves_longest=True),
        "faster_transformer": _scheduler(reserves_longest=True),
        "lightllm": _scheduler("max_num_batched_tokens", "max_waiting_steps"),
    }
)
