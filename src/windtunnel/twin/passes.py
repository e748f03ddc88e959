"""Forward-pass metrics of a twin: a line of JSON for every step, under the names that engines report them by.

The names are those of SGLang's `srt/observability/forward_pass_metrics.py`, which TensorRT-LLM and vLLM share;
`windtunnel observe`, `diagnose` and `validate --steps` read them. A step has no variances: its requests are not told
apart here.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.twin.live import LiveLoop

FIELDS = (
    *("replica", "num_steps", "duration_s", "decode_tokens", "prefill_tokens", "num_prefills", "context_tokens"),
    *("prefill_pairs", "num_waiting"),
)


class ForwardPasses:
    """Writes the steps of a live run to a file, as they begin.

    Args:
        live: the run.
        path: of the file, whose name ends in `.jsonl`.
        decode_queries: tokens that a request computes in a decode step: more than one with speculative decoding.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(self, live: LiveLoop, path: Path, decode_queries: int = 1) -> None:
        if path.suffix != ".jsonl":
            raise InputError(f"--forward-passes is {path}", "its name must end in .jsonl")
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from None
        self._encode, self._queries = msgspec.json.Encoder().encode, decode_queries
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
            requests = decodes // self._queries
            # Equal chunks behind equal contexts have these pairs: C (K + C / 2) / n for n chunks of C tokens in all.
            cached = max(round(pairs * prompts / prefills - prefills / 2), 0) if prefills else 0
            for step in range(count):
                scheduled = {
                    "num_prefill_requests": prompts,
                    "sum_prefill_tokens": prefills,
                    "sum_prefill_kv_tokens": cached,
                    "num_decode_requests": requests,
                    "sum_decode_kv_tokens": context + step * decodes,
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

    def close(self) -> None:
        """Write what is left."""
        self._file.close()
