"""TensorRT-LLM, from 0.20 on: the PyTorch backend."""

from windtunnel.serving.engines.contract import Engine, Launches, Scheduler
from windtunnel.serving.engines.trtllm.command_line import COMMAND_LINE

READS = (
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "enable_chunked_prefill",
    "batch_wait_timeout_iters",
    "batch_wait_max_tokens_ratio",
    "attention_dp_timeout_iters",
    "attention_dp_batching_wait_iters",
)
"""Settings that both policies read, `fused_all_reduce` not among them: its own all-reduce is the kernel that others may
call."""
WINDOW_KV = ("full", "own_pool")

ENGINE = Engine(
    schedulers={
        "trtllm": Scheduler(title="TensorRT-LLM scheduler", reads=READS, window_kv=WINDOW_KV, never_preempts=True),
        "trtllm_max_utilization": Scheduler(
            title="TensorRT-LLM scheduler, max utilization", reads=READS, window_kv=WINDOW_KV
        ),
    },
    launches=Launches(fuses_experts=True),
    command_line=COMMAND_LINE,
    # _torch/pyexecutor/py_executor.py, `_handle_first_token_response` of the scheduled generation requests whose
    # transfer is complete (1.1 to 1.3)
    decode_streams_first=True,
)
