"""TensorRT-LLM's CUDA graphs."""

from windtunnel.model.shape import Shard
from windtunnel.serving.deployment import EngineSettings
from windtunnel.units import version_key

FINE_SINCE = "1.3.0rc13"
"""From it on, sizes beyond 128 are multiples of 64 (pull request 12895, merged in April 2026; the release is assumed).
"""


def captured_sizes(engine: EngineSettings) -> list[int]:
    """Return the decode batches that have a CUDA graph; the largest is one.

    Source: `tensorrt_llm/llmapi/llm_args.py`, `CudaGraphConfig._generate_cuda_graph_batch_sizes` (1.0 to 1.3).
    """
    largest = engine.max_cudagraph_capture_size or 0
    doubled = [1 << power for power in range(8, largest.bit_length())]
    if engine.cudagraph_padding is False:
        sizes = [*range(1, 32), 32, 64, 128, *doubled]
    elif engine.version is None or version_key(engine.version) >= version_key(FINE_SINCE):
        sizes = [1, 2, 4, *range(8, 129, 8), *range(192, largest + 1, 64)]
    else:
        sizes = [1, 2, 4, *range(8, 129, 8), *doubled]
    return sorted({*(size for size in sizes if size <= largest), largest})


def most_tokens_in_pieces(_shard: Shard, engine: EngineSettings, largest: float) -> float:
    """Return the tokens up to which a step with prefill runs in piecewise graphs.

    Source: `tensorrt_llm/_torch/pyexecutor/model_engine.py`, `_piecewise_cuda_graph_num_tokens` (1.0 to 1.2).
    """
    return largest if engine.piecewise_sizes is None else float(max(engine.piecewise_sizes, default=0))
