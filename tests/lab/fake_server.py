"""A server that speaks enough of OpenAI's API to be measured: known delays, asked lengths, wanted failures."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Seen:
    """What clients sent."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def metrics(self) -> str:
        """vLLM's counters of a prefix cache that keeps every prompt and finds whole ones."""
        prompts = [str(body.get("prompt")) for body in self.bodies]
        sizes = [len(body["prompt"]) for body in self.bodies]
        found = sum(size for at, size in enumerate(sizes) if prompts[at] in prompts[:at])
        return f"vllm:prompt_tokens_total {sum(sizes)}\nvllm:prefix_cache_hits_total {found}\n"


@contextmanager
def fake_server(
    first_s: float = 0.03,
    gap_s: float = 0.005,
    fails: int = 0,
    models: bool = True,
    counts: bool = True,
    metrics: bool = False,
    refusal: tuple[int, str] = (500, "out of luck"),
    cached: Callable[[int], int] = lambda _: 0,
) -> Iterator[tuple[str, Seen]]:
    """Its address, and what it has seen; the first `fails` requests are refused.

    `cached` tells how much of a prompt of some length it found in its cache, which it says where it is not 0.
    Without `counts` a stream ends as llama.cpp's do: an empty part says why, and nobody says how many tokens it had.
    """
    seen = Seen()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Quiet."""

        def do_GET(self) -> None:
            if self.path == "/v1/models" and models:
                self._answer(200, {"data": [{"id": "fake"}]})
            elif self.path == "/metrics" and metrics:
                self._send(200, seen.metrics().encode())
            else:
                self._answer(404, {"error": "no such page"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with seen.lock:
                seen.bodies.append(body)
                refused = len(seen.bodies) <= fails
                seen.under_way += 1
                seen.most_under_way = max(seen.most_under_way, seen.under_way)
            # A request has ended before its client can know: the next one may come while this thread still cleans up.
            if refused:
                self._ended()
                self._answer(refusal[0], {"error": refusal[1]})
            else:
                self._stream(body)
                self._ended()
                self.wfile.write(b"data: [DONE]\n\n")

        def _ended(self) -> None:
            with seen.lock:
                seen.under_way -= 1

        def _answer(self, status: int, document: dict[str, Any]) -> None:
            self._send(status, json.dumps(document).encode(), "application/json")

        def _send(self, status: int, content: bytes, kind: str = "text/plain") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _stream(self, body: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            chat = self.path.endswith("chat/completions")
            if chat:
                self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for number in range(body["max_tokens"]):
                time.sleep(gap_s if number else first_s)
                self._event({"choices": [{"delta": {"content": "x"}} if chat else {"text": "x"}]})
            if not counts:
                self._event({"choices": [{"text": "", "finish_reason": "length"}]})
                return
            prompt = body.get("prompt")
            length = len(prompt) if isinstance(prompt, list) else len(str(prompt or body.get("messages")).split())
            usage: dict[str, Any] = {
                "prompt_tokens": length,
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": None,
            }
            if cached(length):
                usage["prompt_tokens_details"] = {"cached_tokens": cached(length)}
            self._event({"choices": [], "usage": usage})

        def _event(self, document: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())
            self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
