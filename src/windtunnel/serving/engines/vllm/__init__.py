"""vLLM, from 0.8 on: the V1 engine."""

from windtunnel.serving.engines.contract import Engine
from windtunnel.serving.engines.vllm.command_line import COMMAND_LINE
from windtunnel.serving.engines.vllm.limits import within_budget

ENGINE = Engine(limited=within_budget, command_line=COMMAND_LINE)
