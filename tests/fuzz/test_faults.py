"""What is left when a command is killed, or its disk, store or clock fails: the same answers the next time.

Each kind of command is killed once; WINDTUNNEL_FAULTS=200 (`make faults`) kills each that often.
"""

import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.conftest import Command
from fuzz import kills
from fuzz.kills import answers_of, inputs, written
from test_processes import is_running, wait_until_ended

KILLS = os.environ.get("WINDTUNNEL_FAULTS", "1")
TRAIN = (
    *("--model", "llama-3.1-8b", "--device", "h100_sxm", "--num-devices", "8", "--tp", "2"),
    *("--sequence-tokens", "1024", "--global-batch", "8"),
)
ENVIRONMENT = os.environ | {"NUMBA_DISABLE_JIT": "1", "NO_COLOR": "1", "PYTHONPATH": os.pathsep.join(sys.path)}

pytestmark = pytest.mark.interpreted


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "windtunnel", *words]
    return subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def of_session(number: int) -> list[int]:
    """Processes of a session that still run."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if is_running(pid) and os.getsid(pid) == number]


def complete(folder: Path, *words: str) -> None:
    process = start(folder, *words)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said.decode()


@pytest.mark.full
@pytest.mark.parametrize("kinds", [kills.KINDS[:4], kills.REAL_KINDS], ids=["predict", "measure"])
def test_a_killed_command_is_done_again_to_the_same_bytes(kinds: tuple[str, ...]) -> None:
    if kinds == kills.REAL_KINDS:
        pytest.importorskip("transformers", reason="transformers is not installed; it runs the model")
    words = [sys.executable, "-m", "fuzz.kills", *kinds, "--times", KILLS]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"{KILLS} of {KILLS} killed commands were done again") == len(kinds)


@pytest.mark.full
def test_two_searches_share_a_store(tmp_path: Path) -> None:
    alone, folder = inputs(tmp_path / "alone"), inputs(tmp_path / "both")
    words = ("search", "space.json", "--store", "kept.sqlite", "--out")
    complete(alone, *words, "one")
    both = [start(folder, *words, name) for name in ("one", "two")]
    for process in both:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said.decode()
    for name in ("one", "two"):
        assert written(folder / name) == written(alone / "one")


@pytest.mark.parametrize("damage", ["cut", "noise"])
def test_a_damaged_store_costs_no_answer(
    damage: str, windtunnel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs(tmp_path / "work"))
    words = ("search", "space.json", "--store", "kept.sqlite", "--json")
    first = windtunnel(*words)
    assert first.code == 0, first.stderr
    store = Path("kept.sqlite")
    content = bytearray(store.read_bytes())
    noise = random.Random(damage)
    for position in noise.sample(range(100, len(content)), 400):
        content[position] = noise.randrange(256)
    store.write_bytes(bytes(content[: len(content) // 2] if damage == "cut" else content))
    again = windtunnel(*words)
    assert again.code == 0, again.stderr
    assert answers_of(again.stdout) == answers_of(first.stdout)


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "run.json", "--html", "page.html"),
        ("simulate", "run.json", "--out", "run"),
        ("simulate", "run.json", "--timeline", "timeline.json"),
        ("simulate", "run.json", "--vidur-metrics", "metrics.csv"),
        ("topology", "generate", "--type", "spectrum_x", "--num-gpus", "64", "--out", "fabric"),
        ("train", *TRAIN, "--html", "page.html"),
    ],
    ids=lambda words: "_".join(word.strip("-") for word in words[:4]),
)
def test_a_disk_that_fills_is_said(
    words: tuple[str, ...], windtunnel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of files stands for the disk: what is written first fits, the rest does not."""
    folder = inputs(tmp_path / "work")
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python keeps a cut .pyc, and fails to import it for ever
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, hard))
    try:
        done = windtunnel(*words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (done.code, done.stdout) == (2, ""), done.stderr
    assert "cannot be written: File too large" in done.stderr
    assert sorted(folder.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_folder_is_said(windtunnel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inputs(tmp_path / "work"))
    (tmp_path / "work").chmod(0o500)
    done = windtunnel("simulate", "run.json", "--out", "run")
    assert (done.code, "cannot be written" in done.stderr) == (2, True), done.stderr


def test_a_clock_that_jumps_changes_nothing(
    windtunnel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs(tmp_path / "work"))
    words = ("search", "space.json", "--no-store", "--json")
    first = windtunnel(*words)
    jumps = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: jumps.uniform(-1e9, 4e9))
    assert windtunnel(*words).stdout == first.stdout


GREEDY = """
import ctypes
from numba import config, njit

from windtunnel.serving.custom import time_limit

config.DISABLE_JIT = False
time_limit.MOST_CALL_S, time_limit.GRACE_S = 0.5, 2.0

@njit("int64(int64)")  # compiled at once: the limit is shorter than that takes
def endless(number):
    while number >= 0:
        number = (number + 1) % 7
    return number

def compiled(requests, waiting, ready, engine):
    endless(len(waiting))

def of_a_library(requests, waiting, ready, engine):
    ctypes.PyDLL(None).sleep(60)
"""
"""Policies that let no thread run: what numba compiles holds the interpreter, and so does a call through PyDLL."""


@pytest.mark.full
@pytest.mark.parametrize("name", ["compiled", "of_a_library"])
@pytest.mark.parametrize("verb", ["simulate", "search"])
def test_a_policy_that_lets_no_thread_run_is_ended_and_named(name: str, verb: str, tmp_path: Path) -> None:
    folder = inputs(tmp_path / "work")
    (folder / "greedy.py").write_text(GREEDY)
    scheduler = f"deployment.engine.scheduler=greedy:{name}"
    words = {
        "simulate": ("simulate", "run.json", "--set", scheduler),
        "search": ("search", "space.json", "--no-store", "--set", scheduler, "--executor", "processes", "--workers=3"),
    }[verb]
    process = start(folder, *words)
    _, said = process.communicate(timeout=50)
    errors = [line for line in said.decode().splitlines() if line.startswith(("error: ", "hint: "))]
    assert errors == [f"error: the scheduler {name} has not returned for 0.5 s", "hint: does it loop without an end?"]
    assert process.returncode == 2
    wait_until_ended(of_session(process.pid))


PARENT = """
import subprocess, sys, time
from windtunnel.processes import end_with_parent

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True,
    preexec_fn=end_with_parent)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")
def test_a_server_does_not_outlive_a_killed_bench() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = Path("/proc") / parent.stdout.readline().strip()
        assert server.is_dir()
        parent.kill()
    end_s = time.monotonic() + 30
    while server.is_dir() and server.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end_s
        time.sleep(0.05)
