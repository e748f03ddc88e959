"""Server-sent events of answers, written without a task or a message of the application's protocol for each.

uvicorn's `send` frames a chunk, checks its message and starts a coroutine for every piece of a body. A stream of tokens
needs none of that: its chunks are written straight to the connection's transport, and the server is asked only to begin
and end the response, and to wait where the client reads too slowly.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


class Stream:
    """Sends the body of one response, piece by piece, without a task of its own.

    Args:
        send: the server's.
        done: set once all has been sent.
    """

    __slots__ = ("_backlog", "_ended", "_flow", "_is_waiting", "_send", "_transport", "done")

    def __init__(self, send: Send, done: asyncio.Future[None]) -> None:
        self._send, self.done = send, done
        self._backlog: list[bytes] = []
        self._ended, self._is_waiting = False, True
        cycle = getattr(send, "__self__", None)  # uvicorn's RequestResponseCycle
        self._transport: Any = getattr(cycle, "transport", None)
        self._flow: Any = getattr(cycle, "flow", None)

    def begin(self, is_chunked: bool) -> None:
        """Send status and headers.

        Args:
            is_chunked: HTTP/1.1, whose bodies of unknown length are sent in chunks.
        """
        if not is_chunked or not hasattr(self._flow, "write_paused"):
            self._transport = None
        self._go_on(self._send({"type": "http.response.start", "status": 200, "headers": HEADERS}))

    def write(self, body: bytes, is_last: bool) -> None:
        """Send a piece now, or once the client has read those before it."""
        if not (is_last or self._is_waiting or self._transport is None or self._flow.write_paused):
            self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))
            return
        self._ended = self._ended or is_last
        if self._is_waiting:
            self._backlog.append(body)
        else:
            self._go_on(self._send({"type": "http.response.body", "body": body, "more_body": not is_last}))

    def _go_on(self, sending: Any) -> None:
        """Let the server send as far as it can; go on when what it waits for has come."""
        try:
            waited_for = sending.send(None)
        except StopIteration:
            self._is_waiting = False
            if self._backlog:
                body = b"".join(self._backlog)
                self._backlog.clear()
                self._go_on(self._send({"type": "http.response.body", "body": body, "more_body": not self._ended}))
            elif self._ended and not self.done.done():
                self.done.set_result(None)
            return
        except Exception as error:  # noqa: BLE001 whoever serves the request is told
            if not self.done.done():
                self.done.set_exception(error)
            return
        self._is_waiting = True
        waited_for._asyncio_future_blocking = False
        waited_for.add_done_callback(lambda _: self._go_on(sending))
