"""TensorRT-LLM, from 0.20 on: the PyTorch backend."""

from windtunnel.serving.engines.contract import Engine
from windtunnel.serving.engines.trtllm.command_line import COMMAND_LINE
from windtunnel.serving.engines.trtllm.graphs import captured_sizes, most_tokens_in_pieces

ENGINE = Engine(captured_sizes=captured_sizes, command_line=COMMAND_LINE, most_tokens_in_pieces=most_tokens_in_pieces)
