"""SGLang, from 0.4 on."""

from windtunnel.serving.codes import LONGEST_PREFIX_MATCH, QUEUE_ORDERS
from windtunnel.serving.engines.contract import Engine, Scheduler
from windtunnel.serving.engines.sglang.command_line import COMMAND_LINE
from windtunnel.serving.engines.sglang.launches import LAUNCHES
from windtunnel.serving.engines.sglang.limits import split_over_ranks
from windtunnel.serving.engines.sglang.memory import static_memory_fraction

ENGINE = Engine(
    schedulers={
        "sglang": Scheduler(
            title="SGLang scheduler",
            reads=(
                "max_num_batched_tokens",
                "max_prefill_tokens",
                "enable_chunked_prefill",
                "schedule_conservativeness",
                "receive_interval_steps",
                "fused_all_reduce",
            ),
            orders=(*QUEUE_ORDERS, LONGEST_PREFIX_MATCH),
            window_kv=("full", "own_pool"),
            split_over_ranks=split_over_ranks,
            memory_share=static_memory_fraction,
            share_has_activations=False,
            counts_free_blocks=True,
            decode_computes_first_token=False,
        )
    },
    launches=LAUNCHES,
    command_line=COMMAND_LINE,
    # disaggregation/decode.py, `stream_output` of a prebuilt batch (0.5)
    decode_streams_first=True,
)
