"""Runs one experiment's model in this process and records it: what `inference_script.py` of a result folder calls.

All requests have the same prompt, come at once and are answered in one batch: a prefill step, then a decode step a
token, each inside a range that names its batch (`interop/step_names.py`), every module inside a range of its own name.
Tokens that would end an answer are passed over, so that the work is what was asked for.
"""

import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.errors import InputError, WindtunnelError
from windtunnel.interop.step_names import MEASURED, step_name
from windtunnel.metrics.records import STEP_COLUMNS, Table, request_table
from windtunnel.metrics.summary import distribution
from windtunnel.spec.experiment import CONFIG, METRICS, REQUESTS, STEPS, TRACE, Experiment, load_experiment
from windtunnel.spec.noun import encode

_LOG = logging.getLogger("windtunnel.lab")


def main(folder: Path) -> None:
    """As `run`, for a script: what is wrong goes to stderr in a line, and the exit code says whose mistake it is."""
    try:
        run(folder)
    except WindtunnelError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        sys.exit(error.exit_code)


def run(folder: Path) -> None:
    """Run the experiment in `folder`/config.yaml and write what it gave into `folder`.

    Raises:
        InputError: the experiment cannot run on this machine.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    experiment = load_experiment(folder / CONFIG, {})
    started_s = time.perf_counter()
    runner = _transformers_runner(experiment) if experiment.engine == "transformers" else _vllm_runner(experiment)
    load_s = time.perf_counter() - started_s
    _LOG.info("loaded %s on %s in %.2f s", experiment.model, runner.device, load_s)
    (folder / "gpu_info.json").write_text(json.dumps(machine(), indent=2) + "\n")
    for number in range(experiment.num_warmup):
        runner.generate(_Clock(runner.synchronise))
        _LOG.info("warm-up run %d done", number + 1)
    clock = _Clock(runner.synchronise)
    profiler = _torch_profiler(experiment, folder) if experiment.mode == "torch" else nullcontext()
    with ExitStack() as stack:
        clock.profiler = stack.enter_context(profiler)
        if experiment.mode != "inference_only":
            clock.annotate = runner.annotate
            stack.enter_context(runner.module_ranges())
        stack.enter_context(clock.annotate(MEASURED))
        outputs = runner.generate(clock)
    _LOG.info("measured %d steps", len(clock.times))
    _write(folder, experiment, runner, clock, outputs, load_s)


def _write(
    folder: Path, experiment: Experiment, runner: "Runner", clock: "_Clock", outputs: Any, load_s: float
) -> None:
    steps = _step_table(clock)
    requests = _requests(experiment, runner, clock, steps)
    steps.write_parquet(folder / STEPS)
    requests.write_parquet(folder / REQUESTS)
    (folder / "generated_output.txt").write_text(runner.texts(outputs), encoding="utf-8")
    metrics = _metrics(experiment, runner, requests, steps) | {"load_s": load_s, "peak_memory_bytes": peak_memory()}
    (folder / METRICS).write_text(json.dumps(metrics, indent=2) + "\n")


# ------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class _Batch:
    """What a step computes: tokens of each request, prompts first, and the keys that the last of them sees."""

    computed: list[int]
    seen: list[int]
    num_prefills: int
    sampled: list[int]
    """Numbers of the requests that get a token."""

    @property
    def name(self) -> str:
        return step_name(self.computed, self.seen, self.num_prefills)

    @property
    def prefill_pairs(self) -> float:
        prompts = zip(self.computed[: self.num_prefills], self.seen[: self.num_prefills], strict=True)
        return sum(tokens * (keys - tokens / 2) for tokens, keys in prompts)


@dataclass
class _Clock:
    """Times the steps of one run and, where asked, names them for a profiler."""

    synchronise: Callable[[], None]
    annotate: Callable[[str], AbstractContextManager[Any]] = lambda _: nullcontext()
    profiler: Any = None
    batches: list[_Batch] = field(default_factory=list)
    times: list[tuple[float, float, float]] = field(default_factory=list)
    """Start, duration and processor time of each step."""
    named: ExitStack = field(default_factory=ExitStack)

    def begin(self, batch: _Batch) -> None:
        """Name the step that is under way, as soon as it is known what it computes."""
        self.batches.append(batch)
        self.named.enter_context(self.annotate(batch.name))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step, within which `begin` is called."""
        self.synchronise()
        began_s, cpu_s = time.perf_counter(), time.process_time()
        yield
        self.synchronise()
        self.named.close()
        self.times.append((began_s, time.perf_counter() - began_s, time.process_time() - cpu_s))
        if self.profiler is not None:
            self.profiler.step()


def _step_table(clock: _Clock) -> Table:
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
    return Table(columns, {**STEP_COLUMNS, "cpu_s": "processor time of this process, over all its threads"})


def _requests(experiment: Experiment, runner: "Runner", clock: _Clock, steps: Table) -> Table:
    """The requests' records: they come when the first step begins, and have a token at the end of steps."""
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
    found = request_table(engine, np.zeros(number, np.int64), 0.0, 0)
    return found.replaced(itl_max_s=np.array([max(np.diff(times), default=np.nan) for times in tokens_s]))


def _metrics(experiment: Experiment, runner: "Runner", requests: Table, steps: Table) -> dict[str, Any]:
    span_s = float(requests["finish_s"].max())
    decoding = steps.where(steps["num_prefills"] == 0)
    output_tokens = experiment.batch_size * experiment.max_tokens
    found: dict[str, Any] = {
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
        found["decode_step_s"] = encode(distribution(decoding["duration_s"]))
        found["decode_cpu_s"] = encode(distribution(decoding["cpu_s"]))
    return found


# --------------------------------------------------------------------------------------------------------- profilers


@contextmanager
def _torch_profiler(experiment: Experiment, folder: Path) -> Iterator[Any]:
    """torch.profiler over the first steps of the run; the trace appears when the run is over."""
    from torch import profiler as profilers

    options = experiment.torch_options
    activities = [profilers.ProfilerActivity.CPU]
    if _uses_cuda(experiment):
        activities.append(profilers.ProfilerActivity.CUDA)
    profiler = profilers.profile(
        activities=activities, record_shapes=options.record_shapes, with_stack=options.with_stack
    )
    profiler.start()
    capped = _Capped(profiler, options.num_steps)
    try:
        yield capped
    finally:
        capped.stop()
        profiler.export_chrome_trace(str(folder / TRACE))


@dataclass
class _Capped:
    """A profiler that stops after so many steps: what it keeps grows with every one."""

    profiler: Any
    num_left: int
    is_on: bool = True

    def step(self) -> None:
        """Count a step."""
        self.num_left -= 1
        if self.num_left == 0:
            self.stop()

    def stop(self) -> None:
        """Stop, once."""
        if self.is_on:
            self.profiler.stop()
            self.is_on = False


# ----------------------------------------------------------------------------------------------------------- engines


@dataclass
class Runner:
    """An engine with its model loaded."""

    version: str
    device: str
    dtype: str
    num_prompt_tokens: int
    generate: Callable[[_Clock], Any]
    """One run of all requests."""
    texts: Callable[[Any], str]
    """What they were answered."""
    synchronise: Callable[[], None] = lambda: None
    annotate: Callable[[str], AbstractContextManager[Any]] = lambda _: nullcontext()
    module_ranges: Callable[[], AbstractContextManager[Any]] = nullcontext


def _uses_cuda(experiment: Experiment) -> bool:
    import torch

    if experiment.device == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda, and torch finds no GPU here", "take --device cpu")
    return experiment.device != "cpu" and torch.cuda.is_available()


def _transformers_runner(experiment: Experiment) -> Runner:
    import torch
    import transformers

    device = "cuda" if _uses_cuda(experiment) else "cpu"
    torch.manual_seed(experiment.seed)
    model = _load_model(experiment, device)
    tokenizer = _tokenizer(experiment)
    prompt = _prompt_tokens(experiment, model.config, tokenizer)
    ids = torch.tensor([prompt] * experiment.batch_size, device=device)

    def generate(clock: _Clock) -> list[list[int]]:
        generator = torch.Generator(device=device).manual_seed(experiment.seed)
        number, length, cache, tokens = experiment.batch_size, len(prompt), None, ids
        outputs: list[list[int]] = []
        for step in range(experiment.max_tokens):
            computed, seen = [tokens.shape[1]] * number, [length + step] * number
            with torch.inference_mode(), clock.step():
                clock.begin(_Batch(computed, seen, 0 if step else number, list(range(number))))
                found = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = found.past_key_values
                tokens = _sample(found.logits[:, -1, :], experiment.temperature, generator)
                outputs.append(tokens.flatten().tolist())
        return [list(answer) for answer in zip(*outputs, strict=True)]

    def texts(outputs: list[list[int]]) -> str:
        shown = tokenizer.batch_decode(outputs) if tokenizer else [" ".join(map(str, answer)) for answer in outputs]
        return "\n\n".join(f"--- request {number}\n{text}" for number, text in enumerate(shown)) + "\n"

    return Runner(
        version=transformers.__version__,
        device=torch.cuda.get_device_name() if device == "cuda" else _processor(),
        dtype=str(model.dtype).removeprefix("torch."),
        num_prompt_tokens=len(prompt),
        generate=generate,
        texts=texts,
        synchronise=torch.cuda.synchronize if device == "cuda" else lambda: None,
        annotate=_annotator(experiment, device),
        module_ranges=lambda: _module_ranges(model, _annotator(experiment, device)),
    )


def _sample(logits: Any, temperature: float, generator: Any) -> Any:
    """The next token of every request, `[batch, 1]`."""
    import torch

    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    weights = torch.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(weights, 1, generator=generator)


def model_folder(experiment: Experiment) -> Path | None:
    """The model's folder on this machine; None where its name is one of huggingface.co.

    Raises:
        InputError: it is a path, and there is no config.json at it.
    """
    path = Path(experiment.model)
    folder = path.parent if path.name == "config.json" else path
    is_path = path.is_absolute() or path.suffix == ".json" or experiment.model.startswith(".") or folder.is_dir()
    if is_path and not (folder / "config.json").is_file():
        raise InputError(f"there is no model {experiment.model}", "name a folder with config.json, or a config.json")
    return folder if is_path else None


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def _has_tokenizer(folder: Path) -> bool:
    return any(folder.glob("tokenizer*"))


def _load_model(experiment: Experiment, device: str) -> Any:
    """The model in evaluation mode; random weights, the same for the same seed, where there are none to load."""
    import torch
    import transformers

    folder = model_folder(experiment)
    dtype = "auto" if experiment.dtype == "auto" else getattr(torch, experiment.dtype)
    auto: Any = transformers.AutoModelForCausalLM
    try:
        if folder is None or _has_weights(folder):
            model = auto.from_pretrained(folder or experiment.model, dtype=dtype)
        else:
            _LOG.info("no weights in %s: they are random", folder)
            config = transformers.AutoConfig.from_pretrained(folder)
            wanted = config.dtype or torch.float32 if dtype == "auto" else dtype
            model = auto.from_config(config, dtype=wanted)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{experiment.model} cannot be loaded: {str(error).strip().partition(chr(10))[0]}") from None
    return model.to(device).eval()


def _tokenizer(experiment: Experiment) -> Any:
    """The model's tokenizer; None where its folder has none, or where the prompt is a number of tokens."""
    import transformers

    folder = model_folder(experiment)
    if folder is not None and not _has_tokenizer(folder):
        return None
    return transformers.AutoTokenizer.from_pretrained(folder or experiment.model)


def _prompt_tokens(experiment: Experiment, config: Any, tokenizer: Any) -> list[int]:
    vocabulary = int(config.vocab_size)
    if experiment.prompt_tokens is not None:
        found = np.random.default_rng(experiment.seed).integers(0, vocabulary, experiment.prompt_tokens).tolist()
    elif tokenizer is not None:
        found = tokenizer.encode(experiment.prompt)
    else:
        _LOG.info("the model has no tokenizer: every byte of the prompt is a token")
        found = [byte % vocabulary for byte in experiment.prompt.encode()]
    longest = getattr(config, "max_position_embeddings", None)
    if longest and len(found) + experiment.max_tokens > longest:
        raise InputError(
            f"{len(found)} prompt tokens and {experiment.max_tokens} more are too many: the model takes {longest}"
        )
    return list(found)


def _annotator(experiment: Experiment, device: str) -> Callable[[str], AbstractContextManager[Any]]:
    """What names a stretch of the program for the profiler of this experiment."""
    import torch

    if experiment.mode == "torch":
        found: Callable[[str], AbstractContextManager[Any]] = torch.profiler.record_function
    elif device == "cuda":
        found = torch.cuda.nvtx.range
    elif find_spec("nvtx") is not None:
        import nvtx

        found = nvtx.annotate
    else:
        found = nullcontext
    return found


@contextmanager
def _module_ranges(model: Any, annotate: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """A range named `module:` and the module's path around every call of every module."""
    hooks, open_ranges = [], list[AbstractContextManager[Any]]()

    def enter(name: str) -> Callable[..., None]:
        def before(*_: Any) -> None:
            open_ranges.append(annotate(name))
            open_ranges[-1].__enter__()

        return before

    def leave(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    for name, module in model.named_modules():
        if name:
            hooks.append(module.register_forward_pre_hook(enter(f"module:{name}")))
            hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _vllm_runner(experiment: Experiment) -> Runner:
    """vLLM's V1 engine in this process, one step at a time, scheduling not running ahead of its results."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    folder = model_folder(experiment)
    has_tokenizer = folder is None or _has_tokenizer(folder)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder or experiment.model),
            dtype=experiment.dtype,
            seed=experiment.seed,
            tensor_parallel_size=experiment.tensor_parallel_size,
            enable_prefix_caching=False,
            async_scheduling=False,
            load_format="auto" if folder is None or _has_weights(folder) else "dummy",
            skip_tokenizer_init=not has_tokenizer,
        )
    )
    config = engine.model_config.hf_config
    tokenizer = engine.tokenizer if has_tokenizer else None
    prompt = _prompt_tokens(experiment, config, tokenizer)
    sampling = vllm.SamplingParams(
        max_tokens=experiment.max_tokens,
        temperature=experiment.temperature,
        ignore_eos=True,
        seed=experiment.seed,
        detokenize=has_tokenizer,
    )
    scheduler = engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def generate(clock: _Clock) -> list[Any]:
        seen: dict[str, int] = {}

        def schedule_and_name(*arguments: Any, **options: Any) -> Any:
            found = schedule(*arguments, **options)
            if found.num_scheduled_tokens:
                clock.begin(_scheduled_batch(found.num_scheduled_tokens, seen, len(prompt)))
            return found

        scheduler.schedule = schedule_and_name
        for number in range(experiment.batch_size):
            engine.add_request(f"{id(clock)}-{number}", {"prompt_token_ids": prompt}, sampling)
        outputs: dict[int, Any] = {}
        while engine.has_unfinished_requests():
            with clock.step():
                outputs |= {_number(output.request_id): output for output in engine.step()}
        scheduler.schedule = schedule
        return [outputs[number] for number in sorted(outputs)]

    def texts(outputs: list[Any]) -> str:
        shown = [one.outputs[0].text or " ".join(map(str, one.outputs[0].token_ids)) for one in outputs]
        return "\n\n".join(f"--- request {number}\n{text}" for number, text in enumerate(shown)) + "\n"

    device = "cuda" if _uses_cuda(experiment) else "cpu"
    return Runner(
        vllm.__version__,
        device,
        str(engine.model_config.dtype).removeprefix("torch."),
        len(prompt),
        generate,
        texts,
        annotate=_annotator(experiment, device),
    )


def _number(request: str) -> int:
    """The number that `generate` gave the request; vLLM appends letters of its own."""
    return int(request.split("-")[1])


def _scheduled_batch(tokens: dict[str, int], seen: dict[str, int], num_prompt_tokens: int) -> _Batch:
    """The batch of what vLLM scheduled; `seen` keeps how far each request has come."""
    before = {request: seen.get(request, 0) for request in tokens}
    order = sorted(tokens, key=lambda request: before[request] >= num_prompt_tokens)
    for request, number in tokens.items():
        seen[request] = before[request] + number
    return _Batch(
        computed=[tokens[request] for request in order],
        seen=[seen[request] for request in order],
        num_prefills=sum(before[request] < num_prompt_tokens for request in order),
        sampled=[_number(request) for request in order if seen[request] >= num_prompt_tokens],
    )


def machine() -> dict[str, Any]:
    """What this machine is: processor, memory, GPUs and the versions of what ran."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "gpus": [],
    }
    if find_spec("torch") is not None:
        import torch

        found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "num_threads": torch.get_num_threads()}
        for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            properties = torch.cuda.get_device_properties(number)
            found["gpus"].append(
                {
                    "name": properties.name,
                    "memory_bytes": properties.total_memory,
                    "num_sms": properties.multi_processor_count,
                    "compute_capability": f"{properties.major}.{properties.minor}",
                }
            )
    return found


def _processor() -> str:
    """The processor's name as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def peak_memory() -> int:
    """The most memory that was in use: of the GPU where there is one, else of this process."""
    import resource

    if find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
