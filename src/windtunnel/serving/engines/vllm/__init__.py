"""vLLM, from 0.8 on: the V1 engine."""

from windtunnel.serving.engines.contract import Engine, Scheduler
from windtunnel.serving.engines.vllm.command_line import COMMAND_LINE
from windtunnel.serving.engines.vllm.limits import within_budget
from windtunnel.serving.engines.vllm.memory import SAMPLER_BYTES

ENGINE = Engine(
    schedulers={
        "vllm_v1": Scheduler(
            title="vLLM V1 scheduler",
            reads=(
                "max_num_batched_tokens",
                "long_prefill_token_threshold",
                "enable_chunked_prefill",
                "fused_all_reduce",
            ),
            window_kv=("full", "shared_pool"),
            limited=within_budget,
            sampler_bytes=SAMPLER_BYTES,
        )
    },
    command_line=COMMAND_LINE,
    # Behind Dynamo its prefill side is asked for a single token, and its `NixlConnector` hands off the KV of what lies
    # before (0.10 to 0.24).
    decode_samples_first=True,
)
