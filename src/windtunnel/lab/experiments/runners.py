"""Engines of experiments: a model loaded by transformers or vLLM, which answers all requests step by step.

A model comes with or without weights, with its tokenizer and the tokens of its prompt.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.errors import InputError
from windtunnel.formats.captures.step_operators import step_name
from windtunnel.lab.experiments.schema import Experiment
from windtunnel.lab.profile.machine import cpu_name
from windtunnel.schema import fields_of

_LOG = logging.getLogger("windtunnel.lab")


def uses_cuda(experiment: Experiment) -> bool:
    """Whether the experiment runs on a GPU; InputError where it must, and torch finds no GPU."""
    import torch

    if experiment.device == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda, and torch finds no GPU here", "take --device cpu")
    return experiment.device != "cpu" and torch.cuda.is_available()


def model_folder(experiment: Experiment) -> Path | None:
    """Return the model's folder here; None for a name of huggingface.co; InputError for a path without config.json."""
    path = Path(experiment.model)
    folder = path.parent if path.name == "config.json" else path
    is_path = path.is_absolute() or path.suffix == ".json" or experiment.model.startswith(".") or folder.is_dir()
    if is_path and not (folder / "config.json").is_file():
        raise InputError(f"there is no model {experiment.model}", "name a folder with config.json, or a config.json")
    return folder if is_path else None


def has_weights(folder: Path) -> bool:
    """Whether the folder has weights to load."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer to load."""
    return any(folder.glob("tokenizer*"))


def load_model(experiment: Experiment, device: str) -> Any:
    """Load the model in evaluation mode; where its folder has no weights, they are random and depend on the seed."""
    import torch
    import transformers

    folder = model_folder(experiment)
    dtype = "auto" if experiment.dtype == "auto" else getattr(torch, experiment.dtype)
    auto: Any = transformers.AutoModelForCausalLM
    try:
        if folder is None or has_weights(folder):
            model = auto.from_pretrained(folder or experiment.model, dtype=dtype)
        else:
            _LOG.info("no weights in %s: they are random", folder)
            config = transformers.AutoConfig.from_pretrained(folder)
            model_dtype = config.dtype or torch.float32 if dtype == "auto" else dtype
            with torch.device(device):  # a GPU draws the weights of 8 billion parameters in seconds, a core in minutes
                model = auto.from_config(config, dtype=model_dtype)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{experiment.model} cannot be loaded: {str(error).strip().partition(chr(10))[0]}") from None
    return model.to(device).eval()


def load_tokenizer(experiment: Experiment) -> Any:
    """Load the model's tokenizer; None where its folder has none, or where the prompt is a number of tokens."""
    import transformers

    folder = model_folder(experiment)
    if folder is not None and not has_tokenizer(folder):
        return None
    return transformers.AutoTokenizer.from_pretrained(folder or experiment.model)


def prompt_tokens(experiment: Experiment, config: Any, tokenizer: Any) -> list[int]:
    """Return the tokens of every prompt; InputError where prompt and answer have more than the model takes."""
    vocabulary = int(config.vocab_size)
    if experiment.prompt_tokens is not None:
        tokens = np.random.default_rng(experiment.seed).integers(0, vocabulary, experiment.prompt_tokens).tolist()
    elif tokenizer is not None:
        tokens = tokenizer.encode(experiment.prompt)
    else:
        _LOG.info("the model has no tokenizer: every byte of the prompt is a token")
        tokens = [byte % vocabulary for byte in experiment.prompt.encode()]
    longest = getattr(config, "max_position_embeddings", None)
    if longest and len(tokens) + experiment.max_tokens > longest:
        raise InputError(
            f"{len(tokens)} prompt tokens and {experiment.max_tokens} more are too many: the model takes {longest}"
        )
    return list(tokens)


@dataclass(frozen=True)
class Batch:
    """The batch of a step: tokens of each request, prompts first, and the keys that the last of them sees."""

    computed: list[int]
    seen: list[int]
    num_prefills: int
    sampled: list[int]
    """Numbers of the requests that get a token."""

    @property
    def prefill_pairs(self) -> float:
        prompts = zip(self.computed[: self.num_prefills], self.seen[: self.num_prefills], strict=True)
        return sum(tokens * (keys - tokens / 2) for tokens, keys in prompts)


@dataclass
class StepClock:
    """A clock that times the steps of one run, and names them for a profiler if there is one."""

    synchronise: Callable[[], None]
    annotate: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext()
    end_step: Callable[[], None] = lambda: None
    """Called after each step."""
    batches: list[Batch] = field(default_factory=list)
    times: list[tuple[float, float, float]] = field(default_factory=list)
    """Start, duration and processor time of each step."""
    named: ExitStack = field(default_factory=ExitStack)

    def begin(self, batch: Batch) -> None:
        """Name the current step, as soon as its batch is known."""
        self.batches.append(batch)
        self.named.enter_context(self.annotate(step_name(batch.computed, batch.seen, batch.num_prefills)))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one step; `begin` is called within the block."""
        self.synchronise()
        began_s, cpu_s = time.perf_counter(), time.process_time()
        yield
        self.synchronise()
        self.named.close()
        self.times.append((began_s, time.perf_counter() - began_s, time.process_time() - cpu_s))
        self.end_step()


@dataclass
class ModelRunner:
    """An engine with its model loaded."""

    version: str
    device: str
    dtype: str
    num_prompt_tokens: int
    generate: Callable[[StepClock], Any]
    """Run all requests once."""
    texts: Callable[[Any], str]
    """The answers of a run as text."""
    synchronise: Callable[[], None] = lambda: None
    annotate: Callable[[str], AbstractContextManager[Any]] = lambda _: nullcontext()
    module_ranges: Callable[[], AbstractContextManager[Any]] = nullcontext


def transformers_runner(experiment: Experiment) -> ModelRunner:
    """Load a model into transformers: one batch prefills, then decodes; InputError where model or device is missing."""
    import torch
    import transformers

    device = "cuda" if uses_cuda(experiment) else "cpu"
    torch.manual_seed(experiment.seed)
    model = load_model(experiment, device)
    tokenizer = load_tokenizer(experiment)
    prompt = prompt_tokens(experiment, model.config, tokenizer)
    ids = torch.tensor([prompt] * experiment.batch_size, device=device)

    def generate(clock: StepClock) -> list[list[int]]:
        generator = torch.Generator(device=device).manual_seed(experiment.seed)
        number, length, cache, tokens = experiment.batch_size, len(prompt), None, ids
        outputs: list[list[int]] = []
        for step in range(experiment.max_tokens):
            computed, seen = [tokens.shape[1]] * number, [length + step] * number
            with torch.inference_mode(), clock.step():
                clock.begin(Batch(computed, seen, 0 if step else number, list(range(number))))
                step_output = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = step_output.past_key_values
                tokens = _sample(step_output.logits[:, -1, :], experiment.temperature, generator)
                outputs.append(tokens.flatten().tolist())
        return [list(answer) for answer in zip(*outputs, strict=True)]

    def texts(outputs: list[list[int]]) -> str:
        decoded = tokenizer.batch_decode(outputs) if tokenizer else None
        return _numbered(decoded or [" ".join(map(str, answer)) for answer in outputs])

    return ModelRunner(
        version=transformers.__version__,
        device=torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        dtype=str(model.dtype).removeprefix("torch."),
        num_prompt_tokens=len(prompt),
        generate=generate,
        texts=texts,
        synchronise=torch.cuda.synchronize if device == "cuda" else lambda: None,
        annotate=_annotator(experiment, device),
        module_ranges=lambda: _module_ranges(model, _annotator(experiment, device)),
    )


def _sample(logits: Any, temperature: float, generator: Any) -> Any:
    """Sample the next token of every request, `[batch, 1]`."""
    import torch

    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial(torch.softmax(logits.float() / temperature, dim=-1), 1, generator=generator)


def vllm_runner(experiment: Experiment) -> ModelRunner:
    """Load a model into vLLM's V1 engine in this process; it steps synchronously, without asynchronous scheduling."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    import vllm

    folder = model_folder(experiment)
    has_text = folder is None or has_tokenizer(folder)
    engine = _vllm_engine(experiment, folder, has_text)
    prompt = prompt_tokens(experiment, engine.model_config.hf_config, engine.tokenizer if has_text else None)
    sampling = vllm.SamplingParams(
        max_tokens=experiment.max_tokens,
        temperature=experiment.temperature,
        ignore_eos=True,
        seed=experiment.seed,
        detokenize=has_text,
    )
    scheduler = engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def generate(clock: StepClock) -> list[Any]:
        seen: dict[str, int] = {}

        def schedule_and_name(*arguments: Any, **options: Any) -> Any:
            scheduled = schedule(*arguments, **options)
            if scheduled.num_scheduled_tokens:
                clock.begin(_scheduled_batch(scheduled.num_scheduled_tokens, seen, len(prompt)))
            return scheduled

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
        answers = (request.outputs[0] for request in outputs)
        return _numbered([answer.text or " ".join(map(str, answer.token_ids)) for answer in answers])

    device = "cuda" if uses_cuda(experiment) else "cpu"
    return ModelRunner(
        vllm.__version__,
        device,
        str(engine.model_config.dtype).removeprefix("torch."),
        len(prompt),
        generate,
        texts,
        annotate=_annotator(experiment, device),
    )


def _vllm_engine(experiment: Experiment, folder: Path | None, has_text: bool) -> Any:
    """Start vLLM's engine on the experiment's model, with random weights where `folder` has none."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder or experiment.model),
            **fields_of(experiment, "dtype", "seed", "tensor_parallel_size"),
            enable_prefix_caching=False,
            async_scheduling=False,
            load_format="auto" if folder is None or has_weights(folder) else "dummy",
            skip_tokenizer_init=not has_text,
        )
    )


def _numbered(texts: Sequence[str]) -> str:
    return "\n\n".join(f"--- request {number}\n{text}" for number, text in enumerate(texts)) + "\n"


def _number(request: str) -> int:
    """Return the number that `generate` gave the request; vLLM appends letters of its own."""
    return int(request.split("-")[1])


def _scheduled_batch(tokens: dict[str, int], seen: dict[str, int], num_prompt_tokens: int) -> Batch:
    """Build the batch that vLLM scheduled; `seen` holds each request's computed tokens, and is updated."""
    before = {request: seen.get(request, 0) for request in tokens}
    order = sorted(tokens, key=lambda request: before[request] >= num_prompt_tokens)
    for request, number in tokens.items():
        seen[request] = before[request] + number
    return Batch(
        computed=[tokens[request] for request in order],
        seen=[seen[request] for request in order],
        num_prefills=sum(before[request] < num_prompt_tokens for request in order),
        sampled=[_number(request) for request in order if seen[request] >= num_prompt_tokens],
    )


def _annotator(experiment: Experiment, device: str) -> Callable[[str], AbstractContextManager[Any]]:
    """Return the context manager that names a range of the program for the experiment's profiler."""
    import torch

    annotate: Callable[[str], AbstractContextManager[Any]] = nullcontext
    if experiment.mode == "torch":
        annotate = torch.profiler.record_function
    elif device == "cuda":
        annotate = torch.cuda.nvtx.range
    elif find_spec("nvtx") is not None:
        import nvtx

        annotate = nvtx.annotate
    return annotate


@contextmanager
def _module_ranges(model: Any, annotate: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """Put a range named `module:` and the module's path around every call of every module."""
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
