"""How punctual a twin's tokens are under many streams, how far its latencies are from a simulation of the same
requests, and whether a warped day of requests leaves memory behind.

    python benchmarks/twin.py [--streams 2000] [--seconds 30] [--token-ms 31] [--soak-hours 24]

The client is a bare socket in a process of its own: it sends a request's bytes and counts tokens. Client and server run
on the same machine. The kernel's scheduler says how long each computed, and how long it waited for a processor.
"""

import argparse
import asyncio
import gc
import json
import re
import resource
import select
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from windtunnel.serving.scenario import Scenario, load, scenario_from
from windtunnel.serving.simulate import simulate
from windtunnel.twin.clock import TwinClock
from windtunnel.twin.engine import Twin
from windtunnel.twin.live import prepare_live
from windtunnel.workload.generate.requests import RequestArrays, generate

EVENT = b"data: {"
TOKENS_PER_STREAM = 256


def scenario_table(streams: int, seconds: float, token_s: float = 0.031) -> dict[str, Any]:
    """Sixteen replicas of a large model, each on two devices, and so many streams after ten seconds."""
    return {
        "model": "llama-3.1-70b",
        "deployment": {
            "device": "h100_sxm",
            "parallelism": {"tp": 2},
            "replicas": 16,
            "router": "least_outstanding",
            "engine": {"max_model_len": 4096, "max_num_seqs": 256},
        },
        "workload": {
            "arrivals": {"type": "poisson", "rate_per_s": streams / (TOKENS_PER_STREAM * token_s)},
            "input_tokens": 128,
            "output_tokens": TOKENS_PER_STREAM,
            "duration_s": seconds,
            "client": "socket",
        },
    }


class Talk:
    """One connection: notes when tokens come, and how many."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.number = -1
        self.tail = b""
        self.is_done = False
        self.times: list[float] = []
        self.counts: list[int] = []

    def send(self, number: int, body: bytes) -> float:
        """Send a request; returns when."""
        self.number, self.tail, self.is_done, self.times, self.counts = number, b"", False, [], []
        sent_s = time.perf_counter()
        self.socket.sendall(body)
        return sent_s

    def read(self, now_s: float) -> bool:
        """Read what has come; returns whether the answer has ended."""
        data = self.socket.recv(1 << 16)
        assert data, "the server has closed the connection"
        if data.startswith(b"HTTP/"):
            data = data.partition(b"\r\n\r\n")[2]
        # A token is a word with a space before it; an event has one space of its own and may have several tokens.
        whole = self.tail + data
        self.tail = whole[-len(EVENT) + 1 :]
        count = data.count(b" ") - whole.count(EVENT)
        if not self.is_done and b"[DONE]" in whole:
            self.is_done = True
            count -= 1
        if count:
            self.times.append(now_s)
            self.counts.append(count)
        return self.is_done and whole.endswith(b"0\r\n\r\n")


def body_of(number: int, input_tokens: int, output_tokens: int) -> bytes:
    prompt = [int(token) for token in np.random.default_rng(number).integers(1000, 100_000, input_tokens)]
    asked = {"prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    kind = "content-type: application/json"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: twin\r\n{kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    return head + body


def drive(port: int, requests: RequestArrays) -> list[tuple[float, list[float], list[int]]]:
    """Send every request at its time; returns when it was sent, and the times and sizes of what came."""
    bodies = [
        body_of(number, int(inputs), int(outputs))
        for number, (inputs, outputs) in enumerate(zip(requests.input_tokens, requests.output_tokens, strict=True))
    ]
    idle: list[Talk] = []
    talks: dict[int, Talk] = {}
    poller = select.epoll()
    answers: list[tuple[float, list[float], list[int]]] = []
    begin_s, left = time.perf_counter() + 0.5, len(bodies)
    gc.disable()
    while left:
        wait_s = 1.0
        while len(answers) < len(bodies):
            wait_s = begin_s + float(requests.arrival_s[len(answers)]) - time.perf_counter()
            if wait_s > 0:
                break
            if not idle:
                idle.append(Talk(port))
                talks[idle[-1].socket.fileno()] = idle[-1]
                poller.register(idle[-1].socket.fileno(), select.EPOLLIN)
            talk = idle.pop()
            sent_s = talk.send(len(answers), bodies[len(answers)])
            answers.append((sent_s, talk.times, talk.counts))
        for number, _ in poller.poll(max(wait_s, 0.0)):
            if talks[number].read(time.perf_counter()):
                idle.append(talks[number])
                left -= 1
    gc.enable()
    return answers


def processor_s(process: str) -> NDArray[np.float64]:
    """Return the seconds that a process has computed, and those that it has waited for a processor."""
    tasks = Path(f"/proc/{process}/task").glob("*/schedstat")
    return np.asarray(np.sum([[float(word) / 1e9 for word in task.read_text().split()[:2]] for task in tasks], axis=0))


def percentiles(values: Any, scale: float = 1e3) -> str:
    return "  ".join(f"p{q:g} {np.percentile(values, q) * scale:8.2f}" for q in (50, 90, 99, 99.9))


def lateness(text: str) -> tuple[list[tuple[float, int]], int]:
    """Read (bound, events up to it) of the server's own histogram."""
    found = re.findall(r'windtunnel:lateness_seconds_bucket\{.*?engine="0",le="([^"]+)"\} (\d+)', text)
    rows = [(float(bound), int(count)) for bound, count in found]
    return rows, rows[-1][1]


def serve_and_drive(scenario: Scenario, file: Path) -> None:
    requests = generate(scenario.workload, scenario.seed)
    command = [sys.executable, "-m", "windtunnel", "serve", str(file), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline().strip()
        print(line)
        port = int(line.split("/v1")[0].rpartition(":")[2])
        before = [processor_s(process) for process in (str(server.pid), "self")]
        began_s = time.perf_counter()
        answers = drive(port, requests)
        wall_s = time.perf_counter() - began_s
        spent = [processor_s(process) - old for process, old in zip((str(server.pid), "self"), before, strict=True)]
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        server.terminate()
    report(scenario, requests, answers)
    rows, total = lateness(metrics)
    print(
        "lateness at the server, tokens sent within: "
        + "  ".join(f"{bound * 1e3:g} ms {100 * count / total:.2f}%" for bound, count in rows if bound < 1)
    )
    tokens = int(requests.output_tokens.sum())
    for name, (busy_s, waited_s) in zip(("server", "client"), spent, strict=True):
        print(
            f"{name}: {busy_s:.1f} s of processor time in {wall_s:.1f} s, {1e6 * busy_s / tokens:.1f} us a token; "
            f"waited {waited_s:.1f} s for a processor"
        )


def report(scenario: Scenario, requests: RequestArrays, answers: list[tuple[float, list[float], list[int]]]) -> None:
    result = simulate(scenario)
    ttft = np.array([times[0] - sent for sent, times, _ in answers])
    tpot = np.array([(times[-1] - times[0]) / (sum(counts) - 1) for _, times, counts in answers])
    tokens = np.array([sum(counts) for _, _, counts in answers])
    assert np.array_equal(tokens, requests.output_tokens), "every token came"
    every = np.sort(np.concatenate([np.repeat(times, counts) for _, times, counts in answers]))
    rate = max(
        np.searchsorted(every, time_s + 1.0) - i
        for i, time_s in zip(range(0, every.size, 997), every[::997], strict=False)
    )
    begins = np.sort([sent for sent, _, _ in answers])
    ends = np.sort([times[-1] for _, times, _ in answers])
    streams = max(i + 1 - int(np.searchsorted(ends, begin)) for i, begin in enumerate(begins))
    print(
        f"{len(answers):,} requests, {tokens.sum():,} tokens; at most {streams:,} streams, {rate:,} tokens in a second"
    )
    for name, measured, simulated in (
        ("TTFT", ttft, result.requests["ttft_s"]),
        ("TPOT", tpot, result.requests["tpot_s"]),
    ):
        print(f"{name} ms, client:    {percentiles(measured)}")
        print(f"{name} ms, simulated: {percentiles(simulated)}")
        print(f"{name} median difference {100 * (np.median(measured) / np.median(simulated) - 1):+.2f}%")


async def soak(hours: float) -> None:
    """Send requests to a twin through simulated hours, and print what memory does."""
    table = scenario_table(200, 10.0)
    table["deployment"] |= {"replicas": 2}
    clock = TwinClock(None)
    twin = Twin(prepare_live(scenario_from(table), max_requests=1024), clock, 1024)
    rng, number, began = np.random.default_rng(0), 0, time.perf_counter()
    for hour in range(int(hours) + 1):
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        now = Path("/proc/self/statm").read_text().split()
        print(
            f"hour {hour:3}: {number:9,} requests, resident {int(now[1]) / 256:.0f} MiB, most {memory:.0f} MiB, "
            f"{time.perf_counter() - began:.0f} s"
        )
        if hour == int(hours):
            return
        while clock.reached_s < 3600 * (hour + 1):
            clock.reached_s += float(rng.exponential(2.0))
            first = int(rng.integers(1 << 40))
            number += 1
            twin.run_to(clock.reached_s)
            twin.submit((128, 128), lambda *_: None, range(first, first + 256))
            twin.close()
            await asyncio.sleep(0)  # the event loop forgets the timers that it was told to forget


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--token-ms", type=float, default=31.0, help="about what a token takes; decides the rate")
    parser.add_argument("--soak-hours", type=float, default=0.0)
    options = parser.parse_args()
    if options.soak_hours:
        asyncio.run(soak(options.soak_hours))
        return
    with TemporaryDirectory() as folder:
        file = Path(folder) / "scenario.yaml"
        file.write_text(yaml.safe_dump(scenario_table(options.streams, options.seconds, options.token_ms / 1e3)))
        serve_and_drive(load(file), file)


if __name__ == "__main__":
    main()
