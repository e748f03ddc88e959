"""How fast the serving simulation is: the loop alone, the whole process, and what either does not depend on.

Every figure is checked against the work it stands for (tokens decoded, requests finished), and compared in one run:
with the plain Python engine, with another batch size, with the start of an empty interpreter.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import windtunnel as wt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the oracle is a test

from oracles.serving.deployment import ReferenceDeployment
from oracles.serving.state import Request
from windtunnel.serving.run import prepare_loop
from windtunnel.serving.setup.estimators import estimator_for, shard_of
from windtunnel.serving.setup.kernel_settings import kernel_settings
from windtunnel.serving.setup.memory import plan_memory
from windtunnel.serving.setup.step_prices import DeployedModel, lower_steps
from windtunnel.serving.state.pools import PoolPlan
from windtunnel.serving.state.records import KernelSettings, StepCost
from windtunnel.workload.generate.requests import RequestArrays, generate

MODEL: dict[str, Any] = {"model": "meta-llama/Llama-3.1-8B", "device": "h100_sxm", "quant": "fp8"}
REPEATS = 3


def prepared(
    concurrency: int, num_requests: int, input_tokens: Any, output_tokens: Any
) -> tuple[KernelSettings, StepCost, RequestArrays]:
    """KernelSettings, cost and requests of a closed loop, so that only the loop is timed."""
    scenario = wt.scenario(
        **MODEL,
        concurrency=concurrency,
        num_requests=num_requests,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        settings={"deployment.engine.num_gpu_blocks": 10_000_000},
    )
    setup = wt.resolve(scenario)
    requests = generate(scenario.workload, scenario.seed)
    shard = shard_of(setup)
    longest = int((requests.input_tokens + requests.output_tokens).max())
    memory = plan_memory(shard, setup.device, setup.engine, longest)
    settings = kernel_settings(setup, memory, 1, requests)
    deployed = DeployedModel(setup.device, shard, setup.engine, longest)
    return settings, lower_steps(estimator_for(setup), deployed).cost, requests


def timed_loop(settings: KernelSettings, cost: StepCost, requests: RequestArrays) -> tuple[float, int, int]:
    """Best wall time of the loop, steps and rows; asserts that every token was produced."""
    best_s = np.inf
    for _ in range(REPEATS):
        run = prepare_loop([PoolPlan(settings, cost)], requests).run()
        records, steps = run.requests, run.steps
        assert np.isfinite(records["finish_s"]).all()
        assert (steps["decode_tokens"] * steps["num_steps"]).sum() == (requests.output_tokens - 1).sum()
        best_s = min(best_s, run.engine_time_s)
    return best_s, int(steps["num_steps"].sum()), len(steps)


def uniform(least: int, most: int) -> dict[str, object]:
    """Lengths from `least` to `most`, as in a scenario file."""
    return {"type": "uniform", "min_tokens": least, "max_tokens": most}


def loop_speed() -> None:
    """Requests per second at 1,024 in / 256 out, fixed and drawn lengths."""
    drawn = (uniform(819, 1024), uniform(204, 256))
    print("| loop alone, one core | requests | steps | seconds | requests/s | steps/s |\n|---|---|---|---|---|---|")
    for name, lengths in (("1,024 in / 256 out, batch 128", (1024, 256)), ("80-100% of those, batch 128", drawn)):
        settings, cost, requests = prepared(128, 400_000, *lengths)
        loop_s, num_steps, _ = timed_loop(settings, cost, requests)
        n = requests.num_requests
        print(f"| {name} | {n:,} | {num_steps:,} | {loop_s:.3f} | {n / loop_s:,.0f} | {num_steps / loop_s:,.0f} |")


def flat_in_batch() -> None:
    """Seconds per decode step as the batch grows, with few other events."""
    print("\n| batch | steps | ns per step | against batch 16 |\n|---|---|---|---|")
    first = 0.0
    for batch in (16, 64, 256, 1024):
        settings, cost, requests = prepared(batch, batch, 1024, 80_000)
        loop_s, num_steps, _ = timed_loop(settings, cost, requests)
        per_step = loop_s / num_steps * 1e9
        first = first or per_step
        print(f"| {batch} | {num_steps:,} | {per_step:.1f} | {per_step / first:.2f}x |")


def against_plain_python() -> None:
    """The compiled loop against the same semantics in plain Python."""
    settings, cost, requests = prepared(128, 512, 1024, 256)
    loop_s, num_steps, _ = timed_loop(settings, cost, requests)
    copies = [
        Request(i, 0.0, int(requests.input_tokens[i]), int(requests.output_tokens[i]))
        for i in range(requests.num_requests)
    ]
    started_s = time.perf_counter()
    steps = ReferenceDeployment([PoolPlan(settings, cost)], copies).run()
    plain_s = time.perf_counter() - started_s
    assert len(steps) == num_steps
    print(f"\ncompiled loop against the plain Python engine, same {num_steps:,} steps: {plain_s / loop_s:,.0f}x")


def process_times() -> None:
    """Whole processes: wall seconds, best of three; the first run compiles into an empty cache."""
    simulate = [
        *(sys.executable, "-m", "windtunnel", "simulate"),
        *("--model", "meta-llama/Llama-3.1-70B", "--device", "h100_sxm"),
        *("--tp", "4", "--quant", "fp8", "--input-tokens", "1024", "--output-tokens", "1024"),
        *("--concurrency", "64", "--num-requests", "10000", "--json"),
    ]
    empty_s = min(process_s([sys.executable, "-c", "pass"]) for _ in range(REPEATS))
    print("\n| whole process | seconds | against an empty interpreter |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as cache:
        first_s = process_s(simulate, XDG_CACHE_HOME=cache)
    rows = [("simulate, 10,000 requests, first run ever (compiles)", first_s)]
    rows += [("simulate, 10,000 requests, warm", min(process_s(simulate) for _ in range(REPEATS)))]
    help_command = [sys.executable, "-m", "windtunnel", "--help"]
    rows += [("--help", min(process_s(help_command) for _ in range(REPEATS)))]
    for name, seconds in rows:
        print(f"| {name} | {seconds:.3f} | {seconds / empty_s:.0f}x |")


def process_s(command: list[str], **environment: str) -> float:
    quiet = subprocess.DEVNULL
    started_s = time.perf_counter()
    subprocess.run(command, check=True, stdout=quiet, stderr=quiet, env=os.environ | environment)
    return time.perf_counter() - started_s


def a_million_requests() -> None:
    """Peak memory and time of one million requests in a process of its own."""
    program = f"""
import resource, time, windtunnel as wt
scenario = wt.scenario(**{MODEL!r}, concurrency=128, num_requests=1_000_000,
                       input_tokens={uniform(819, 1024)!r}, output_tokens={uniform(204, 256)!r})
started_s = time.perf_counter()
result = wt.simulate(scenario)
assert result.summary.num_requests == 1_000_000
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(f"one million requests: {{time.perf_counter() - started_s:.2f}} s in all, "
      f"loop {{result.engine_time_s:.2f}} s, peak {{peak:.2f}} GiB")
"""
    print()
    print(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip())


if __name__ == "__main__":
    settings, cost, requests = prepared(8, 16, 64, 16)
    prepare_loop([PoolPlan(settings, cost)], requests).run()
    loop_speed()
    flat_in_batch()
    against_plain_python()
    process_times()
    a_million_requests()
