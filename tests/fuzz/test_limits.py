"""What a run takes is estimated before it, and refused in a sentence where it exceeds a limit."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.conftest import Command
from fuzz.kills import RUNS
from windtunnel import limits
from windtunnel.errors import InputError

pytestmark = pytest.mark.interpreted

SERVED = ("--model", "llama-3.1-8b", "--device", "h100_sxm", "--input-tokens", "64", "--output-tokens", "8")
SIMULATE = ("simulate", *SERVED)
TRAIN = (
    *("train", "--model", "llama-3.1-8b", "--device", "h100_sxm", "--num-devices", "8", "--pp", "8"),
    *("--sequence-tokens", "1024", "--global-batch", "900000"),
)
LARGE = {
    "many requests": ("simulate", *SERVED, "--concurrency", "64", "--num-requests", "99000000"),
    "a long time": (*SIMULATE, "--rate", "9", "--set=workload.duration_s=99d", "--set=workload.num_requests="),
    "many warm-ups": (*SIMULATE, "--concurrency", "4", "--set", "workload.arrivals.num_warmup_requests=99000000"),
    "a capacity": ("capacity", *SERVED, "--rate", "1", "--num-requests", "99000000"),
    "a grid": ("whatif", *SERVED, "--vary", "rate=1,2", "--num-requests", "99000000"),
    "micro-batches": TRAIN,
    "a fabric": ("topology", "check", "spectrum_x:num_gpus=1000000000"),
    "a torus": ("topology", "check", "torus:dimensions=[4096,4096,64]"),
    "nodes": ("topology", "check", "dgx_h100:num_servers=100000000"),
    "a trace": ("simulate", *SERVED[:4], "--trace", "trace.csv", "--time-limit", "1ms"),
    "packets": (
        *("collective", "--op", "all_to_all", "--traffic", "traffic.csv", "--topology", "spectrum_x:num_gpus=16"),
        *("--backend", "packet", "--time-limit", "1h"),
    ),
    "measured runs": ("validate", "runs.csv", "--time-limit", "1s"),
    "a collective": ("collective", "--op", "all_reduce", "--size", "1MiB", "--topology", "nvl:num_gpus=720000000"),
}  # fmt: skip


@pytest.mark.parametrize("words", LARGE.values(), ids=LARGE)
def test_too_large_a_run_is_refused(
    windtunnel: Command, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(limits.MEMORY, "1GiB")
    monkeypatch.setenv(limits.TIME, "1d")
    Path("trace.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "1,30,2\n" * 30_000)
    Path("runs.csv").write_text(RUNS + RUNS.splitlines()[1].replace("one", "three") + "\n")
    # Messages of different sizes, for equal ones are timed from shorter ones.
    bytes_to = "\n".join(",".join(str(9**12 + rank) for rank in range(16)) for _ in range(16))
    Path("traffic.csv").write_text(bytes_to + "\n")
    monkeypatch.setitem(limits.COSTS, "measured runs", (20_000, 0.4))
    started_s = time.process_time()
    done = windtunnel(*words)
    assert (done.code, done.stdout) == (2, "")
    limit, option = ("1.00 GiB", "memory") if "--time-limit" not in words else (r"\S+ \S+", "time")
    assert re.search(rf"take about .*; {limit} is the limit", done.stderr), done.stderr
    assert f"raise --{option}-limit" in done.stderr or words[0] == "whatif"
    for word, kind in {"--trace": "trace rows", "packet": "packets", "validate": "measured runs"}.items():
        assert word not in words or f" {kind} " in done.stderr
    assert time.process_time() - started_s < 10


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--memory-limit", "1kB"), "of memory; 1000 B is the limit"),
        (("--time-limit", "1us"), "to compute; 1.00 us is the limit"),
        (("--memory-limit", "0"), "memory_limit_bytes is '0'; more than 0 is needed"),
        (("--memory-limit", "much"), "memory_limit_bytes: 'much' is not a number"),
        (("--time-limit", "2parsec"), "time_limit_s: '2parsec' has the unit 'parsec'"),
    ],
)
def test_limits_are_options_of_every_verb(
    windtunnel: Command, option: tuple[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the option sets ends with the test.
    monkeypatch.setenv(limits.MEMORY, "9TiB")
    monkeypatch.setenv(limits.TIME, "9d")
    done = windtunnel("simulate", *SERVED, "--concurrency", "4", *option)
    assert (done.code, done.stdout) == (2, "")
    assert said in done.stderr


def test_free_memory_is_the_limit_of_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(limits.MEMORY, raising=False)
    limits.check_size(requests=1000, tokens=10)
    with pytest.raises(InputError, match="are free"):
        limits.check_size(requests=1e15)
    monkeypatch.delenv(limits.TIME, raising=False)
    with pytest.raises(InputError, match="is the limit"):
        limits.check_size(tokens=1e15)


CAPPED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from windtunnel import cli
sys.exit(cli.run(sys.argv[1:]))
"""


@pytest.mark.full
def test_a_capped_process_says_what_it_lacks() -> None:
    words = ("simulate", *SERVED, "--concurrency", "64", "--num-requests", "4000000")
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    environment.pop(limits.MEMORY, None)
    done = subprocess.run(
        [sys.executable, "-c", CAPPED, *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
    )
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("error: ")
    assert "memory" in done.stderr


MANY = """
import resource, sys
import windtunnel as wt

most = 400 if int(sys.argv[1]) > 1 else 500_000  # of which the arrays alone do not fit
for number, num_requests in enumerate((4, 400, 400, most)):
    load = {"input_tokens": 300, "output_tokens": 4, "rate_per_s": 40.0, "seed": number}
    scenario = wt.scenario(model="gpt-oss-20b", device="h100_sxm", num_requests=num_requests, **load)
    try:
        wt.simulate(scenario)
        print("done")
    except (MemoryError, wt.WindtunnelError) as error:
        print("refused", error)
    if number == 0:  # what the libraries take once is taken
        now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (int(sys.argv[1]) << 20),) * 2)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("room_mib", [0, 1, 2, 4, 16, 64, 256])
def test_many_runs_in_little_address_space_end_in_words(room_mib: int) -> None:
    """Whatever allocation fails first, the process is not killed."""
    words = [sys.executable, "-c", MANY, str(room_mib)]
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    answers = [line.split()[0] for line in done.stdout.splitlines()]
    assert len(answers) == 4
    assert set(answers) <= {"done", "refused"}
    assert room_mib > 1 or "refused" in answers
