"""Reads a second that the dashboard answers, and errors: `python benchmarks/dashboard_load.py --seconds 10`.

A server and clients that keep their connections, each in a process of its own, on the cores of this machine. Every
answer is checked: its status, and that a page of runs names its runs.
"""

import argparse
import json
import multiprocessing
import os
import re
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import windtunnel as wt
from windtunnel.dashboard.server import DashboardServer
from windtunnel.dashboard.view import dashboard_of
from windtunnel.report.serving.run import write_run

PATHS = {
    "/": b"run1",
    "/api/runs": b"run1",
    "/run/run1": b"TTFT",
    "/api/catalog/devices": b"h100_sxm",
    "/assets/page.css": b"{",
}
"""Page that is read -> words that its answer has."""


def serve(folder: str, port: Any) -> None:
    """Serve a folder, and say where."""
    with DashboardServer(dashboard_of(Path(folder))) as server:
        port.send(server.port)
        server.serve()


def read(port: int, path: str, seconds: float, counted: Any) -> None:
    """Read a page over and over on one connection; count answers, errors and the longest time.

    Sockets and not http.client, which takes longer for a request than the server. Every second read names the ETag of
    the first, as a browser does.
    """
    reads, errors, longest_s, tag = 0, 0, 0.0, b""
    until_s = time.monotonic() + seconds
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        start = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n".encode()
        while (started_s := time.monotonic()) < until_s:
            asked = tag if reads % 2 else b""
            connection.sendall(start + (b"If-None-Match: %b\r\n\r\n" % asked if asked else b"\r\n"))
            head, body = answer_of(connection)
            if not tag:
                tag = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"etag: "))[6:]
            is_right = head.startswith(b"HTTP/1.1 304") if asked else b" 200 " in head[:20] and PATHS[path] in body
            reads += 1
            errors += not is_right
            longest_s = max(longest_s, time.monotonic() - started_s)
    counted.put((path, reads, errors, longest_s))


def answer_of(connection: socket.socket) -> tuple[bytes, bytes]:
    """Receive an answer: its head, and its body."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 18) or b"\r\n\r\n"
    head, _, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    while length and len(body) < int(length[1]):
        body += connection.recv(1 << 18)
    return head, body


def cpu_s(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(port: int, pid: int, path: str, seconds: float, num_clients: int) -> dict[str, Any]:
    """Measure one page with so many clients, which are forked so that they begin at once."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as first:
        first.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        answer_of(first)  # pages are made once
    before_s = cpu_s(pid)
    context = multiprocessing.get_context("fork")
    counted = context.Queue()
    clients = [context.Process(target=read, args=(port, path, seconds, counted)) for _ in range(num_clients)]
    for client in clients:
        client.start()
    rows = [counted.get() for _ in clients]
    reads, errors = sum(row[1] for row in rows), sum(row[2] for row in rows)
    return {
        "page": path, "reads_per_s": reads / seconds, "errors": errors, "longest_s": max(row[3] for row in rows),
        "server_cpu_s": (cpu_s(pid) - before_s) / max(reads, 1),
    }  # fmt: skip


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
        rows = [measured(port, server.pid or 0, path, options.seconds, options.clients) for path in PATHS]
        server.terminate()
    if options.json:
        print(json.dumps({"load_average": os.getloadavg()[0], "pages": rows}, indent=2))
        return
    for row in rows:
        longest_ms = row["longest_s"] * 1e3
        print(
            f"{row['page']:22}{row['reads_per_s']:8,.0f} reads/s, {row['errors']} errors, longest {longest_ms:.0f} ms, "
            f"{row['server_cpu_s'] * 1e3:.2f} ms of the server's processor each"
        )
    print(f"load average of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
