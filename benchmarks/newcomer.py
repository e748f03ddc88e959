"""How many commands, wall and CPU seconds a newcomer's ten tasks take, each from an empty folder and with empty caches.

Commands are typed as they stand, with the files that the newcomer already has: a config.json, measured runs, traces. A
task passes if its last command prints or writes what it should, in at most three commands and three minutes. The first
simulation on a machine compiles the loops; `--warm` lets the tasks share one cache, as on the second day.

python benchmarks/newcomer.py [--warm] [TASK ...]
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MOST_COMMANDS, MOST_S = 3, 180.0
BATCH = "--sequence-tokens 8192 --global-batch 512"
LOAD = "--input-tokens 1024 --output-tokens 256"
SLO = "--slo ttft_p90=1s,tpot_p99=50ms"
SERVER = "vllm serve meta-llama/Llama-3.1-8B -tp 2 --max-num-seqs 64"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
RUNS = """\
id,model,device,tp,max_num_seqs,input_tokens,output_tokens,concurrency,num_requests,ttft_ms,tpot_ms
one,llama-3.1-8b,h100_sxm,1,256,1024,256,4,40,45,7.4
two,llama-3.1-8b,h100_sxm,1,256,1024,256,32,320,110,9.6
"""
REQUESTS = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2026-01-01 00:00:{second:02d}.{tenth}000000,{400 + 37 * (second * 10 + tenth) % 900},{40 + 11 * second % 90}\n"
    for second in range(20)
    for tenth in (0, 4, 7)
)
KERNELS = [
    {"ph": "X", "cat": "kernel", "name": name, "ts": 100 * number, "dur": 60, "pid": 0, "tid": 7, "args": {"device": 0}}
    for number, name in enumerate(("nvjet_hsh_128x256_64x4_TNT", "flash_fwd_splitkv_kernel") * 20)
]
CELL = (
    "import windtunnel as wt; "
    'run = wt.simulate(wt.scenario(model="llama-3.1-8b", device="h100_sxm", concurrency=8, input_tokens=512, '
    'output_tokens=128)); open("cell.html", "w").write(run._repr_html_())'
)


@dataclass(frozen=True)
class Task:
    """A question, the commands that answer it, and the text by which the answer is known."""

    title: str
    commands: Sequence[str]
    expected: str
    """Text of the last command's output, or of the file `answer`."""
    answer: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that the newcomer has: name -> text."""


TASKS = {
    "size": Task(
        "size a chat service on three GPUs",
        [f"windtunnel recommend llama-3.1-8b --devices h100_sxm,l40s,b200_sxm {SLO} {LOAD} --rate 50"],
        "Serve it on ",
    ),
    "check": Task(
        "check a serve command against an SLO",
        [f'windtunnel simulate --from-command "{SERVER}" --device h100_sxm --rate 8 {LOAD} {SLO}'],
        "the SLO",
    ),
    "change": Task(
        "find what to change",
        [f'windtunnel whatif --from-command "{SERVER}" --device h100_sxm {SLO} {LOAD} --num-requests 200'],
        "--max-num-seqs",
    ),
    "compare": Task(
        "compare two results",
        [
            f"windtunnel simulate --model llama-3.1-8b --device h100_sxm --rate 8 {LOAD} --out one",
            f"windtunnel simulate --model llama-3.1-8b --device h100_sxm --tp 2 --rate 8 {LOAD} --out two",
            "windtunnel compare one two",
        ],
        "lower TPOT",
    ),
    "train": Task(
        "plan 405B training",
        [f"windtunnel train --model llama-3.1-405b --device h100_sxm --num-devices 512 {BATCH} --search"],
        "Best: tp ",
    ),
    "trace": Task(
        "read a trace: of requests, and of a GPU",
        ["windtunnel simulate --model llama-3.1-8b --device h100_sxm --trace requests.csv",
         "windtunnel lab kernels trace.json"],
        "flash_fwd_splitkv_kernel",
        files={"requests.csv": REQUESTS, "trace.json": json.dumps({"schemaVersion": 1, "traceEvents": KERNELS})},
    ),
    "config": Task(
        "predict a new config.json",
        [f"windtunnel simulate --model ./config.json --device h100_sxm --rate 8 {LOAD}"],
        "TPOT",
        files={"config.json": json.dumps(CONFIG)},
    ),
    "validate": Task(
        "validate own runs", ["windtunnel validate runs.csv"], "Median error", files={"runs.csv": RUNS}
    ),
    "kubernetes": Task(
        "write a Kubernetes deployment",
        [f"windtunnel recommend llama-3.1-8b --devices h100_sxm {SLO} {LOAD} --rate 50 --num-requests 300 --out found"],
        "kind: Deployment",
        "found/kubernetes.yaml",
    ),
    "notebook": Task("embed in a notebook", [f"python -c '{CELL}'"], "<table", "cell.html"),
}  # fmt: skip


def seconds_of(task: Task, cache: Path) -> tuple[float, float]:
    """Return the wall and the CPU seconds of a task in a new folder.

    Raises:
        RuntimeError: a command fails, or the answer is missing.
    """
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "COLUMNS": "200"}
    for name in ("PYTHONDONTWRITEBYTECODE", "NUMBA_CACHE_DIR"):
        environment.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in task.files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        started_s, cpu_s, printed = time.perf_counter(), _cpu_s(), ""
        for command in task.commands:
            program, _, rest = command.partition(" ")
            line = f"{sys.executable} {'-m windtunnel ' if program == 'windtunnel' else ''}{rest}"
            done = subprocess.run(
                line, check=False, shell=True, cwd=folder, env=environment, capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"{command}: exit code {done.returncode}: {done.stderr.strip()}")
            printed = done.stdout
        took_s = time.perf_counter() - started_s, _cpu_s() - cpu_s
        text = Path(folder, task.answer).read_text(encoding="utf-8") if task.answer else printed
        if task.expected not in text:
            raise RuntimeError(f"{task.expected!r} is not in the answer: {text[:500]}")
        return took_s


def _cpu_s() -> float:
    """Return the CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: Sequence[str]) -> int:
    """Print a row a task; the exit code is 1 where one takes too many commands or too long."""
    is_warm, names = "--warm" in arguments, [name for name in arguments if name != "--warm"] or list(TASKS)
    bad = 0
    print("| task | commands | seconds | CPU seconds |\n|---|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as root:
        if is_warm:
            seconds_of(TASKS["size"], Path(root, "shared"))
        for name in names:
            task, cache = TASKS[name], Path(root, "shared" if is_warm else name)
            try:
                took_s, cpu_s = seconds_of(task, cache)
            except RuntimeError as error:
                bad += 1
                print(f"| {task.title} | {len(task.commands)} | failed: {error} | |", flush=True)
                continue
            bad += len(task.commands) > MOST_COMMANDS or took_s > MOST_S
            print(f"| {task.title} | {len(task.commands)} | {took_s:.1f} | {cpu_s:.1f} |", flush=True)
    print(f"{bad} of {len(names)} tasks fail, or take more than {MOST_COMMANDS} commands or {MOST_S:g} s")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
