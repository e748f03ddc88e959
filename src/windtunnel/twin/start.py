"""From a scenario to a server of its twin."""

import time
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Bools
from windtunnel.errors import InputError, import_extra
from windtunnel.serving.scenario import Scenario
from windtunnel.twin.clock import TwinClock
from windtunnel.twin.engine import Twin
from windtunnel.twin.faults import TwinFault
from windtunnel.twin.live import MAX_REQUESTS, LiveDeployment, prepare_live
from windtunnel.twin.metrics import Metrics
from windtunnel.twin.protocol import ANY_NAME, Limits
from windtunnel.twin.server import TwinApp
from windtunnel.twin.tokens import ModelTokenizer, PieceTokenizer
from windtunnel.workload.generate.requests import generate

FIELDS = (
    *("replica", "num_steps", "duration_s", "decode_tokens", "prefill_tokens", "num_prefills", "context_tokens"),
    *("prefill_pairs", "num_waiting"),
)


class ForwardPasses:
    """Writes every step of a twin from now on to a `.jsonl` file, a line of JSON each, as they begin.

    The names are those of SGLang's `srt/observability/forward_pass_metrics.py`, which TensorRT-LLM and vLLM share;
    `observe`, `diagnose` and `validate --steps` read them. Variances are missing: requests are not told apart here.
    InputError where the file cannot be written.
    """

    def __init__(self, twin: Twin, path: Path) -> None:
        if path.suffix != ".jsonl":
            raise InputError(f"--forward-passes is {path}", "its name must end in .jsonl")
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from None
        live, speculation = twin.live, twin.deployment.first.plan.speculation
        self._encode = msgspec.json.Encoder().encode
        self._gained = 1.0 if speculation is None else speculation.tokens_per_step
        self._counters = [0] * (max(live.replica_of_rank) + 1)
        self._others: Callable[[NDArray[np.void]], None] = live.on_steps
        live.on_steps = self.write

    def write(self, rows: NDArray[np.void]) -> None:
        """Write the steps of a call of the loop, `Step` records."""
        self._others(rows)
        lines = []
        for replica, count, duration_s, decodes, prefills, prompts, context, pairs, waiting in zip(
            *(rows[name].tolist() for name in FIELDS), strict=True
        ):
            # Equal chunks behind equal contexts have these pairs: C (K + C / 2) / n for n chunks of C tokens in all.
            cached = max(round(pairs * prompts / prefills - prefills / 2), 0) if prefills else 0
            for step in range(count):
                scheduled = {
                    "num_prefill_requests": prompts,
                    "sum_prefill_tokens": prefills,
                    "sum_prefill_kv_tokens": cached,
                    "num_decode_requests": decodes,
                    "sum_decode_kv_tokens": context + round(step * decodes * self._gained),
                }
                self._counters[replica] += 1
                row = {
                    "worker_id": str(replica),
                    "dp_rank": 0,
                    "counter_id": self._counters[replica],
                    "wall_time": duration_s / count,
                    "scheduled_requests": scheduled,
                    "queued_requests": {"num_prefill_requests": waiting},
                }
                lines.append(self._encode(row) + b"\n")
        self._file.write(b"".join(lines))
        self._file.flush()  # whoever follows the file sees a step when it begins

    def close(self) -> None:
        """Write what is left."""
        self._file.close()


EVERY_S = 0.01
"""Least time between two looks at the caches."""
MEDIUM = "GPU"
MOST_PORT = 65535


class KvEvents:
    """Publishes what the prefix caches of a twin store and give up, over ZeroMQ, every replica at a port of its own.

    The form is that of vLLM's `vllm/distributed/kv_events.py`, 0.10 to 0.24: the topic, a number that counts up (8
    bytes, big end first), and in MessagePack [time, [events], rank], where an event is ["BlockStored", hashes, parent's
    hash or None, ids, block size, None, "GPU"] or ["BlockRemoved", hashes, "GPU"]. Its blocks are the forest's chunks.
    MissingExtraError where pyzmq is not installed; InputError where there are no prefix caches, a port is taken, or
    there is none of its number.

    Args:
        host, port: of the first replica; the others follow.
    """

    def __init__(self, twin: Twin, host: str, port: int) -> None:
        zmq, forest = import_extra("zmq", "serve"), twin.live.forest
        if forest is None:
            raise InputError("there are no KV events without a prefix cache", "set engine.enable_prefix_caching")
        ranks_per_replica = [pool.settings.ranks_per_replica for pool in twin.deployment.prepared.pools]
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
        twin.on_look = self.look_sometimes

    def close(self) -> None:
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

    def _events(self, now: Bools, before: Bools) -> list[Any]:
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


def twin_app(
    scenario: Scenario,
    speed: float | None = 1.0,
    tokenizer: Path | None = None,
    names: Sequence[str] = (),
    allow_download: bool = False,
    max_requests: int = MAX_REQUESTS,
    faults: Sequence[TwinFault] = (),
    by_port: bool = False,
) -> TwinApp:
    """Return the application of a scenario's twin. InputError where the scenario, or the tokenizer, cannot be served.

    Args:
        scenario: its deployment answers; of its workload only the lengths of answers count.
        speed: simulated seconds in a second; None: as fast as it can.
        tokenizer: folder of a model's own; None: one that needs no file.
        names: under which the model is served, LoRA adapters behind it; empty: the scenario's name of the model.
        by_port: every replica has a port of its own, and the deployment's router does nothing.
    """
    if max_requests < 1:
        raise InputError(f"max_requests is {max_requests}; at least 1 is needed")
    output_tokens = generate(scenario.workload, scenario.seed).output_tokens.tolist()
    deployment: LiveDeployment = prepare_live(scenario, allow_download=allow_download, max_requests=max_requests)
    first, clock = deployment.first, TwinClock(speed)
    num_replicas = sum(pool.settings.num_replicas for pool in deployment.prepared.pools)
    models = list(names) or [scenario.model_name]
    metrics = Metrics(first.setup.engine.name, models[0], num_replicas, deployment.max_model_len)
    twin = Twin(deployment, clock, max_requests, metrics, faults, by_port)
    twin.live.on_steps = metrics.steps
    own = PieceTokenizer() if tokenizer is None else ModelTokenizer(tokenizer)
    vocab_size, any_name = first.setup.model.vocab_size, first.setup.engine.name in ANY_NAME
    limits = Limits(models, deployment.max_model_len, output_tokens, vocab_size, takes_any_name=any_name)
    return TwinApp(twin, own, limits, metrics)
