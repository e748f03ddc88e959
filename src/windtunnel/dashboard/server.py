"""The dashboard's server: it answers on one address of this machine."""

import ipaddress
import socket
from collections.abc import Callable
from typing import Self

import uvicorn

from windtunnel.dashboard.app import dashboard_app
from windtunnel.dashboard.view import Dashboard
from windtunnel.errors import InputError

HOST = "127.0.0.1"
BACKLOG = 64
IDLE_S = 30
"""Seconds after which an idle connection is closed."""


class DashboardServer:
    """A server of one dashboard; it listens from the start, and answers once it serves.

    Args:
        dashboard: what it shows.
        host: the interface to listen on.
        port: 0 takes a free one.

    Raises:
        InputError: the port is taken, or there is no such interface.
    """

    def __init__(self, dashboard: Dashboard, host: str = HOST, port: int = 0) -> None:
        self._socket = _listening(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
        config = uvicorn.Config(
            dashboard_app(dashboard, host),
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # a failure is told in the answer
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def serve(self, on_start: Callable[[], None] = lambda: None) -> None:
        """Answer requests until `stop`, or until Ctrl-C, which raises KeyboardInterrupt.

        Args:
            on_start: called once Ctrl-C ends the server in an orderly way.
        """
        self._server.on_start = on_start
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """End `serve`, which runs in another thread."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """A server that says when it has started."""

    on_start: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and call `on_start`."""
        await super().startup(sockets=sockets)
        self.on_start()


def _listening(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        hint = "leave --port out for a free one" if port else "leave --host out for this machine alone"
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
