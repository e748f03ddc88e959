"""`windtunnel warm`: compile the loops that runs need, so that the first run of each kind starts at once."""

from typing import Any

from windtunnel.cli.output import remark
from windtunnel.cli.progress import status
from windtunnel.cli.verbs import Options
from windtunnel.serving.shorthand import scenario
from windtunnel.serving.simulate import simulate
from windtunnel.twin.live import LiveLoop, prepare_live

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
SERVED = "vLLM", "SGLang"
"""Forms that `windtunnel serve` has too, in code of their own."""


def command(_options: Options) -> None:
    """Simulate a few requests in each form, and start a server in some."""
    total = len(FORMS) + len(SERVED)
    with status() as show:
        for number, (name, settings) in enumerate(FORMS.items(), start=1):
            show(f"compiling form {number} of {total}: {name}, about ten seconds")
            simulate(scenario(**COMMON, settings=settings, concurrency=2, num_requests=4))
        for number, name in enumerate(SERVED, start=len(FORMS) + 1):
            show(f"compiling form {number} of {total}: a server of {name}, about ten seconds")
            LiveLoop(prepare_live(scenario(**COMMON, settings=FORMS[name], rate_per_s=1), max_requests=4), 4).start()
    names = [*FORMS, *(f"servers of {name}" for name in SERVED)]
    remark(f"compiled {total} forms of the serving loop: {', '.join(names)}")
