"""Start real serving engines as servers."""

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
from typing import Any

from windtunnel.errors import InputError, WindtunnelError, check_known
from windtunnel.plugins import Registry
from windtunnel.processes import end_with_parent

ENGINES = Registry("windtunnel.lab_engines", "windtunnel.lab.engines", "engine")
OFFLINE = {"HF_HUB_OFFLINE": "1"}
START_TIMEOUT_S = 300.0
POLL_S = 0.5


@dataclass(frozen=True)
class EngineServer:
    """The command that starts an engine's server."""

    module: tuple[str, ...]
    """Arguments after the interpreter."""
    model_option: str = ""
    """Option that names the model; empty: the model is a plain argument."""
    environment: Mapping[str, str] = field(default_factory=dict)


def engines_with(attribute: str) -> dict[str, Any]:
    """Return the modules of the engines that define an attribute, by name."""
    return {name: module for name, module in ENGINES.every().items() if hasattr(module, attribute)}


@contextmanager
def started(engine: str, model: str, arguments: Sequence[str] = (), python: str = sys.executable) -> Iterator[str]:
    """Start a server and yield its endpoint; the server ends with the block. InputError where there is no such engine
    or interpreter; WindtunnelError where it ended, or was not ready in time; the message has the last lines of its
    output.

    Args:
        model: a folder or name, as the engine takes it.
        python: interpreter of the environment that the engine is installed in.
    """
    known = engines_with("SERVER")
    check_known(engine, known, f"{engine!r} cannot be started")
    server: EngineServer = known[engine].SERVER
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    named = [server.model_option, model] if server.model_option else [model]
    command = [python, *server.module, *named, "--port", str(port), *arguments]
    with tempfile.TemporaryDirectory(prefix="windtunnel-engine-") as folder:
        path = Path(folder) / "engine.log"
        with path.open("wb") as output:
            try:
                process = subprocess.Popen(  # a list, no shell
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **server.environment},
                    start_new_session=True,
                    preexec_fn=end_with_parent,  # noqa: PLW1509 it only calls the kernel
                )
            except OSError as error:
                raise InputError(f"{python} cannot be run: {error.strerror}", "name the engine's interpreter") from None
            try:
                _wait(process, f"http://127.0.0.1:{port}/health", engine, path)
                yield f"http://127.0.0.1:{port}/v1"
            finally:
                for signal in (15, 9):
                    if process.poll() is None:
                        os.killpg(process.pid, signal)
                        try:
                            process.wait(timeout=20)
                        except subprocess.TimeoutExpired:
                            continue
                process.wait()


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
