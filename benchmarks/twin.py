"""How punctual a twin's tokens are under many streams, how far its latencies are from a simulation of the same
requests, and whether a warped day of requests leaves memory behind.

    python benchmarks/twin.py [--streams 2000] [--seconds 30] [--soak-hours 24]

The client is a bare socket: it sends a request's bytes and counts events. Client and server run on the same machine.
"""

import argparse
import asyncio
import json
import os
import re
import resource
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from windtunnel.serving.scenario import Scenario, load, scenario_from
from windtunnel.serving.simulate import simulate
from windtunnel.twin.clock import TwinClock
from windtunnel.twin.engine import Twin
from windtunnel.twin.live import prepare_live
from windtunnel.workload.generate.requests import RequestArrays, generate

MARK = b'"text":'
TOKENS_PER_STREAM, TOKEN_S = 256, 0.035


def scenario_table(streams: int, seconds: float) -> dict[str, Any]:
    """Sixteen replicas of a large model: about 40 ms a token, and so many streams after ten seconds."""
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
            "arrivals": {"type": "poisson", "rate_per_s": streams / (TOKENS_PER_STREAM * TOKEN_S)},
            "input_tokens": 128,
            "output_tokens": TOKENS_PER_STREAM,
            "duration_s": seconds,
            "client": "socket",
        },
    }


class Talk(asyncio.Protocol):
    """One connection: sends requests one after the other and notes when their events come."""

    def __init__(self) -> None:
        self.tail = b""
        self.times: list[float] = []
        self.counts: list[int] = []
        self.done: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        data = self.tail + data
        self.tail = data[-len(MARK) + 1 :]
        count = data.count(MARK)
        if count:
            self.times.append(now)
            self.counts.append(count)
        if b"[DONE]" in data and self.done is not None and not self.done.done():
            self.done.set_result(None)


def body_of(number: int, input_tokens: int, output_tokens: int) -> bytes:
    prompt = [int(token) for token in np.random.default_rng(number).integers(1000, 1 << 30, input_tokens)]
    asked = {"prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: twin\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    return head + body


async def drive(port: int, requests: RequestArrays) -> list[tuple[float, list[float], list[int]]]:
    """Send every request at its time; returns when it was sent, and the times and sizes of what came."""
    loop = asyncio.get_running_loop()
    idle: list[Talk] = []
    bodies = [
        body_of(number, int(inputs), int(outputs))
        for number, (inputs, outputs) in enumerate(zip(requests.input_tokens, requests.output_tokens, strict=True))
    ]
    begin = loop.time() + 0.5
    answers: list[tuple[float, list[float], list[int]]] = [(0.0, [], [])] * len(bodies)

    async def one(number: int) -> None:
        await asyncio.sleep(begin + float(requests.arrival_s[number]) - loop.time())
        talk = idle.pop() if idle else (await loop.create_connection(Talk, "127.0.0.1", port))[1]
        talk.times, talk.counts, talk.done = [], [], loop.create_future()
        sent = time.perf_counter()
        assert talk.transport is not None
        talk.transport.write(bodies[number])
        await talk.done
        answers[number] = (sent, talk.times, talk.counts)
        idle.append(talk)

    await asyncio.gather(*(one(number) for number in range(len(bodies))))
    return answers


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
        before = os.times()
        answers = asyncio.run(drive(port, requests))
        wall_s = os.times().elapsed - before.elapsed
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        usage = Path(f"/proc/{server.pid}/stat").read_text().split()
        busy_s = (int(usage[13]) + int(usage[14])) / os.sysconf("SC_CLK_TCK")
        server.terminate()
    report(scenario, requests, answers)
    rows, total = lateness(metrics)
    print(
        "lateness at the server, steps sent within: "
        + "  ".join(f"{bound * 1e3:g} ms {100 * count / total:.2f}%" for bound, count in rows if bound < 1)
    )
    print(f"server: {busy_s:.1f} s of processor time in {wall_s:.1f} s, start included")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--soak-hours", type=float, default=0.0)
    options = parser.parse_args()
    if options.soak_hours:
        asyncio.run(soak(options.soak_hours))
        return
    with TemporaryDirectory() as folder:
        file = Path(folder) / "scenario.yaml"
        file.write_text(yaml.safe_dump(scenario_table(options.streams, options.seconds)))
        serve_and_drive(load(file), file)


if __name__ == "__main__":
    main()
