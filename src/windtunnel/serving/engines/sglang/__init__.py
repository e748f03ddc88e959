"""SGLang, from 0.4 on."""

from windtunnel.serving.engines.contract import Engine
from windtunnel.serving.engines.sglang import limits
from windtunnel.serving.engines.sglang.command_line import COMMAND_LINE

ENGINE = Engine(
    limited=limits.graphs_for_requests,
    split_over_ranks=limits.split_over_ranks,
    memory_share=limits.static_memory_fraction,
    most_tokens_in_pieces=limits.most_tokens_in_pieces,
    captured_sizes=limits.captured_sizes,
    command_line=COMMAND_LINE,
)
