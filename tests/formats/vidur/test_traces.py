"""Vidur's own trace of a run: the stages of batches that it recorded."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from formats.vidur.test_replay import RECORDED, case, tables_of
from reference import REFERENCE
from windtunnel.formats.vidur.read import read_config
from windtunnel.formats.vidur.replay import replay
from windtunnel.serving.run import LoopRun


def recorded_cases() -> list[str]:
    """The first recorded run with a pipeline, and the first with several replicas; a time limit leaves stages out."""
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
def test_stages_begin_and_take_as_long_as_vidur_drew(reference: Path, name: str) -> None:
    from pyarrow import parquet

    trail = run_of(reference, name).trail
    assert trail is not None
    theirs = parquet.read_table(reference / "vidur" / "cases" / name / "iterations.parquet")
    batch, stage = (theirs.column(column).to_numpy() for column in ("batch_id", "stage"))
    assert len(batch) == trail.stage_s.shape[0] * trail.stage_s.shape[1]
    start_s, end_s = trail.stage_s[batch, stage].T
    np.testing.assert_allclose(start_s * 1e6, theirs["start_us"].to_numpy(), rtol=1e-9)
    np.testing.assert_allclose((end_s - start_s) * 1e6, theirs["duration_us"].to_numpy(), rtol=1e-6)
