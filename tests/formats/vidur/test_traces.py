"""Vidur's own trace of a run: the bars that it recorded."""

from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest

from formats.vidur.test_replay import RECORDED, case, tables_of
from recorded import REFERENCE
from windtunnel.formats.vidur.read import read_config
from windtunnel.formats.vidur.replay import replay
from windtunnel.formats.vidur.write import chrome_events, write_chrome_trace
from windtunnel.serving.run import LoopRun


def recorded_cases() -> list[str]:
    """The first recorded run with a pipeline, and the first with several replicas; a time limit leaves bars out."""
    configs = {name: read_config(REFERENCE / "vidur" / "cases" / name / "config.json") for name in RECORDED}
    clusters = {name: config for name, config in configs.items() if not config.time_limit}
    pipelined = [name for name, cluster in clusters.items() if cluster.num_pipeline_stages > 1]
    replicated = [name for name, cluster in clusters.items() if cluster.num_replicas > 1]
    return pipelined[:1] + replicated[:1]


CASES = recorded_cases()


@cache
def run_of(reference: Path, name: str) -> LoopRun:
    recorded = case(reference / "vidur" / "cases" / name)
    return replay(
        recorded.config, tables_of(reference, recorded.config), recorded.requests, fuses_steps=False, keeps_trail=True
    )


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_bars_are_those_that_vidur_drew(reference: Path, name: str, tmp_path: Path) -> None:
    from pyarrow import parquet

    path = tmp_path / "chrome_trace.json"
    write_chrome_trace(path, chrome_events(run_of(reference, name)))
    events = msgspec.json.decode(path.read_bytes())["traceEvents"]
    theirs = parquet.read_table(reference / "vidur" / "cases" / name / "iterations.parquet")
    theirs = theirs.sort_by([("batch_id", "ascending"), ("stage", "ascending")])
    ours = sorted(events, key=lambda event: (event["args"]["batch_id"], event["tid"]))
    assert len(ours) == len(theirs)
    assert [event["args"]["request_ids"] for event in ours] == theirs["request_ids"].to_pylist()
    assert [event["args"]["num_tokens"] for event in ours] == theirs["num_tokens"].to_pylist()
    np.testing.assert_allclose([event["ts"] for event in ours], theirs["start_us"].to_numpy(), rtol=1e-9)
    np.testing.assert_allclose([event["dur"] for event in ours], theirs["duration_us"].to_numpy(), rtol=1e-6)
    assert all(event["name"] == str(event["args"]["request_ids"]) for event in ours)
