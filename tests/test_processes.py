"""Worker processes end with the process that starts them: after an error, a signal, and a kill."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from windtunnel import processes

PARENT = """
import os, time
from windtunnel.processes import WorkerProcesses

if __name__ == "__main__":
    with WorkerProcesses(2) as workers:
        print(*{workers.submit(os.getpid).result() for _ in range(20)}, flush=True)
        workers.submit(time.sleep, 600)
        THEN
"""


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_ended(pids: list[int]) -> None:
    end_s = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < end_s, f"{pids} still run"
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGTERM, None], ids=["killed", "terminated", "an error"])
def test_no_worker_outlives_its_parent(tmp_path: Path, ended_by: signal.Signals | None) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT.replace("THEN", "time.sleep(600)" if ended_by else "raise ValueError"))
    environment = os.environ | {"PYTHONPATH": str(Path(processes.__file__).parents[1])}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert pids
        if ended_by:
            parent.send_signal(ended_by)
        # A reader of the pipe meets its end: no worker keeps it open.
        assert parent.stdout.read() == b""
        code = parent.wait(60)
    assert code == (-ended_by if ended_by else 1)
    wait_until_ended(pids)


def test_work_under_way_is_finished() -> None:
    with processes.WorkerProcesses(1) as workers:
        answers = [workers.submit(pow, 2, power) for power in range(5)]
    assert [answer.result() for answer in answers] == [1, 2, 4, 8, 16]
