"""The loop closed on this machine: profile a small Llama inside vLLM, simulate it, serve it with vLLM, compare.

Needs vLLM's CPU build (`make validate-cpu` installs it into an environment of its own). The engine runs in this process
on a clock of its CPU time; arrivals are Poisson. Nothing is fitted to the runs that are predicted.
"""

import csv
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.interop.engine_run import EngineRun, engine_run
from windtunnel.lab.engine_drive import drive
from windtunnel.lab.engine_vllm import VllmEngine, VllmSettings, is_installed
from windtunnel.lab.profile_compute import Budget, Extent, Progress
from windtunnel.lab.profile_run import profile_compute
from windtunnel.spec import catalog
from windtunnel.spec.scenario import scenario_from

if TYPE_CHECKING:
    from windtunnel.engine.serving import Result

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

SETTINGS = VllmSettings(max_model_len=2048, max_num_seqs=32, max_num_batched_tokens=512)
BUDGET_S = 240.0
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
    from windtunnel.engine.serving import simulate

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
                "workload": {"trace": {"path": str(trace)}},
            }
        )
    )


def same_batches(run: EngineRun, load: Load, folder: Path, profile: Path, engine: VllmEngine) -> str:
    """Whether the simulated scheduler forms the engine's batches when each step takes what it took there."""
    from windtunnel.engine.serving import kernel_settings, run_loop
    from windtunnel.engine.workload import RequestArrays
    from windtunnel.estimate.steps import recorded_steps

    result = simulated(load, folder, profile, engine)
    arrays = RequestArrays(run.arrival_s, run.input_tokens, run.output_tokens, np.zeros(run.arrival_s.size, np.int64))
    settings = kernel_settings(result.setup, result.memory, 1, arrays)
    _, steps, _ = run_loop(settings, recorded_steps(run.duration_s, result.setup.engine), arrays)
    ours = np.column_stack([steps["decode_tokens"], steps["prefill_tokens"], steps["prefill_pairs"]])
    batches = run.batches
    theirs = np.column_stack([batches.decode_requests, batches.prefill_tokens, batches.prefill_pairs])
    equal = ours.shape == theirs.shape and int((ours == theirs).all(axis=1).sum())
    return f"{equal or 0} of {len(theirs)}"


def tell(_tp: int, done: Progress) -> None:
    left = "" if done.left_s is None else f", {done.left_s:.0f} s left"
    print(f"\r  {done.num_steps} steps measured{left}   ", end="", file=sys.stderr, flush=True)


def main() -> None:
    if not is_installed():
        print("vLLM is not installed here; `make validate-cpu` installs it into an environment of its own")
        return
    folder = Path(tempfile.mkdtemp(prefix="windtunnel-validate-"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = catalog.model(str(folder / "config.json"))
    profile = folder / "profile"
    found = profile_compute(
        model,
        model.precision,
        "cpu",
        profile,
        engine="vllm",
        config=CONFIG,
        extent=Extent(SETTINGS.max_num_seqs, 1024, SETTINGS.max_num_batched_tokens),
        budget=Budget(BUDGET_S),
        notify=tell,
    )
    errors = found.closure_errors
    print(f"\n1. profile: {len(found.steps)} steps of vLLM's forward on {found.device.title}", file=sys.stdout)
    print(f"   sum of the operators against the whole forward: median {np.median(errors):+.1%}, ", end="")
    print(f"{np.mean(np.abs(errors) <= 0.05):.0%} within 5%, most {np.abs(errors).max():.1%}")
    print(f"   another task waited for a CPU {found.pressure or 0:.0%} of the time")
    engine = VllmEngine(CONFIG, SETTINGS)
    drive(engine, *warm_up(), vocabulary=CONFIG["vocab_size"])
    print(f"2. {NUM_REQUESTS} requests each, Poisson; vLLM {NUM_REPEATS} times; mean TTFT / ITL / end to end")
    print(f"{'load':>8} {'measured ms':>24} {'noise':>20} {'predicted ms':>24} {'error':>22}  same batches")
    every = []
    for load in (load_of(*pair) for pair in LOADS):
        arguments = (load.arrival_s, load.input_tokens, load.output_tokens, CONFIG["vocab_size"])
        runs = [engine_run(drive(engine, *arguments), "run") for _ in range(NUM_REPEATS)]
        real = np.array([measured(run) for run in runs])
        ours = predicted(simulated(load, folder, profile, engine))
        error = ours / real.mean(axis=0) - 1
        every.append(error)
        print(
            f"{load.rate_per_s:6.1f}/s {three(real.mean(axis=0) * 1e3, '.1f'):>24} "
            f"{three(real.std(axis=0, ddof=1) / real.mean(axis=0), '.1%'):>20} {three(ours * 1e3, '.1f'):>24} "
            f"{three(error, '+.1%'):>22}  {same_batches(runs[0], load, folder, profile, engine)}"
        )
    print(f"mean |error|: {three(np.abs(every).mean(axis=0), '.1%')}; most {np.abs(every).max():.1%}")
    engine.close()


def three(values: Floats, form: str) -> str:
    return " / ".join(format(value, form) for value in values)


def warm_up() -> tuple[Floats, Ints, Ints]:
    return np.zeros(4), np.full(4, 200), np.full(4, 8)


if __name__ == "__main__":
    main()
