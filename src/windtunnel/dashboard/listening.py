"""What the servers of this package have in common: a socket that listens, and a start that they tell of."""

import ipaddress
import socket
from collections.abc import Callable

import uvicorn

from windtunnel.errors import InputError


class Server(uvicorn.Server):
    """A server that says when it has started."""

    on_start: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and call `on_start`."""
        await super().startup(sockets=sockets)
        self.on_start()


def listening_socket(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one.

    Raises:
        InputError: the port is taken, or there is no such interface.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(backlog)
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
