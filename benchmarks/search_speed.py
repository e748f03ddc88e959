"""How fast a search is, and whether it finds what it should: every figure is checked against the work it stands for.

A space of 12,544 deployments of one model under a trace of 1,000 requests, on one processor; the capacity that the
search finds against a scan of every load; strategies that ask fewer points against asking all; two workers
against one; and every layout of a training job. CPU seconds, so that other work on the machine does not count.
"""

import os
import sys
import time
from importlib.util import find_spec
from statistics import median
from typing import Any

import msgspec

from windtunnel.metrics.limits import parse_limits
from windtunnel.search.answers import ratio
from windtunnel.search.capacity.capacity import CHECKS, TOLERANCE, capacity, served_at_once
from windtunnel.search.capacity.load import stream_of
from windtunnel.search.capacity.probe import probe
from windtunnel.search.evaluation import evaluate
from windtunnel.search.executors import HERE, ExecutorName, Means
from windtunnel.search.scores import score
from windtunnel.search.space.space import Space, scenario_at, space_from
from windtunnel.search.store import Store
from windtunnel.search.study import Study, search
from windtunnel.serving.priced_deployments import PricedDeployments

WHOLE: dict[str, list[Any]] = {
    "device": ["h100_sxm", "a100_sxm", "l40s", "h200_sxm"],
    "tp": [1, 2, 4, 8],
    "quant": ["bf16", "fp8"],
    "kv_cache": ["bf16", "fp8"],
    "gpu_memory_utilization": [0.8, 0.85, 0.9, 0.95],
    "max_num_batched_tokens": [512, 1024, 2048, 4096, 8192, 16384, 32768],
    "max_num_seqs": [16, 32, 64, 128, 256, 512, 1024],
}
SCANNED = [
    {"device": device, "tp": tp, "max_num_batched_tokens": budget, "trace": trace}
    for device in ("h100_sxm", "l40s")
    for tp in (1, 2)
    for budget in (512, 8192)
    for trace in ("azure2023_conv", "azure2023_code")
] + [
    {"device": "a100_sxm", "tp": tp, "max_num_batched_tokens": 2048, "trace": trace}
    for tp in (1, 4)
    for trace in ("azure2023_conv", "azure2023_code")
]
SCAN_STEP = 0.002


SEEDS = (0, 1, 2)
SMALLER: dict[str, dict[str, Any]] = {
    "70B, code, tp x pp, requests/$": {
        "model": "meta-llama/Llama-3.1-70B",
        "trace": "azure2023_code",
        "vary": {
            "device": ["h100_sxm", "a100_sxm", "h200_sxm"],
            "tp": [1, 2, 4, 8],
            "pp": [1, 2, 4],
            "quant": ["bf16", "fp8"],
            "max_num_batched_tokens": [512, 1024, 2048, 4096, 8192, 16384],
            "max_num_seqs": [16, 32, 64, 128, 256, 512],
        },
        "limits": {"ttft_p90": "2s", "itl_p99": "100ms"},
        "objective": "requests_per_usd",
    },
    "MoE, SGLang, tokens/s/device": {
        "model": "Qwen/Qwen3-30B-A3B",
        "trace": "azure2023_conv",
        "vary": {
            "engine": ["sglang"],
            "device": ["h100_sxm", "h200_sxm"],
            "tp": [1, 2, 4],
            "attention_dp": [1, 2],
            "kv_cache": ["bf16", "fp8"],
            "gpu_memory_utilization": [0.7, 0.8, 0.9],
            "max_num_batched_tokens": [1024, 2048, 4096, 8192],
            "max_num_seqs": [16, 32, 64, 128, 256],
        },
        "limits": {"ttft_p99": "2s", "tpot_p90": "25ms"},
        "objective": "output_tokens_per_s_per_device",
    },
    "pools and whole, $ per M tokens": {
        "model": "meta-llama/Llama-3.1-8B",
        "trace": "azure2023_conv",
        "vary": {
            "device": ["h100_sxm", "l40s"],
            "split": {
                "whole": {"replicas": 1},
                **{
                    f"{prefill}+{decode}": {
                        "deployment.pools": [
                            {"name": "p", "role": "prefill", "replicas": prefill},
                            {"name": "d", "role": "decode", "replicas": decode},
                        ]
                    }
                    for prefill in (1, 2)
                    for decode in (1, 2, 3)
                },
            },
            "tp": [1, 2],
            "quant": ["bf16", "fp8"],
            "max_num_batched_tokens": [512, 2048, 8192],
            "max_num_seqs": [16, 64, 128, 256],
        },
        "limits": {"ttft_p90": "1s", "tpot_p99": "30ms"},
        "objective": "usd_per_million_output_tokens",
        "num_requests": 2000,
    },
}
"""Further spaces that strategies are tried on."""


def space_of(vary: dict[str, Any], **more: Any) -> Space:
    """The benchmark's space; `more` replaces its fields."""
    raw = {
        "model": "meta-llama/Llama-3.1-8B",
        "deployment": {"device": "h100_sxm"},
        "workload": {
            "trace": {"path": "azure2023_conv"},
            "arrivals": {"type": "poisson", "rate_per_s": 1.0},
            "num_requests": 1000,
        },
        "vary": vary,
        "limits": {"ttft_p90": "1s", "tpot_p99": "50ms"},
    }
    return msgspec.structs.replace(space_from(raw), **more)


def timed(space: Space, means: Means = HERE) -> tuple[Study, float, float]:
    """A search with nothing known before: the study, CPU seconds and wall seconds."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    study = search(space, Store(None, print), means)
    return study, time.process_time() - cpu_s, time.perf_counter() - wall_s


def speed() -> None:
    space = space_of(WHOLE)
    study, cpu_s, _ = timed(space)
    found = study.outcomes[0]
    assert len(found.evaluations) == space.num_points
    count = study.count
    print(f"{space.num_points:,} deployments x 1,000 requests on one processor: {cpu_s:.1f} CPU s")
    print(f"  {count.num_runs:,} runs, {count.num_duplicates:,} deployments that serve as a neighbour does")
    print(f"  {1e3 * cpu_s / space.num_points:.2f} ms a deployment")


def spaces() -> dict[str, Space]:
    """Spaces that strategies are tried on, by name."""
    found = {"8B, conversations, requests/$": space_of(WHOLE)}
    for name, told in SMALLER.items():
        raw = msgspec.to_builtins(space_of({"tp": [1]}).scenario)
        raw["model"], raw["workload"]["trace"] = told["model"], {"path": told["trace"]}
        raw["workload"]["num_requests"] = told.get("num_requests", 1000)
        found[name] = space_from({**raw, **{key: told[key] for key in ("vary", "limits", "objective")}})
    return found


def strategies() -> None:
    """What each strategy finds and simulates, against asking all: over several spaces and seeds of their requests.

    The best points' streams are not lengthened, which adds the same requests to every search.
    """
    evaluate.MOST_OF_MANY = 0  # type: ignore[attr-defined]
    print("| space | points | seed | strategy | found, of the best | requests | runs | points run in full | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, space in spaces().items():
        for seed in SEEDS:
            whole, whole_s, _ = timed(msgspec.structs.replace(space, seed=seed))
            print(f"| {name} | {space.num_points:,} | {seed} | exhaustive | | | | | {whole_s:.1f} |", flush=True)
            for strategy in ("halving", "tpe"):
                study, cpu_s, _ = timed(msgspec.structs.replace(space, seed=seed, strategy=strategy))
                shares = (
                    ratio(best_of(study), best_of(whole)),
                    study.count.num_requests / whole.count.num_requests,
                    study.count.num_runs / whole.count.num_runs,
                    whole_streams(study) / whole_streams(whole),
                )
                shown = " | ".join(f"{share:.1%}" for share in shares)
                print(f"| | | | {strategy} | {shown} | {cpu_s:.1f} |", flush=True)


def best_of(study: Study) -> float:
    """The best score with the first stream of requests."""
    return max(score(one, study.space.objective) for one in study.outcomes[0].evaluations.values())


def whole_streams(study: Study) -> int:
    """Points that met all requests."""
    return sum(not one.refused for one in study.outcomes[0].evaluations.values())


def scan() -> None:
    """The capacity that bisection finds against the greatest load of a fine scan up to which every load passes.

    The load next to the answer, at which it was seen to fail, is one of the scan's: it may lie between two others.
    """
    priced, limits = PricedDeployments(), parse_limits("ttft_p90=1s,tpot_p99=50ms")
    worst, runs, scanned = 0.0, 0, 0
    for case in SCANNED:
        base = space_of({"tp": [1]})
        settings = {
            "deployment.device": case["device"],
            "deployment.parallelism.tp": case["tp"],
            "deployment.engine.max_num_batched_tokens": case["max_num_batched_tokens"],
            "workload.trace.path": case["trace"],
        }
        scenario = scenario_at(base, settings)
        stream = stream_of(scenario.workload, 0)
        server = priced.server(scenario, stream.unit)
        found = capacity(server, stream, limits, TOLERANCE, checks=CHECKS)
        runs += found.num_runs
        load = 0.2 * found.load or 0.01 * served_at_once(server, stream)
        last = 0.0
        while probe(server, stream, load, limits).passes:
            last, load = load, load * (1 + SCAN_STEP)
            scanned += 1
            if last < next_to(found.load) <= load and not probe(server, stream, next_to(found.load), limits).passes:
                break
        # A passing load may lie beyond one that fails by chance; the scan also looks there.
        beyond = [load * (1 + SCAN_STEP) ** step for step in range(1, 60)]
        passing = [one for one in beyond if probe(server, stream, one, limits).passes]
        scanned += len(beyond)
        off = found.load / last - 1 if last else 0.0
        worst = max(worst, abs(off))
        islands = f"; passes again up to {max(passing):.3f}" if passing else ""
        print(f"  {case}: {found.load:.3f}, scan {last:.3f} ({off:+.2%}){islands}")
    print(f"capacity of {len(SCANNED)} deployments: off by {worst:.2%} at most; {runs} runs, the scan {scanned:,}")


def next_to(load: float) -> float:
    """The next load of the grid."""
    return load * (1 + TOLERANCE)


def workers() -> None:
    """Two workers against one, in turn, and the CPU seconds that both take: what is done twice or waits shows there.

    Wall times mean something only where two processors are free; a ratio of CPU seconds does anyhow.
    """
    space = space_of(WHOLE)
    names: list[ExecutorName] = ["threads", "processes", *(["ray"] if find_spec("ray") else [])]  # type: ignore[list-item]
    speedups: dict[str, list[float]] = {name: [] for name in names}
    dearer: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        base, one_cpu_s, one_s = timed_whole(space, HERE)
        for name in names:
            study, cpu_s, wall_s = timed_whole(space, Means(name, 2))
            assert study.outcomes[0].evaluations == base.outcomes[0].evaluations
            assert study.count.num_runs == base.count.num_runs
            speedups[name].append(one_s / wall_s)
            dearer[name].append(cpu_s / one_cpu_s)
    print(
        f"{space.num_points:,} deployments, median of {ROUNDS}: one worker {one_s:.1f} s, load {os.getloadavg()[0]:.1f}"
    )
    for name in names:
        # Ray's workers are not children of this process.
        cpu = f"{median(dearer[name]):.2f} x the CPU seconds" if name != "ray" else "CPU seconds not seen"
        print(f"  {name}: 2 workers {median(speedups[name]):.2f} x as fast as one, {cpu}, equal to the bit")
    if "ray" in names:
        print(f"  Ray's throughput: {median(speedups['ray']) / median(speedups['processes']):.2f} of two processes'")


ROUNDS = 2


def timed_whole(space: Space, means: Means) -> tuple[Study, float, float]:
    """`timed`, with the CPU seconds of processes that were started and have ended."""
    before, wall_s = os.times(), time.perf_counter()
    study = search(space, Store(None, print), means)
    after, wall_s = os.times(), time.perf_counter() - wall_s
    return study, sum(after[:4]) - sum(before[:4]), wall_s


def layouts() -> None:
    """Every layout of a training job: the same store and executors."""
    job = {"model": "llama-3.1-70b", "device": "h100_sxm", "num_devices": 64, "sequence_tokens": 8192}
    space = space_from({**job, "global_batch": 128, "vary": {"layouts": "all"}})
    study, cpu_s, _ = timed(space)
    assert len(study.outcomes[0].evaluations) == space.num_points
    print(f"{space.num_points:,} layouts of Llama-3.1-70B on 64 devices: {cpu_s:.1f} CPU s")
    print(f"  {study.count.num_runs:,} steps simulated, {1e3 * cpu_s / study.count.num_runs:.1f} ms each")


if __name__ == "__main__":
    parts = sys.argv[1:] or ["speed", "strategies", "scan", "workers", "layouts"]
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    if "speed" in parts:
        speed()
    if "strategies" in parts:
        strategies()
    if "scan" in parts:
        scan()
    if "workers" in parts:
        workers()
    if "layouts" in parts:
        layouts()
