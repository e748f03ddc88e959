"""Kill commands at random moments and do them again: `python -m fuzz.kills --times 200`; see `make faults`.

A command runs in a fork of this process, which has everything loaded, so that a moment is as often in a write as in the
work before it. What measures gets a clock that counts its calls, so that it writes the same bytes each time;
its ticks are a power of two, whose differences are exact wherever it begins.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from fuzz.test_relations import SPACE

# A device without measured tables is priced in a tenth of the time.
SMALL = SPACE | {"deployment": {"device": "rtx_4090"}, "vary": {"max_num_seqs": [2, 4]}, "finalist_seeds": 1}
RUN = json.dumps({name: SMALL[name] for name in ("model", "deployment", "workload")})
RUNS = """\
id,model,device,tp,max_num_seqs,max_num_batched_tokens,input_tokens,output_tokens,range_ratio,concurrency,num_requests,ttft_ms,tpot_ms
one,qwen2.5-0.5b,rtx_4090,1,16,1024,56,4,0.8,1,3,20,3
two,qwen2.5-0.5b,rtx_4090,1,16,1024,56,4,0.8,2,4,30,4
"""
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 64, "torch_dtype": "float32",
}  # fmt: skip
REAL = ("--model", "tiny", "--prompt-tokens", "4", "--max-tokens", "3", "--batch-size", "2", "--device", "cpu")
COMMANDS: dict[str, tuple[str, ...]] = {
    "search": ("search", "space.json", "--store", "kept.sqlite", "--out", "found", "--overwrite"),
    "simulate": ("simulate", "run.json", "--out", "run", "--overwrite"),
    "calibrate": ("calibrate", "runs.csv", "--out", "profile.yaml"),
    "profile": (
        "profile",
        "compute",
        "--model",
        "tiny",
        "--device-name",
        "my_cpu",
        "--out",
        "profile",
        *("--max-batch", "4", "--max-context", "32", "--max-tokens", "32"),
    ),
    "lab": ("lab", "run", *REAL, "--resume", "--out", "results"),
    "sweep": ("lab", "sweep", *REAL, "--parameter-sweep", "batch_size:1,2", "--out", "results"),
}
KINDS = ("search", "simulate", "calibrate", "dashboard", "profile", "lab", "sweep")
REAL_KINDS = ("profile", "lab", "sweep")
"""Commands that measure; torch is loaded for them."""
NOT_COMPARED = (".sqlite", ".sqlite-journal", ".sqlite-wal", ".sqlite-shm", ".html", ".log")
STAMP = re.compile(r"_\d{8}_\d{6}(_\d+)?")
MOST_S = 120.0


def inputs(folder: Path) -> Path:
    """Write what the commands read."""
    (folder / "tiny").mkdir(parents=True)
    (folder / "tiny" / "config.json").write_text(json.dumps(LLAMA))
    (folder / "space.json").write_text(json.dumps(SMALL))
    (folder / "run.json").write_text(RUN)
    (folder / "runs.csv").write_text(RUNS)
    return folder


def answers_of(document: bytes | str) -> bytes:
    """The answers of a search: what it counts and draws tells how much was known before."""
    return json.dumps(json.loads(document)["workloads"]).encode()


def written(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by name, without drafts, experiments that did not end, times of day and memory."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in NOT_COMPARED]
    contents = {}
    for path in files:
        name = str(path.relative_to(folder))
        if any(part.startswith(".") for part in Path(name).parts):
            continue
        experiment = folder / Path(name).parent if name.startswith("results/") else None
        if experiment is not None and not (experiment / "summary.json").exists():
            continue
        content = path.read_bytes()
        if name.endswith("search.json"):
            content = answers_of(content)
        if experiment is not None:
            name = f"{(experiment / 'config.yaml').read_text()}/{path.name}"
            content = re.sub(rb'"peak_memory_bytes": \d+', b"", STAMP.sub("", content.decode("latin-1")).encode())
        if path.name != "gpu_info.json":
            contents[name] = content
    return contents


# ---------------------------------------------------------------------------------------------- what runs in a fork


def act(kind: str) -> int:
    """Run a command in the working directory; returns its exit code."""
    from windtunnel import cli

    if kind == "dashboard":
        return save_in_dashboard()
    if kind in REAL_KINDS:
        calls = count()
        for clock in ("perf_counter", "process_time"):
            setattr(time, clock, lambda: next(calls) / 1024)
    return cli.run(COMMANDS[kind])


def save_in_dashboard() -> int:
    """Save a scenario and a run; what is there was saved before, and its bytes are compared."""
    from fuzz.answers import client_of

    origin = "http://127.0.0.1:8000"
    with client_of(Path()) as client:
        for what in ("scenario", "run"):
            fields = {"text": RUN, "name": f"kept/{what}", "what": what}
            answer = client.post("/save", data=fields, headers={"Origin": origin, "Host": "127.0.0.1:8000"})
            if answer.status_code != 200 and not any(words in answer.text for words in ("exists", "is not empty")):
                sys.stderr.write(answer.text)
                return 1
    return 0


def stand_in() -> None:
    """Measure no operators, and run a model in a fork in place of a new process."""
    from lab.profile.test_compute import CountingStepper
    from windtunnel.lab.experiments import inference
    from windtunnel.lab.experiments import run as experiments
    from windtunnel.lab.profile import machine
    from windtunnel.lab.profile import run as profiling
    from windtunnel.processes import end_with_parent

    def modelled(folder: Path) -> int:
        inference.main(folder)
        return 0

    loader = os.getpid()

    def execute(_command: Sequence[str], folder: Path, **_: Any) -> None:
        if os.getpid() == loader:
            inference.main(folder)
        elif code := ended(fork(lambda: modelled(folder), folder / "run.log", prepare=end_with_parent)):
            raise RuntimeError(f"the model's process ended with {code}")

    experiments._execute = execute  # type: ignore[assignment]
    steppers: Any = (profiling.ENGINES["torch"][0], lambda shard, *_: [CountingStepper(shard)])
    profiling.ENGINES = {"torch": steppers}
    machine._best_seconds = lambda *_: 1e-3


def fork(run: Callable[[], int], log: Path, prepare: Callable[[], Any] = os.setsid) -> int:
    """Run a function in a fork of this process, in the folder of its log; returns the process."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        prepare()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(MOST_S))
        file = os.open(log.absolute(), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        code = run()
    except BaseException:  # noqa: BLE001 a fork must not go on as its parent
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def ended(pid: int) -> int:
    """Wait for a process; returns its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def begin(kind: str, folder: Path) -> int:
    def run() -> int:
        os.chdir(folder)
        return act(kind)

    return fork(run, folder / "said.log")


def load(kind: str, folder: Path) -> None:
    """Let this process, and so its forks, have what a command imports and reads."""
    clocks = time.perf_counter, time.process_time
    null = open(os.devnull, "w")  # noqa: SIM115, PTH123
    with null, contextlib.chdir(folder), contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        act(kind)
    time.perf_counter, time.process_time = clocks


def complete(kind: str, folder: Path) -> None:
    if code := ended(begin(kind, folder)):
        raise AssertionError(f"exit code {code}: {(folder / 'said.log').read_text()[-2000:]}")


# ----------------------------------------------------------------------------------------------------------- kills


def failures_of(kind: str, times: int, first: int = 0) -> Iterator[str]:
    """Kill a command so many times, at moments drawn from the number; yield what differs after it was done again."""
    with tempfile.TemporaryDirectory() as place:
        load(kind, inputs(Path(place) / "loading"))
        whole, again = inputs(Path(place) / "whole"), inputs(Path(place) / "again")
        complete(kind, whole)
        started_s = time.monotonic()
        complete(kind, again)
        takes_s, expected = time.monotonic() - started_s, written(whole)
        if differs := different(written(again), expected):
            raise AssertionError(f"{kind}: two runs that nobody killed differ in {differs}")
        for number in range(first, first + times):
            folder = inputs(Path(place) / str(number))
            moment_s = random.Random(f"{kind} {number}").uniform(0.0, takes_s)
            pid = begin(kind, folder)
            time.sleep(moment_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            ended(pid)
            try:
                complete(kind, folder)
            except AssertionError as error:
                yield f"{kind} {number}, killed after {moment_s:.3f} s: {error}"
                continue
            if (files := written(folder)) != expected:
                yield f"{kind} {number}, killed after {moment_s:.3f} s: {different(files, expected)}"


def different(files: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    return sorted(name for name in {**files, **expected} if files.get(name) != expected.get(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=KINDS)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first kill, to go on where another stopped")
    options = parser.parse_args()
    os.environ |= {"NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    if set(REAL_KINDS) & set(options.kinds):
        import torch

        torch.set_num_threads(1)
        stand_in()
    failed = 0
    for kind in options.kinds:
        started_s = time.monotonic()
        failures = 0
        for failure in failures_of(kind, options.times, options.first):
            failures += 1
            print(failure, flush=True)  # noqa: T201
        say = f"{kind}: {options.times - failures} of {options.times} killed commands were done again to the same bytes"
        print(f"{say}, in {time.monotonic() - started_s:.0f} s", flush=True)  # noqa: T201
        failed += failures
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
