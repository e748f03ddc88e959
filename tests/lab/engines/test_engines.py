"""Real engines serve a tiny model: transformers wherever it is installed, the others by `make test-engines`."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from windtunnel.lab.bench.client import Endpoint, bench
from windtunnel.lab.servers import started
from windtunnel.lab.tiny_models import write_tiny_model
from windtunnel.metrics.client import client_summary
from windtunnel.workload.generate.requests import RequestArrays

PYTHON = os.environ.get("WINDTUNNEL_ENGINE_PYTHON", "")

TRANSFORMERS_PYTHON = sys.executable if find_spec("torch") and find_spec("transformers") else PYTHON

pytestmark = pytest.mark.slow

LOAD = RequestArrays(np.arange(12) * 0.2, np.full(12, 24), np.full(12, 6), np.zeros(12, np.int64))


@pytest.mark.engine
@pytest.mark.skipif(not PYTHON, reason="WINDTUNNEL_ENGINE_PYTHON names no interpreter with vLLM")
def test_vllm_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    model = str(write_tiny_model(tmp_path / "tiny"))
    arguments = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager"]
    with started("vllm", model, arguments, PYTHON) as url:
        run = bench(Endpoint(url, vocabulary=256), LOAD)
    summary = client_summary(run.requests, run.tokens)
    assert summary.num_failed == 0
    assert (run.requests["output_tokens"] == 6).all()
    assert (run.requests["input_tokens"] == 24).all()
    assert (run.requests["ttft_s"] > 0).all()


@pytest.mark.skipif(not TRANSFORMERS_PYTHON, reason="transformers is not installed")
def test_transformers_continuous_batching_over_http(tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    arguments = ["--device", "cpu", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "256"]
    with started("transformers", model, arguments, TRANSFORMERS_PYTHON) as url:
        run = bench(Endpoint(url, model, token_ids=False, ignore_eos=False), LOAD)
    assert client_summary(run.requests, run.tokens).num_failed == 0
    assert (run.requests["output_tokens"] == 6).all()


DRIVE = """
import sys
import numpy as np
from pathlib import Path
from drive import drive
from readers.engine_run import write_engine_runs
from windtunnel.lab.engines.vllm import VllmEngine, VllmSettings
from windtunnel.lab.tiny_models import TINY
engine = VllmEngine(TINY, VllmSettings(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64, dtype="float32"))
runs = []
for seed in range(10):
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(0.02, 20))
    runs.append(drive(engine, arrivals, rng.integers(5, 150, 20), rng.integers(2, 12, 20), 300))
write_engine_runs(Path(sys.argv[1]), runs)
"""


@pytest.mark.engine
@pytest.mark.skipif(not PYTHON, reason="WINDTUNNEL_ENGINE_PYTHON names no interpreter with vLLM")
def test_vllm_in_process_forms_the_simulators_batches(tmp_path: Path) -> None:
    import subprocess

    from benchmarks.test_recorded_engine import settings
    from readers.engine_run import read_engine_runs
    from serving.pool_of_one import run_pool
    from windtunnel.serving.state.records import played_back

    path = tmp_path / "run.json"
    root = Path(__file__).parents[3]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root / 'src'}:{root / 'benchmarks'}"}
    subprocess.run([PYTHON, "-c", DRIVE, path], check=True, env=environment, capture_output=True)
    engine = settings()._replace(max_num_seqs=4, max_num_batched_tokens=64, block_size=128, num_blocks=512)
    runs = read_engine_runs(path)
    assert len(runs) == 10
    for run in runs:
        priority = np.zeros(run.arrival_s.size, np.int64)
        arrays = RequestArrays(run.arrival_s, run.input_tokens, run.output_tokens, priority)
        _, steps = run_pool(engine, played_back(run.duration_s, 4), arrays)
        np.testing.assert_array_equal(steps["decode_tokens"], run.batches.decode_requests)
        np.testing.assert_array_equal(steps["prefill_tokens"], run.batches.prefill_tokens)


@pytest.mark.engine
@pytest.mark.skipif(not PYTHON, reason="WINDTUNNEL_ENGINE_PYTHON names no interpreter with vLLM")
def test_the_hosts_share_of_an_engines_steps_is_measured(tmp_path: Path) -> None:
    import json
    import subprocess

    from windtunnel.lab.tiny_models import TINY

    (tmp_path / "config.json").write_text(json.dumps(dict(TINY)), encoding="utf-8")
    command = [PYTHON, "-m", "windtunnel", "profile", "overheads", "--engine", "vllm", "--model", "config.json"]
    command += ["--device-name", "here", "--batches", "1,4", "--out", "measured", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    done = subprocess.run(command, check=True, env=environment, capture_output=True, cwd=tmp_path)
    document = json.loads(done.stdout[done.stdout.index(b"{") :])
    assert [row["num_requests"] for row in document["batches"]] == [1, 4]
    assert 0 < document["host"]["step_s"] < 0.1
    assert "engine: vllm" in (tmp_path / "measured" / "calibration.yaml").read_text(encoding="utf-8")
