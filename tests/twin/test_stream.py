"""Tokens leave one by one, or together where they are late; a stream waits for a client that reads too slowly."""

import asyncio
from typing import Any

import pytest

from live_twins import scenario_of
from windtunnel.twin.clock import TwinClock
from windtunnel.twin.engine import Answer, Twin
from windtunnel.twin.live import prepare_live
from windtunnel.twin.metrics import Metrics
from windtunnel.twin.server import Stream


class Connection:
    """What uvicorn's response has: a transport, whether the client reads too slowly, and `send`."""

    def __init__(self) -> None:
        self.transport = self.flow = self
        self.write_paused = self.is_closed = False
        self.written: list[bytes] = []
        self.messages: list[dict[str, Any]] = []
        self.drained: asyncio.Future[None] | None = None

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.is_closed

    async def send(self, message: Any) -> None:
        if self.write_paused:
            self.drained = asyncio.get_running_loop().create_future()
            await self.drained
        self.messages.append(message)


def bodies(connection: Connection) -> list[bytes | None]:
    return [message.get("body") for message in connection.messages]


def test_pieces_go_to_the_transport_and_wait_for_a_slow_client() -> None:
    async def talk() -> None:
        connection = Connection()
        stream = Stream(connection.send, asyncio.get_running_loop().create_future())
        stream.write(b"before the headers", False)
        assert not connection.written
        assert not connection.messages
        stream.begin(is_chunked=True)
        assert bodies(connection) == [None, b"before the headers"]
        stream.write(b"0123456789abcdefg", False)
        assert connection.written == [b"11\r\n0123456789abcdefg\r\n"]
        connection.write_paused = True
        for piece in (b"a", b"b", b"c"):
            stream.write(piece, False)
        assert len(connection.written) == 1
        connection.write_paused = False
        assert connection.drained is not None
        connection.drained.set_result(None)
        await asyncio.sleep(0.01)
        assert bodies(connection)[2:] == [b"a", b"bc"]
        stream.write(b"d", False)
        assert connection.written[1:] == [b"1\r\nd\r\n"]
        stream.write(b"e", True)
        assert connection.messages[-1] == {"type": "http.response.body", "body": b"e", "more_body": False}
        assert stream.done.done()

    asyncio.run(talk())


def test_nothing_is_written_for_a_client_that_has_left() -> None:
    async def talk() -> None:
        connection = Connection()
        stream = Stream(connection.send, asyncio.get_running_loop().create_future())
        stream.begin(is_chunked=True)
        connection.is_closed = True
        stream.write(b"a", False)
        assert not connection.written

    asyncio.run(talk())


def test_a_response_without_chunks_is_left_to_the_server() -> None:
    async def talk() -> None:
        connection = Connection()
        stream = Stream(connection.send, asyncio.get_running_loop().create_future())
        stream.begin(is_chunked=False)
        stream.write(b"a", False)
        assert bodies(connection) == [None, b"a"]
        assert not connection.written

    asyncio.run(talk())


@pytest.mark.parametrize(("every_s", "num_calls"), [(0.002, 40), (5.0, 1)])
def test_late_tokens_of_a_stream_leave_together(every_s: float, num_calls: int) -> None:
    clock = TwinClock(1.0)
    clock.now_s = lambda: clock.reached_s  # type: ignore[method-assign]
    metrics = Metrics("vllm", "m", 1, 4096)
    twin = Twin(prepare_live(scenario_of({}), max_requests=4), clock, 4, metrics)
    calls: list[tuple[int, int]] = []

    def note(answer: Answer, begin: int, is_last: bool) -> None:
        calls.append((begin, answer.sent))
        assert is_last == (answer.sent == 40)

    async def talk() -> None:
        twin.submit((100, 40), note, range(140))
        twin.close()
        while not calls or calls[-1][1] < 40:
            clock.reached_s += every_s
            twin.run_to(clock.reached_s)

    asyncio.run(talk())
    assert len(calls) == num_calls
    assert [begin for begin, _ in calls] == [0, *(end for _, end in calls)][: len(calls)]
    assert sum(metrics.histograms["itl"][0].counts) == 39
    assert sum(metrics.histograms["late"][0].counts) == 40
