"""Serve OpenVINO GenAI's continuous batching at an OpenAI-compatible address; its Python package has no server.

Run by the interpreter of the environment that OpenVINO GenAI is installed in, so it imports nothing of this package:

    python _openvino_server.py --model FOLDER --port 8000

Prompts are token ids, or words, each of which becomes a token; a token of an answer is the word `w` and its number.
A model that is not exported yet is exported first, which needs optimum-intel.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

FIRST_TOKEN_ID, NUM_WORDS = 10, 200
"""First token id of words, and how many ids they use: the smallest vocabulary has no more."""
MODEL = "openvino_model.xml"


@dataclass
class OpenVinoEngine:
    """A pipeline that one thread steps; requests come from other threads."""

    pipeline: Any
    waiting: SimpleQueue[tuple[list[int], int, bool, SimpleQueue[int | None]]] = field(default_factory=SimpleQueue)

    def answer(self, prompt: list[int], num_tokens: int, ignore_eos: bool) -> Iterator[int]:
        """Yield the tokens of one request, as they come."""
        answers: SimpleQueue[int | None] = SimpleQueue()
        self.waiting.put((prompt, num_tokens, ignore_eos, answers))
        while (token := answers.get()) is not None:
            yield token

    def run(self) -> None:
        """Add waiting requests, compute a step, hand on its tokens; repeat for ever."""
        under_way: dict[int, tuple[Any, SimpleQueue[int | None]]] = {}
        number = 0
        while True:
            while not under_way or not self.waiting.empty():
                prompt, num_tokens, ignore_eos, answers = self.waiting.get()
                under_way[number] = (self._add(number, prompt, num_tokens, ignore_eos), answers)
                number += 1
            self.pipeline.step()
            for request, (handle, answers) in list(under_way.items()):
                if handle.can_read():
                    output = next(iter(handle.read().values()))
                    for token in output.generated_ids:
                        answers.put(int(token))
                    if output.finish_reason.value:
                        answers.put(None)
                        del under_way[request]
            time.sleep(0)  # lets go of the lock

    def _add(self, number: int, prompt: list[int], num_tokens: int, ignore_eos: bool) -> Any:
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens, ignore_eos, False
        return self.pipeline.add_request(number, openvino.Tensor(np.array([prompt], np.int64)), config)


class OpenVinoHandler(BaseHTTPRequestHandler):
    """Handler of `/v1/models`, `/health` and streamed `/v1/completions`."""

    protocol_version = "HTTP/1.1"
    engine: OpenVinoEngine
    name: str

    def log_message(self, *_: Any) -> None:
        """Log nothing: the measurement prints enough."""

    def do_GET(self) -> None:
        pages: dict[str, dict[str, Any]] = {"/health": {}, "/v1/models": {"data": [{"id": self.name}]}}
        if self.path not in pages:
            self.send_error(404)
            return
        content = json.dumps(pages[self.path]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions" or not body.get("stream"):
            self.send_error(404, "only streamed completions are answered")
            return
        prompt = _token_ids(body["prompt"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        number = 0
        for token in self.engine.answer(prompt, int(body["max_tokens"]), bool(body.get("ignore_eos", False))):
            number += 1
            self._event({"choices": [{"index": 0, "text": f" w{token}"}]})
        self._event({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": number}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, document: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())
        self.wfile.flush()


def _token_ids(prompt: str | list[int]) -> list[int]:
    """Return the prompt as token ids; equal words are equal tokens."""
    if isinstance(prompt, str):
        return [FIRST_TOKEN_ID + zlib.crc32(word.encode()) % NUM_WORDS for word in prompt.split()]
    return prompt


def _exported(model: Path) -> Path:
    """Return the folder of the model in OpenVINO's format, exported where it is missing."""
    if (model / MODEL).is_file():
        return model
    from optimum.intel import OVModelForCausalLM

    folder = Path(tempfile.mkdtemp(prefix="windtunnel-openvino-"))
    OVModelForCausalLM.from_pretrained(model, export=True, compile=False, load_in_8bit=False).save_pretrained(folder)
    return folder


def main() -> None:
    """Load the model and serve until the process is ended."""
    parser = argparse.ArgumentParser(description="OpenVINO GenAI behind an OpenAI-compatible address")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--num-kv-blocks", type=int, default=1024)
    given = parser.parse_args()
    import openvino_genai

    settings = openvino_genai.SchedulerConfig()
    settings.max_num_seqs, settings.max_num_batched_tokens = given.max_num_seqs, given.max_num_batched_tokens
    settings.num_kv_blocks, settings.dynamic_split_fuse = given.num_kv_blocks, True
    engine = OpenVinoEngine(openvino_genai.ContinuousBatchingPipeline(str(_exported(given.model)), settings, "CPU"))
    # A step keeps Python's lock; whoever sends its tokens waits for it no longer than this.
    sys.setswitchinterval(1e-4)
    threading.Thread(target=engine.run, daemon=True).start()
    OpenVinoHandler.engine, OpenVinoHandler.name = engine, given.model.name
    ThreadingHTTPServer(("127.0.0.1", given.port), OpenVinoHandler).serve_forever()


if __name__ == "__main__":
    main()
