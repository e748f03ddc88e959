import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from readers.engine_run import EngineRun, read_engine_runs
from windtunnel.errors import InputError


def run() -> dict[str, Any]:
    """Two requests of 5 and 3 prompt tokens with 3 and 1 output tokens: a prompt in two chunks, then all is idle."""
    return {
        "requests": [
            {"arrival_s": 0.0, "prompt_tokens": 5, "output_tokens": 3},
            {"arrival_s": 1.0, "prompt_tokens": 3, "output_tokens": 1},
        ],
        "steps": [
            {"cpu_s": 0.1, "wall_s": 0.1, "scheduled": [[0, 4]]},
            {"cpu_s": 0.1, "wall_s": 0.1, "scheduled": [[0, 1]]},
            {"cpu_s": 0.1, "wall_s": 0.1, "scheduled": [[0, 1]]},
            {"cpu_s": 0.1, "wall_s": 0.1, "scheduled": [[0, 1]]},
            {"cpu_s": 0.1, "wall_s": 0.1, "scheduled": [[1, 3]]},
        ],
        "token_times_s": {"0": [0.25, 0.375, 0.5], "1": [1.25]},
        "rate_per_s": 2.0,
        "ignored": "other keys may stand in the file",
    }


def read(tmp_path: Path, *runs: Any) -> list[EngineRun]:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(runs))
    return read_engine_runs(path)


def refused(tmp_path: Path, **changes: Any) -> str:
    with pytest.raises(InputError) as caught:
        read(tmp_path, run() | changes)
    return caught.value.message


def test_steps_are_replayed_into_batches(tmp_path: Path) -> None:
    (recorded,) = read(tmp_path, run())
    batches = recorded.batches
    assert batches.prefill_tokens.tolist() == [4, 1, 0, 0, 3]
    assert batches.decode_requests.tolist() == [0, 0, 1, 1, 0]
    assert batches.decode_context_tokens.tolist() == [0, 0, 6, 7, 0]
    assert batches.prefill_pairs.tolist() == [4 * 2, 1 * 4.5, 0, 0, 3 * 1.5]
    assert batches.sampled.tolist() == [0, 1, 1, 1, 1]
    assert recorded.scheduled[4] == {1: 3}


def test_a_step_ends_with_its_tokens_and_starts_with_work(tmp_path: Path) -> None:
    (recorded,) = read(tmp_path, run())
    # A chunk without a token lasts its wall time; after the idle time the step starts at the arrival, 1.0 s.
    np.testing.assert_allclose(recorded.duration_s, [0.1, 0.15, 0.125, 0.125, 0.25])
    assert recorded.ttft_s.tolist() == [0.25, 0.25]
    assert recorded.e2e_s.tolist() == [0.5, 0.25]
    assert recorded.gaps_s.tolist() == [0.125, 0.125]
    assert recorded.rate_per_s == 2


def test_compressed_files_hold_the_same(tmp_path: Path) -> None:
    path = tmp_path / "runs.json.gz"
    path.write_bytes(gzip.compress(json.dumps([run(), run()]).encode()))
    first, second = read_engine_runs(path)
    (plain,) = read(tmp_path, run())
    np.testing.assert_array_equal(first.duration_s, plain.duration_s)
    np.testing.assert_array_equal(second.duration_s, plain.duration_s)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        read_engine_runs(tmp_path / "none.json")
    packed = gzip.compress(json.dumps([run()]).encode())
    for content in (packed[: len(packed) // 2], b"{}", b""):
        path = tmp_path / "cut.json.gz"
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"cut\.json\.gz"):
            read_engine_runs(path)


def test_runs_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = run()["steps"]
    twice = {"cpu_s": 0.1, "wall_s": 0.1, "scheduled": [[0, 1]]}
    assert refused(tmp_path, steps=[]) == "runs.json: run 0 has 2 requests and 0 steps; at least one of each is needed"
    assert "0 requests" in refused(tmp_path, requests=[])
    first_only = {"0": [0.25, 0.375, 0.5]}
    assert "request 1 has 0 token times for 1 output tokens" in refused(tmp_path, token_times_s=first_only)
    assert "step 5 exceeds the 3 output tokens of request 0" in refused(tmp_path, steps=[*steps, twice])
    assert "do not add up to the tokens of request 1" in refused(tmp_path, steps=steps[:-1])
    outside = [*steps[:-1], {"cpu_s": 0, "wall_s": 0, "scheduled": [[2, 3]]}]
    assert "step 4 schedules 3 tokens of request 2" in refused(tmp_path, steps=outside)
    empty = [*steps[:-1], {"cpu_s": 0, "wall_s": 0, "scheduled": [[1, 0]]}]
    assert "step 4 schedules 0 tokens of request 1" in refused(tmp_path, steps=empty)
    assert "$[0].requests" in refused(tmp_path, requests=[{"arrival_s": 0.0}])


@pytest.mark.full
def test_recorded_runs_are_whole(reference: Path) -> None:
    for path in sorted((reference / "engine_runs").glob("*.json.gz")):
        for recorded in read_engine_runs(path):
            assert (recorded.duration_s > 0).all()
            assert (recorded.gaps_s >= 0).all()
            assert recorded.batches.prefill_tokens.sum() == recorded.input_tokens.sum()
            assert recorded.batches.decode_requests.sum() == (recorded.output_tokens - 1).sum()
            assert recorded.batches.sampled.sum() == recorded.output_tokens.sum()
            pairs = (recorded.input_tokens.astype(float) ** 2 / 2).sum()
            assert recorded.batches.prefill_pairs.sum() == pytest.approx(pairs)


def test_a_chunk_without_a_token_after_idle_time_starts_at_the_arrival(tmp_path: Path) -> None:
    steps = [*run()["steps"][:4], *({"cpu_s": 0.1, "wall_s": 0.1, "scheduled": [[1, n]]} for n in (2, 1))]
    (recorded,) = read(tmp_path, run() | {"steps": steps})
    # Nothing is done from 0.5 s until 1.0 s; the chunk takes 0.1 s, and the token comes at 1.25 s.
    np.testing.assert_allclose(recorded.duration_s[-2:], [0.1, 0.15])
