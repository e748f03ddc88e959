"""Run one experiment's model in this process and record it, as a result folder's `inference_script.py` does.

All requests have the same prompt, come at once and are answered in one batch: a prefill step, then a decode step a
token, each inside a range that names its batch (`formats/captures/step_operators.py`), every module inside a range of
its own name. Tokens that would end an answer are passed over, so that answers have the requested length.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.errors import WindtunnelError
from windtunnel.formats.captures.step_operators import MEASURED
from windtunnel.lab.experiments.runners import ModelRunner, StepClock, transformers_runner, uses_cuda, vllm_runner
from windtunnel.lab.experiments.schema import CONFIG, METRICS, REQUESTS, STEPS, TRACE, Experiment, load_experiment
from windtunnel.lab.profile.machine import machine, peak_memory
from windtunnel.metrics.records import STEP_COLUMNS, Table, request_table
from windtunnel.metrics.summary import distribution
from windtunnel.schema import encode

_LOG = logging.getLogger("windtunnel.lab")


def main(folder: Path) -> None:
    """Call `run` from a script: an error is a line on stderr, and the exit code tells wrong input from a failure."""
    try:
        run(folder)
    except WindtunnelError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        sys.exit(error.exit_code)


def run(folder: Path) -> None:
    """Run the experiment of `folder`/config.yaml and write its results there; InputError where it cannot run here."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    experiment = load_experiment(folder / CONFIG, {})
    started_s = time.perf_counter()
    runner = transformers_runner(experiment) if experiment.engine == "transformers" else vllm_runner(experiment)
    load_s = time.perf_counter() - started_s
    _LOG.info("loaded %s on %s in %.2f s", experiment.model, runner.device, load_s)
    (folder / "gpu_info.json").write_text(json.dumps(machine(), indent=2) + "\n")
    for number in range(experiment.num_warmup):
        runner.generate(StepClock(runner.synchronise))
        _LOG.info("warm-up run %d done", number + 1)
    clock = StepClock(runner.synchronise)
    profiler = _torch_profiler(experiment, folder) if experiment.mode == "torch" else nullcontext(clock.end_step)
    with ExitStack() as stack:
        clock.end_step = stack.enter_context(profiler)
        if experiment.mode != "inference_only":
            clock.annotate = runner.annotate
            stack.enter_context(runner.module_ranges())
        stack.enter_context(clock.annotate(MEASURED))
        outputs = runner.generate(clock)
    _LOG.info("measured %d steps", len(clock.times))
    times = np.array(clock.times)
    batches = clock.batches
    columns = {
        "start_s": times[:, 0] - times[0, 0],
        "duration_s": times[:, 1],
        "num_steps": np.ones(len(times), np.int64),
        "decode_tokens": np.array([sum(batch.computed[batch.num_prefills :]) for batch in batches]),
        "prefill_tokens": np.array([sum(batch.computed[: batch.num_prefills]) for batch in batches]),
        "num_prefills": np.array([batch.num_prefills for batch in batches]),
        "num_sampled": np.array([len(batch.sampled) for batch in batches]),
        "context_tokens": np.array([sum(batch.seen[batch.num_prefills :]) for batch in batches]),
        "prefill_pairs": np.array([batch.prefill_pairs for batch in batches]),
        "cpu_s": times[:, 2],
    }
    steps = Table(columns, {**STEP_COLUMNS, "cpu_s": "processor time of this process, over all its threads"})
    requests = _requests(experiment, runner, clock, steps)
    steps.write_parquet(folder / STEPS)
    requests.write_parquet(folder / REQUESTS)
    (folder / "generated_output.txt").write_text(runner.texts(outputs), encoding="utf-8")
    metrics = _metrics(experiment, runner, requests, steps) | {"load_s": load_s, "peak_memory_bytes": peak_memory()}
    (folder / METRICS).write_text(json.dumps(metrics, indent=2) + "\n")


def _requests(experiment: Experiment, runner: ModelRunner, clock: StepClock, steps: Table) -> Table:
    """Return the requests' records: they arrive with the first step, and get tokens at the end of steps."""
    number = experiment.batch_size
    ends_s = steps["start_s"] + steps["duration_s"]
    tokens_s: list[list[float]] = [[] for _ in range(number)]
    for batch, end_s in zip(clock.batches, ends_s.tolist(), strict=True):
        for request in batch.sampled:
            tokens_s[request].append(end_s)
    engine = {
        "arrival_s": np.zeros(number),
        "scheduled_s": np.zeros(number),
        "first_token_s": np.array([times[0] for times in tokens_s]),
        "finish_s": np.array([times[-1] for times in tokens_s]),
        "input_tokens": np.full(number, runner.num_prompt_tokens),
        "output_tokens": np.array([len(times) for times in tokens_s]),
        "priority": np.zeros(number, np.int64),
        "num_preemptions": np.zeros(number, np.int64),
    }
    table = request_table(engine, np.zeros(number, np.int64), 0.0, 0)
    return table.replaced(itl_max_s=np.array([max(np.diff(times), default=np.nan) for times in tokens_s]))


def _metrics(experiment: Experiment, runner: ModelRunner, requests: Table, steps: Table) -> dict[str, Any]:
    span_s = float(requests["finish_s"].max())
    decoding = steps.where(steps["num_prefills"] == 0)
    output_tokens = experiment.batch_size * experiment.max_tokens
    metrics: dict[str, Any] = {
        "engine": f"{experiment.engine} {runner.version}",
        "device": runner.device,
        "dtype": runner.dtype,
        "num_requests": experiment.batch_size,
        "input_tokens": runner.num_prompt_tokens,
        "output_tokens": experiment.max_tokens,
        "ttft_s": float(requests["ttft_s"][0]),
        "tpot_s": float(requests["tpot_s"][0]) if experiment.max_tokens > 1 else None,
        "e2e_s": span_s,
        "output_tokens_per_s": output_tokens / span_s,
        "total_tokens_per_s": (output_tokens + experiment.batch_size * runner.num_prompt_tokens) / span_s,
        "num_steps": len(steps),
        "is_profiled": experiment.mode != "inference_only",
    }
    if len(decoding):
        metrics["decode_step_s"] = encode(distribution(decoding["duration_s"]))
        metrics["decode_cpu_s"] = encode(distribution(decoding["cpu_s"]))
    return metrics


@contextmanager
def _torch_profiler(experiment: Experiment, folder: Path) -> Iterator[Callable[[], None]]:
    """Run torch.profiler over the first steps of the run, as its memory grows with every one; yield what counts a step.

    The trace is written when the run is over.
    """
    from torch import profiler as profilers

    options = experiment.torch_options
    activities = [profilers.ProfilerActivity.CPU]
    if uses_cuda(experiment):
        activities.append(profilers.ProfilerActivity.CUDA)
    profiler = profilers.profile(
        activities=activities, record_shapes=options.record_shapes, with_stack=options.with_stack
    )
    num_left = options.num_steps or math.inf

    def count_step() -> None:
        nonlocal num_left
        if num_left:
            num_left -= 1
            if not num_left:
                profiler.stop()

    profiler.start()
    try:
        yield count_step
    finally:
        if num_left:
            profiler.stop()
        profiler.export_chrome_trace(str(folder / TRACE))
