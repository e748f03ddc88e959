"""How fast a user's own scheduler runs: the example's, in plain Python and compiled, beside the built-in one."""

import importlib.util
import time
from pathlib import Path
from typing import Any

import windtunnel as wt

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "09_own_scheduler.py"


def example() -> Any:
    """The module of the example, its output dropped."""
    import contextlib
    import io

    spec = importlib.util.spec_from_file_location("own_scheduler", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with contextlib.redirect_stdout(io.StringIO()):
        spec.loader.exec_module(module)
    return module


def main() -> None:
    module = example()
    scenario = wt.scenario(
        model="meta-llama/Llama-3.1-8B",
        device="h100_sxm",
        quant="fp8",
        concurrency=64,
        input_tokens=512,
        output_tokens=128,
        num_requests=20_000,
    )
    rates = {}
    for name, policy in (
        ("vLLM V1, built in", None),
        ("plain Python", module.shortest_first),
        ("compiled", module.shortest_first_compiled),
    ):
        wt.simulate(scenario, policy=policy)
        result = wt.simulate(scenario, policy=policy)
        steps = int(result.steps["num_steps"].sum())
        assert len(result.requests) == 20_000
        rates[name] = 20_000 / result.engine_time_s
        print(f"{name:18} {rates[name]:12,.0f} requests/s  {result.engine_time_s / steps * 1e6:8.2f} us a step")
    print(f"compiled / plain   {rates['compiled'] / rates['plain Python']:12.1f}")


if __name__ == "__main__":
    started_s = time.perf_counter()
    main()
    print(f"({time.perf_counter() - started_s:.0f} s)")
