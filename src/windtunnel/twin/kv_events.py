"""Events of the prefix caches over ZeroMQ, in the form that vLLM publishes them (`vllm/distributed/kv_events.py`, 0.10
to 0.24): routers that look for the replica with most of a prompt learn from them what each one has.

A message has three parts: the topic, a number that counts up (8 bytes, big end first), and a batch in MessagePack:
[time, [events], rank], where an event is ["BlockStored", hashes, parent's hash or None, token ids, block size, None,
"GPU"] or ["BlockRemoved", hashes, "GPU"]. A block of an event is a chunk of the forest.
"""

import time
from array import array
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError, import_extra
from windtunnel.twin.prefixes import PrefixForest

EVERY_S = 0.01
"""Least time between two looks at the caches."""
MEDIUM = "GPU"
MOST_PORT = 65535


class KvEvents:
    """Publishes what is cached and given up, every replica at a port of its own.

    Args:
        forest: the chunks of a live run.
        ranks_per_replica: of every pool.
        host, port: of the first replica; the others follow.

    Raises:
        MissingExtraError: pyzmq is not installed.
        InputError: a port is taken, or there is none of its number.
    """

    def __init__(self, forest: PrefixForest, ranks_per_replica: list[int], host: str, port: int) -> None:
        zmq = import_extra("zmq", "serve")
        self._forest, self._ranks_per_replica = forest, ranks_per_replica
        self._hashes = np.zeros(forest.size, np.int64)
        self._before = [np.zeros((forest.size, num_ranks), bool) for num_ranks in forest.num_ranks]
        self._encode, self._looked_s = msgspec.msgpack.Encoder().encode, 0.0
        self._pause_s = EVERY_S
        num_replicas = sum(ranks // each for ranks, each in zip(forest.num_ranks, ranks_per_replica, strict=True))
        if (last := port + num_replicas - 1) > MOST_PORT:
            raise InputError(f"--kv-events {port} needs the ports up to {last}; the largest is {MOST_PORT}")
        self._context, self._sockets = zmq.Context(), []
        for replica in range(num_replicas):
            publisher = self._context.socket(zmq.PUB)
            self._sockets.append(publisher)
            try:
                publisher.bind(f"tcp://{host}:{port + replica}")
            except zmq.ZMQError as error:
                self.close()
                raise InputError(f"{host}:{port + replica} cannot publish KV events: {error}") from None
        self._sent = [0] * num_replicas
        forest.before_forgetting = self.look

    def close(self) -> None:
        """Close all ports."""
        for publisher in self._sockets:
            publisher.close(linger=0)
        self._context.term()

    def look_sometimes(self, is_idle: bool) -> None:
        """Look at the caches if no request is under way, or the last look is some time ago: ten times what it took."""
        if is_idle or time.perf_counter() - self._looked_s > self._pause_s:
            self.look()
            self._pause_s = max(EVERY_S, 10 * (time.perf_counter() - self._looked_s))

    def look(self) -> None:
        """Publish what has changed since the last look."""
        self._looked_s, first_replica = time.perf_counter(), 0
        for number, ranks_per_replica in enumerate(self._ranks_per_replica):
            now, before = self._forest.whole_chunks(number), self._before[number]
            changed = np.flatnonzero((now != before).any(axis=0))
            for rank in changed.tolist():
                events = self._events(now[:, rank], before[:, rank])
                self._publish(first_replica + rank // ranks_per_replica, rank % ranks_per_replica, events)
            self._before[number] = now
            first_replica += self._forest.num_ranks[number] // ranks_per_replica

    def _events(self, now: NDArray[np.bool_], before: NDArray[np.bool_]) -> list[Any]:
        """Return the events of one rank: first what it has given up."""
        events: list[Any] = []
        gone = np.flatnonzero(before & ~now)
        if gone.size:
            events.append(["BlockRemoved", self._hashes[gone].tolist(), MEDIUM])
        for node in np.flatnonzero(now & ~before).tolist():
            key = self._forest.key_of(node)
            if key is not None:
                parent = self._hash(key[0]) if key[0] >= 0 else None
                ids = array("q", key[1]).tolist()
                size = self._forest.chunk_tokens
                events.append(["BlockStored", [self._hash(node)], parent, ids, size, None, MEDIUM])
        return events

    def _hash(self, node: int) -> int:
        """Return the hash of a chunk and all before it."""
        path = []
        while node >= 0:
            key = self._forest.key_of(node)
            if key is None:
                break
            path.append((node, key[1]))
            node = key[0]
        value = b""
        for place, ids in reversed(path):
            value = blake2b(value + ids, digest_size=8).digest()
            self._hashes[place] = int.from_bytes(value, "big", signed=True)
        return int(self._hashes[path[0][0]]) if path else 0

    def _publish(self, replica: int, rank: int, events: list[Any]) -> None:
        if events:
            number, self._sent[replica] = self._sent[replica], self._sent[replica] + 1
            batch = self._encode([time.time(), events, rank])
            self._sockets[replica].send_multipart((b"", number.to_bytes(8, "big"), batch))
