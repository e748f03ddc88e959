"""Reads a second that the dashboard answers, and errors: `python benchmarks/dashboard_load.py --seconds 10`.

A server and clients that keep their connections, each in a process of its own, on the cores of this machine. Every
answer is checked: its status, and that a page of runs names its runs.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import windtunnel as wt
from windtunnel.dashboard.server import DashboardServer
from windtunnel.dashboard.view import dashboard_of
from windtunnel.report.serving.run import write_run

PATHS = {
    "/": "run1",
    "/api/runs": "run1",
    "/run/run1": "TTFT",
    "/api/catalog/devices": "h100_sxm",
    "/assets/page.css": "{",
}
"""Page that is read -> words that its answer has."""


def serve(folder: str, port: Any) -> None:
    """Serve a folder, and say where."""
    with DashboardServer(dashboard_of(Path(folder))) as server:
        port.send(server.port)
        server.serve()


def read(port: int, path: str, seconds: float, counted: Any) -> None:
    """Read a page over and over on one connection; count answers, errors and the longest time."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    reads, errors, longest_s, tag = 0, 0, 0.0, ""
    until_s = time.monotonic() + seconds
    while (started_s := time.monotonic()) < until_s:
        try:
            connection.request("GET", path, headers={"If-None-Match": tag} if tag else {})
            answer = connection.getresponse()
            text = answer.read().decode()
            is_right = answer.status == 304 if tag else answer.status == 200 and PATHS[path] in text
            tag = tag or (answer.headers["ETag"] if reads % 2 else "")
        except (OSError, http.client.HTTPException):
            is_right = False
            connection.close()
        reads += 1
        errors += not is_right
        longest_s = max(longest_s, time.monotonic() - started_s)
    counted.put((path, reads, errors, longest_s))


def measured(port: int, path: str, seconds: float, num_clients: int) -> dict[str, Any]:
    """Measure one page with so many clients, which are forked so that they begin at once."""
    context = multiprocessing.get_context("fork")
    counted = context.Queue()
    clients = [context.Process(target=read, args=(port, path, seconds, counted)) for _ in range(num_clients)]
    for client in clients:
        client.start()
    rows = [counted.get() for _ in clients]
    reads, errors = sum(row[1] for row in rows), sum(row[2] for row in rows)
    return {"page": path, "reads_per_s": reads / seconds, "errors": errors, "longest_s": max(row[3] for row in rows)}


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        load: dict[str, Any] = {"input_tokens": 64, "output_tokens": 8, "num_requests": 50, "rate_per_s": 4.0}
        result = wt.simulate(wt.scenario(model="llama-3.1-8b", device="h100_sxm", **load))
        for number in range(options.runs):
            write_run(result, Path(folder) / f"run{number}")
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        server = context.Process(target=serve, args=(folder, theirs), daemon=True)
        server.start()
        port = ours.recv()
        rows = [measured(port, path, options.seconds, options.clients) for path in PATHS]
        server.terminate()
    if options.json:
        print(json.dumps({"load_average": os.getloadavg()[0], "pages": rows}, indent=2))
        return
    for row in rows:
        longest_ms = row["longest_s"] * 1e3
        print(
            f"{row['page']:22}{row['reads_per_s']:8,.0f} reads/s, {row['errors']} errors, longest {longest_ms:.0f} ms"
        )
    print(f"load average of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
