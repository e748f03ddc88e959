"""Result files of benchmark clients: vLLM's and SGLang's `bench_serving`, GenAI-Perf and AIPerf, guidellm.

They state what was sent and measured, not what served it: the user describes the deployment. All report the time to the
first token, the time per output token after it, and throughput, with the same definitions. guidellm's
`time_per_output_token`, which spreads the first token's time too, is ignored in favour of its `inter_token_latency`.
Load tests of web servers, Locust's and k6's, know only the end-to-end time of requests and those that failed.

Versions: vLLM 0.6 to 0.24, SGLang 0.4 and 0.5, AIPerf 0.1 to 0.13, guidellm 0.2 to 0.5, TensorRT-LLM 1. Refused: files
of other clients, negative times, and loads of AIPerf that are neither a constant concurrency nor a constant rate.
"""

from windtunnel.formats.clients import read, web

FORMATS = (*read.FORMATS, *web.FORMATS)
__all__ = ["FORMATS"]
