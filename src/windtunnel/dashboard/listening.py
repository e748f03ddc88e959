"""A local server of an application: it listens from the start, tells when it answers, and ends in an orderly way."""

import errno
import ipaddress
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import uvicorn

from windtunnel.errors import InputError

HOST = "127.0.0.1"
IDLE_S = 30
"""Seconds after which an idle connection is closed."""


class _Server(uvicorn.Server):
    """A server that says when it has started."""

    on_start: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.on_start()


class LocalServer:
    """A server of an application; it listens from the start, and answers once it serves. InputError where a port is
    taken, or there is no such interface.

    Args:
        port: 0 takes a free one.
        num_ports: one, or so many from `port` on.
    """

    def __init__(self, app: Any, host: str = HOST, port: int = 0, num_ports: int = 1, **settings: Any) -> None:
        with ExitStack() as opened:
            numbers = range(port, port + num_ports) if port else [0] * num_ports
            self._sockets = [
                opened.enter_context(listening_socket(host, number, settings["backlog"])) for number in numbers
            ]
            self._opened = opened.pop_all()
        self.ports: list[int] = [each.getsockname()[1] for each in self._sockets]
        self.urls = [f"http://{f'[{host}]' if ':' in host else host}:{number}" for number in self.ports]
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # a failure is told in the answer
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=1,
            **settings,
        )
        self._server = _Server(config)

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def url(self) -> str:
        return self.urls[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def serve(self, on_start: Callable[[], None] = lambda: None) -> None:
        """Answer requests until `stop`, SIGTERM, or Ctrl-C, which raises KeyboardInterrupt.

        Args:
            on_start: called once Ctrl-C ends the server in an orderly way.
        """
        self._server.on_start = on_start
        self._server.run(sockets=self._sockets)

    def stop(self) -> None:
        """End `serve`, which runs in another thread."""
        self._server.should_exit = True


def listening_socket(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens (port 0: a free one); InputError where the port is taken or no such interface is."""
    # asyncio sends small writes at once only on sockets that name their protocol; others wait 40 ms for a delayed ACK.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, proto=socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        is_of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        hint = "give --port 0 for a free one" if is_of_port else "leave --host out for this machine alone"
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"{host}:{port} cannot be listened on: {reason}", hint) from None
    except OverflowError:
        listener.close()
        raise InputError(f"--port is {port}; 0 to 65535 is possible") from None
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
