"""KV events tell what the prefix caches have: whoever adds them up knows what a rank holds."""

import asyncio
import socket
import time
from typing import Any

import msgspec
import pytest

from live_twins import scenario_of
from windtunnel.errors import InputError
from windtunnel.twin.start import KvEvents, twin_app

zmq = pytest.importorskip("zmq")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.mark.full
def test_events_add_up_to_what_is_cached() -> None:
    app = twin_app(scenario_of({"engine": {"num_gpu_blocks": 300}}), None, max_requests=16)
    port = free_port()
    events = KvEvents(app.twin, "127.0.0.1", port)
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(f"tcp://127.0.0.1:{port}")
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    time.sleep(0.3)

    async def send() -> None:
        for number in range(150):  # more chunks than there are numbers for
            first = (number % 100) << 20
            app.twin.submit((160, 20), lambda *_: None, range(first, first + 180))
            app.twin.run_to(1e9)
            events.look()
        app.twin.close()

    asyncio.run(send())
    held: dict[int, list[int]] = {}
    parents: dict[int, Any] = {}
    expected, removed = 0, 0
    while subscriber.poll(300):
        topic, number, payload = subscriber.recv_multipart()
        assert (topic, int.from_bytes(number, "big")) == (b"", expected)
        expected += 1
        _, batch, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for kind, hashes, *rest in batch:
            if kind == "BlockStored":
                parent, ids, size, *_ = rest
                assert len(ids) == size == 16
                held[hashes[0]], parents[hashes[0]] = ids, parent
            else:
                removed += len(hashes)
                for each in hashes:
                    del held[each]
    forest = app.twin.live.forest
    assert forest is not None
    assert len(held) == forest.whole_chunks(0).sum()
    assert removed > 300
    last = next(each for each, ids in held.items() if ids[0] == (49 << 20) + 16)
    assert held[parents[last]] == list(range(49 << 20, (49 << 20) + 16))
    events.close()
    subscriber.close()
    context.term()


@pytest.mark.interpreted
def test_what_cannot_be_published_is_refused() -> None:
    app = twin_app(scenario_of({"engine": {"enable_prefix_caching": False}}), None, max_requests=16)
    with pytest.raises(InputError, match="without a prefix cache"):
        KvEvents(app.twin, "127.0.0.1", 5557)
    app = twin_app(scenario_of({"replicas": 2}), None, max_requests=16)
    with pytest.raises(InputError, match="--kv-events 65535 needs the ports up to 65536; the largest is 65535"):
        KvEvents(app.twin, "127.0.0.1", 65535)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="cannot publish KV events"):
            KvEvents(app.twin, "127.0.0.1", taken.getsockname()[1])
