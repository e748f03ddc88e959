"""The loop closed on this machine: profile a small Llama inside vLLM, simulate it, serve it with vLLM, compare.

Needs vLLM's CPU build (`make validate-cpu` installs it into an environment of its own). The engine runs in this process
on a clock of its CPU time; arrivals are Poisson. Nothing is fitted to the runs that are predicted. One engine is
measured and serves by turns: the speed of a machine that others use drifts within minutes by more than predictions err.
"""

import csv
import json
import sys
import tempfile
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from drive import drive
from readers.engine_run import EngineRun, engine_run
from windtunnel import catalog
from windtunnel.lab.engines.vllm import VllmEngine, VllmSettings, version
from windtunnel.lab.profile.compute import ComputePlan, measure_steps
from windtunnel.lab.profile.machine import device_of, provenance_of
from windtunnel.lab.profile.run import write_overheads, write_steps
from windtunnel.lab.profile.samples import MeasuredStep, TimeStatistics
from windtunnel.lab.profile.vllm_steps import VllmStepper
from windtunnel.lab.timing import measure_pressure
from windtunnel.model.launches.forward import StepBatch
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.shape import Shard
from windtunnel.serving.scenario import scenario_from

if TYPE_CHECKING:
    from windtunnel.serving.results import Result

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16384,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""101 million parameters."""

SETTINGS = VllmSettings(max_model_len=2304, max_num_seqs=32, max_num_batched_tokens=512)
BUDGET_S = 100.0
"""Of choosing and measuring the steps the first time."""
PLAN = ComputePlan(max_batch=32, max_context=1024, max_tokens=512, budget_s=BUDGET_S)
CLOCK = "cpu_time"
LOADS = ((1, 2.0), (2, 3.0), (3, 4.0))
"""(seed, arrivals a second)"""
NUM_REQUESTS, NUM_REPEATS = 40, 3

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Load:
    seed: int
    rate_per_s: float
    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints


def load_of(seed: int, rate_per_s: float) -> Load:
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(1 / rate_per_s, NUM_REQUESTS))
    prompts = np.clip(rng.lognormal(np.log(160), 0.7, NUM_REQUESTS), 8, 900).astype(np.int64)
    outputs = np.clip(rng.lognormal(np.log(30), 0.6, NUM_REQUESTS), 2, 120).astype(np.int64)
    return Load(seed, rate_per_s, arrival_s, prompts, outputs)


def means(ttft_s: Floats, gaps_s: Floats, e2e_s: Floats) -> Floats:
    return np.array([ttft_s.mean(), gaps_s.mean(), e2e_s.mean()])


def measured(run: EngineRun) -> Floats:
    return means(run.ttft_s, run.gaps_s, run.e2e_s)


def predicted(result: "Result") -> Floats:
    table = result.requests
    gaps = np.repeat(np.nan_to_num(table["tpot_s"]), np.maximum(table["output_tokens"] - 1, 0))
    return means(table["ttft_s"], gaps, table["e2e_s"])


def simulated(load: Load, folder: Path, profile: Path, engine: VllmEngine) -> "Result":
    # vLLM 0.32 looks into every object of every imported module when it starts, and stumbles over numba's.
    from windtunnel.serving.simulate import simulate

    trace = folder / f"load_{load.seed}.csv"
    with trace.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arrival_s", "input_tokens", "output_tokens"])
        rows = zip(load.arrival_s, load.input_tokens, load.output_tokens, strict=True)
        writer.writerows([float(at), int(n), int(m)] for at, n, m in rows)
    return simulate(
        scenario_from(
            {
                "model": str(folder / "config.json"),
                "deployment": {
                    "device": str(profile / "device.yaml"),
                    "profile": {"folder": str(profile)},
                    "calibration": str(profile / "calibration.yaml"),
                    "engine": {
                        "version": "0.32.0",
                        "max_num_seqs": SETTINGS.max_num_seqs,
                        "max_num_batched_tokens": SETTINGS.max_num_batched_tokens,
                        "max_model_len": SETTINGS.max_model_len,
                        "num_gpu_blocks": engine.num_blocks,
                        "block_size": engine.block_size,
                        "enable_prefix_caching": False,
                        "async_scheduling": False,
                        "max_cudagraph_capture_size": 0,
                    },
                },
                "workload": {"trace": {"path": str(trace)}, "sampling": {"temperature": 0.0}},
            }
        )
    )


def num_same_batches(run: EngineRun, result: "Result") -> int:
    """How many of the engine's batches the simulated scheduler forms when each step takes what it took there."""
    from windtunnel.serving.run import prepare_loop
    from windtunnel.serving.setup.kernel_settings import kernel_settings
    from windtunnel.serving.state.pools import PoolPlan
    from windtunnel.serving.state.records import played_back
    from windtunnel.workload.generate.requests import RequestArrays

    arrays = RequestArrays(run.arrival_s, run.input_tokens, run.output_tokens, np.zeros(run.arrival_s.size, np.int64))
    settings = kernel_settings(result.setup, result.memory, 1, arrays)
    cost = played_back(run.duration_s, result.setup.engine.max_num_seqs or 0)
    steps = prepare_loop([PoolPlan(settings, cost)], arrays).run().steps
    ours = np.column_stack([steps["decode_tokens"], steps["prefill_tokens"], steps["prefill_pairs"]])
    batches = run.batches
    theirs = np.column_stack([batches.decode_requests, batches.prefill_tokens, batches.prefill_pairs])
    return int((ours == theirs).all(axis=1).sum()) if ours.shape == theirs.shape else 0


def priced_steps(run: EngineRun, result: "Result") -> Floats:
    """What each batch of the engine is predicted to take."""
    from windtunnel.serving.setup.estimators import estimator_for, shard_of
    from windtunnel.serving.setup.step_prices import price_step

    setup, found = result.setup, run.batches
    estimator, host, shard = estimator_for(setup), setup.engine.host, shard_of(setup)
    durations = []
    for number in range(len(run.duration_s)):
        batch = StepBatch(
            int(found.decode_requests[number]),
            float(found.decode_context_tokens[number]) / max(int(found.decode_requests[number]), 1),
            int(found.prefill_tokens[number]),
            float(found.prefill_pairs[number]),
            # A chunk that is no prompt's last goes through the head too: vLLM drops its token.
            max(int(found.sampled[number]), 1),
        )
        host_s = (host.step_s or 0.0) + (host.request_s or 0.0) * len(run.scheduled[number])
        durations.append(sum(launch.total_s for launch in price_step(estimator, shard, batch)) + host_s)
    return np.array(durations)


def measure(stepper: VllmStepper, loads: list[Load]) -> tuple[list[list[MeasuredStep]], list[list[EngineRun]]]:
    """Measure the profile's steps `NUM_REPEATS` times, and serve every load after each time.

    The first time decides which steps, within `BUDGET_S`.

    Returns:
        Measurements of each step, and runs of each load.
    """

    def tell(num_steps: int, left_s: float | None, _error: float) -> None:
        say(f"{num_steps} steps measured, {left_s:.0f} s left")

    steps = [[step] for step in measure_steps(stepper, PLAN, {}, tell)]
    runs: list[list[EngineRun]] = [[] for _ in loads]
    for repeat in range(NUM_REPEATS):
        for number, load in enumerate(loads):
            say(f"serving at {load.rate_per_s}/s, time {repeat + 1} of {NUM_REPEATS}")
            arguments = (load.arrival_s, load.input_tokens, load.output_tokens, CONFIG["vocab_size"])
            runs[number].append(engine_run(drive(stepper.engine, *arguments), f"{load.rate_per_s}/s"))
        for number, found in enumerate(steps if repeat + 1 < NUM_REPEATS else ()):
            say(f"step {number + 1} of {len(steps)} measured, time {repeat + 2} of {NUM_REPEATS}")
            found.append(stepper.measure(found[0].shape))
    return steps, runs


def merged(repeats: list[MeasuredStep]) -> MeasuredStep:
    """Merge measurements of one step at several times by medians, so that a burst of other work in one is left out."""
    operators = tuple(
        replace(same[0], statistics=_merged_statistics([operator.statistics for operator in same]))
        for same in zip(*(step.operators for step in repeats), strict=True)
    )
    return replace(repeats[0], operators=operators, whole_s=float(np.median([step.whole_s for step in repeats])))


def _merged_statistics(times: list[TimeStatistics]) -> TimeStatistics:
    def of(name: str) -> list[float]:
        return [getattr(statistics, name) for statistics in times]

    return TimeStatistics(
        median_s=float(np.median(of("median_s"))),
        mean_s=float(np.median(of("mean_s"))),
        min_s=min(of("min_s")),
        max_s=max(of("max_s")),
        std_s=float(np.median(of("std_s"))),
        num_samples=int(sum(of("num_samples"))),
        num_outliers=int(sum(of("num_outliers"))),
    )


def say(text: str) -> None:
    print(f"\r  {text:60}", end="", file=sys.stderr, flush=True)


def main() -> None:
    if find_spec("vllm") is None:
        print("vLLM is not installed here; `make validate-cpu` installs it into an environment of its own")
        return
    folder = Path(tempfile.mkdtemp(prefix="windtunnel-validate-"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = catalog.model(str(folder / "config.json"))
    profile = folder / "profile"
    device = device_of("this_cpu", "cpu", CLOCK)
    about = provenance_of(device, "cpu", CLOCK) | {"engine": "vllm", "engine_version": version()}
    pressure = measure_pressure()
    engine = VllmEngine(CONFIG, SETTINGS)
    drive(engine, *warm_up(), vocabulary=CONFIG["vocab_size"])
    stepper = VllmStepper(engine, Shard(model, model.precision, Parallelism()))
    loads = [load_of(*pair) for pair in LOADS]
    measured_steps, runs = measure(stepper, loads)
    write_steps(profile, device, about, [merged(repeats) for repeats in measured_steps])
    write_overheads(profile, about, model.name, stepper.host)
    show_profile(measured_steps, device.title, pressure() or 0.0)
    results = [simulated(load, folder, profile, engine) for load in loads]
    show_loads(loads, runs, results)
    show_steps([run for repeats in runs for run in repeats], results[0])
    engine.close()


def show_profile(steps: list[list[MeasuredStep]], title: str, pressure: float) -> None:
    print(f"\n1. profile: {len(steps)} steps of vLLM's forward on {title}, each measured {NUM_REPEATS} times")
    print(f"   another task waited for a CPU {pressure:.0%} of the time")
    sums = np.array([[one.sum_s for one in repeats] for repeats in steps])
    wholes = np.array([[one.whole_s for one in repeats] for repeats in steps])
    spread = sums.max(axis=1) / sums.min(axis=1) - 1
    print(f"   the same step, measured again: {np.median(spread):.0%} from fastest to slowest in the median")
    for name, errors in (
        ("each measurement", (sums / wholes - 1).ravel()),
        ("medians of a step", np.median(sums / wholes, axis=1) - 1),
    ):
        print(f"   sum of the operators against the whole forward, {name}: median {np.median(errors):+.1%}, ", end="")
        print(f"{np.mean(np.abs(errors) <= 0.05):.0%} within 5%, most {np.abs(errors).max():.1%}")


def show_loads(loads: list[Load], runs: list[list[EngineRun]], results: list["Result"]) -> None:
    print(f"\n2. {NUM_REQUESTS} requests each, Poisson; vLLM {NUM_REPEATS} times; mean TTFT / ITL / end to end")
    print(f"{'load':>8} {'measured ms':>24} {'noise':>20} {'predicted ms':>24} {'error':>22}  same batches")
    every, noises = [], []
    for load, repeats, result in zip(loads, runs, results, strict=True):
        real, ours = np.array([measured(run) for run in repeats]), predicted(result)
        error, noise = ours / real.mean(axis=0) - 1, real.std(axis=0, ddof=1) / real.mean(axis=0)
        every.append(error)
        noises.append(noise)
        same, steps = sum(num_same_batches(run, result) for run in repeats), sum(len(r.duration_s) for r in repeats)
        print(
            f"{load.rate_per_s:6.1f}/s {three(real.mean(axis=0) * 1e3, '.1f'):>24} "
            f"{three(noise, '.1%'):>20} {three(ours * 1e3, '.1f'):>24} "
            f"{three(error, '+.1%'):>22}  {same} of {steps}"
        )
    off = np.abs(every)
    print(f"   mean |error| {three(off.mean(axis=0), '.1%')}, most {off.max():.1%}; of {off.size} figures ", end="")
    print(f"{(off <= 0.1).sum()} are within 10%, {(off <= 1.5 * np.array(noises)).sum()} within 1.5 times the noise")


def show_steps(runs: list[EngineRun], result: "Result") -> None:
    """How far steps are off where the batches are the engine's own, which queues do not amplify."""
    real = np.concatenate([run.duration_s for run in runs])
    ours = np.concatenate([priced_steps(run, result) for run in runs])
    prompts = np.concatenate([run.batches.prefill_tokens for run in runs])
    print("\n3. the engine's own batches, step by step: predicted over measured time")
    for name, rows in (
        ("decode only", prompts == 0),
        ("with up to 128 prompt tokens", (prompts > 0) & (prompts <= 128)),
        ("with more", prompts > 128),
    ):
        if not rows.any():
            continue
        off = ours[rows] / real[rows] - 1
        total = ours[rows].sum() / real[rows].sum() - 1
        print(f"   {name:30} {rows.sum():6,} steps, in all {total:+6.1%}, median {np.median(off):+6.1%}, ", end="")
        print(f"middle half {np.percentile(off, 25):+.1%} to {np.percentile(off, 75):+.1%}")


def three(values: Floats, form: str) -> str:
    return " / ".join(format(value, form) for value in values)


def warm_up() -> tuple[Floats, Ints, Ints]:
    return np.zeros(4), np.full(4, 200), np.full(4, 8)


if __name__ == "__main__":
    main()
