"""`windtunnel warm`: compile the loops that runs need, so that the first run of each kind starts at once."""

from typing import Any

from windtunnel.cli.output import remark
from windtunnel.cli.progress import status
from windtunnel.cli.verbs import Options
from windtunnel.serving.shorthand import scenario
from windtunnel.serving.simulate import simulate

COMMON: dict[str, Any] = {"model": "llama-3.2-1b", "device": "h100_sxm", "input_tokens": 64, "output_tokens": 8}
SHARED: dict[str, Any] = {"workload.shared_prompts": {"count": 2, "alpha": 1, "tokens": 32}}
FORMS: dict[str, dict[str, Any]] = {
    "vLLM": {"deployment.engine.name": "vllm"},
    "SGLang": {"deployment.engine.name": "sglang"},
    "TensorRT-LLM": {"deployment.engine.name": "trtllm"},
    "vLLM with shared prompts": {"deployment.engine.name": "vllm", **SHARED},
    "SGLang with shared prompts": {"deployment.engine.name": "sglang", **SHARED},
    "prefill and decode pools": {
        "deployment.pools": [{"name": role, "role": role, "replicas": 1} for role in ("prefill", "decode")]
    },
}
"""What runs most often -> its settings; each compiles a form of the serving loop."""


def command(_options: Options) -> None:
    """Simulate a few requests in each form."""
    with status() as show:
        for number, (name, settings) in enumerate(FORMS.items(), start=1):
            show(f"compiling form {number} of {len(FORMS)}: {name}, about ten seconds")
            simulate(scenario(**COMMON, settings=settings, concurrency=2, num_requests=4))
    remark(f"compiled {len(FORMS)} forms of the serving loop: {', '.join(FORMS)}")
