"""SGLang, from 0.4 on."""

from windtunnel.serving.engines.contract import Engine
from windtunnel.serving.engines.sglang.command_line import COMMAND_LINE
from windtunnel.serving.engines.sglang.limits import (
    captured_sizes,
    graphs_for_requests,
    most_tokens_in_pieces,
    split_over_ranks,
    static_memory_fraction,
)

ENGINE = Engine(
    limited=graphs_for_requests,
    split_over_ranks=split_over_ranks,
    memory_share=static_memory_fraction,
    most_tokens_in_pieces=most_tokens_in_pieces,
    captured_sizes=captured_sizes,
    command_line=COMMAND_LINE,
)
