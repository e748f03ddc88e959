"""Experiments: a real model, run alone or under a profiler; and sweeps over experiments."""

import copy
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from windtunnel import schema
from windtunnel.errors import InputError, check_known

CONFIG, SUMMARY, METRICS, LOG = "config.yaml", "summary.json", "metrics.json", "experiment.log"
SCRIPT, TRACE = "inference_script.py", "torch_trace.json.gz"
REQUESTS, STEPS, KERNELS = "requests.parquet", "steps.parquet", "kernels.parquet"
"""Files of a result folder."""


class NsysOptions(schema.Schema):
    """Options of Nsight Systems."""

    trace: str = "cuda,nvtx,osrt,cublas,cudnn"
    cuda_graph_trace: Literal["node", "graph"] = "node"
    """`graph` is cheaper and hides the kernels of CUDA graphs."""
    sample: Literal["none", "process-tree", "system-wide"] = "none"
    gpu_metrics: bool = False
    """Record hardware counters over time; needs rights that most machines do not give."""


class NcuOptions(schema.Schema):
    """Options of Nsight Compute."""

    kernel_name: str | None = None
    """Regular expression of the kernels; None: those that took most of the time under Nsight Systems."""
    num_kernels: int = 5
    """Number of the longest kernels to count."""
    launch_count: int = 10
    """Launches to count, each repeated many times."""
    set: str = "full"
    """A set of sections: `basic`, `detailed`, `full`, `roofline`."""


class TorchOptions(schema.Schema):
    """Options of torch.profiler."""

    num_steps: int = 32
    """Most steps to record: traces grow by megabytes a step."""
    record_shapes: bool = True
    with_stack: bool = False
    """Record Python stacks; traces are about ten times as large, and take minutes to write."""


class Experiment(schema.Schema):
    """An experiment: one model, one batch of equal requests, one way to observe them."""

    model: str
    """Folder with config.json, a config.json, or a name on huggingface.co. Without weights they are random."""
    mode: Literal["inference_only", "nsys", "nsys_ncu", "torch"] = "inference_only"
    engine: Literal["transformers", "vllm"] = "transformers"
    prompt: str = "Hello, how are you?"
    prompt_tokens: schema.AtLeastOne | None = None
    """Number of random tokens in place of the text; needs no tokenizer."""
    max_tokens: schema.AtLeastOne = 100
    temperature: schema.NonNegative = 0.7
    batch_size: schema.AtLeastOne = 1
    tensor_parallel_size: schema.AtLeastOne = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    num_warmup: Annotated[int, schema.check_non_negative] = 1
    """Runs before the measured one."""
    seed: Annotated[int, schema.check_seed] = 0
    name: str | None = None
    """Name of the results; None: the model's."""
    nsys_options: NsysOptions = NsysOptions()
    ncu_options: NcuOptions = NcuOptions()
    torch_options: TorchOptions = TorchOptions()

    def check(self) -> None:
        if not self.prompt and self.prompt_tokens is None:
            raise ValueError("prompt is empty; at least one token is needed")

    @property
    def label(self) -> str:
        """Prefix of the folder's name: the experiment's name, or the model's, made fit for a file."""
        path = Path(self.model)
        model_name = path.parent.resolve().name if path.name == "config.json" else path.name
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.name or model_name).strip("-.") or "experiment"


def load_experiment(path: Path | None, changes: Mapping[str, Any]) -> Experiment:
    """Load the experiment in a YAML file with `changes` (dotted paths) over it; without a file, of the changes alone.
    InputError names the field that is wrong or missing."""
    (experiment,) = load_sweep(path, changes, {})
    return experiment


def load_sweep(path: Path | None, changes: Mapping[str, Any], sweep: Mapping[str, tuple[Any, ...]]) -> list[Experiment]:
    """Load the experiment of `load_experiment` at every combination of a sweep's values, the last field changing
    fastest. InputError names the field that is wrong or missing."""
    raw = schema.read_table(path, "an experiment", "model: path/to/model") if path is not None else {}
    experiments = []
    for values in itertools.product(*sweep.values()):
        changed = copy.deepcopy(raw)
        for dotted, value in [*changes.items(), *zip(sweep, values, strict=True)]:
            schema.set_path(changed, dotted, value)
        if "model" not in changed:
            raise InputError("no model is given", "name a folder with config.json: --model path/to/model")
        experiments.append(schema.decode(changed, Experiment, str(path or "")))
    return experiments


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Read an experiment's summary; None where it has none, because it still runs or was stopped."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


PRESETS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    name: {field: tuple(values) for field, values in sweep.items()}
    for name, sweep in schema.read_yaml(Path(__file__).with_name("presets.yaml")).items()
}
"""Name -> fields and values of a sweep."""


def parse_sweep(text: str) -> dict[str, tuple[Any, ...]]:
    """Parse `batch_size:1,2,4;max_tokens:50,100` into field -> values. InputError for another form, a field that
    experiments do not have, or one that stands twice."""
    fields: dict[str, tuple[Any, ...]] = {}
    known = [name for name in Experiment.__struct_fields__ if not name.endswith("_options")]
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        field, colon, values = part.partition(":")
        field = field.strip().replace("-", "_")
        if not colon or not values.strip():
            raise InputError(
                f"--parameter-sweep: {part!r} is not of the form field:value,value",
                'for instance "batch_size:1,2,4;max_tokens:50,100"',
            )
        check_known(field, known, f"--parameter-sweep: there is no field {field!r}", ", ".join(known))
        if field in fields:
            raise InputError(f"--parameter-sweep: {field} stands twice")
        fields[field] = tuple(schema.parse_yaml(value) for value in values.split(","))
    if not fields:
        raise InputError("--parameter-sweep is empty", 'for instance "batch_size:1,2,4;max_tokens:50,100"')
    return fields
