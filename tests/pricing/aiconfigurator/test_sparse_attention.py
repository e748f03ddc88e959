"""Sparse latent attention: what modules were measured to take, put together again from projections and the rest."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from windtunnel import catalog
from windtunnel.model import operators as ops
from windtunnel.model.attention.latent import SparseLatentDecode, SparseLatentPrefill
from windtunnel.model.precision import Format
from windtunnel.pricing.aiconfigurator.estimator import PACKAGE, measured_estimator, systems_folder
from windtunnel.pricing.estimator import Coverage, Estimator

pytestmark = pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"{PACKAGE} has no wheel for this platform")

WIDTHS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "hidden_size": 6144,
    "q_lora_rank": 2048,
    "index_num_heads": 32,
    "index_head_dim": 128,
    "top_k": 2048,
}
"""Of GLM-5."""
FORMATS = {"bfloat16": Format.BF16, "fp8_block": Format.FP8_BLOCK}


def estimator(system: str, engine: str, version: str) -> Estimator:
    device = catalog.device(system)
    return measured_estimator(device, catalog.default_node(device), engine, version)


def modules(system: str, engine: str, version: str, table: str, **words: str | int) -> dict[str, Any]:
    """Rows of a module's table that carry `words`, as columns."""
    path: Path = systems_folder() / system / "sparse_attention" / engine / version / f"{table}.parquet"
    rows = pq.read_table(path, filters=[(name, "=", word) for name, word in words.items()])
    return {name: np.asarray(rows[name]) for name in ("batch_size", "isl", "step", "latency")}


def projections(pricer: Estimator, num_tokens: Any, heads: int, expected: Format) -> Any:
    shapes = ((2048 + 576, 6144), (heads * 256, 2048), (6144, heads * 256))
    return sum(np.asarray(pricer.estimate(ops.Gemm(num_tokens, n, k, expected)).seconds) for n, k in shapes)


@pytest.mark.parametrize(
    ("system", "engine", "version", "model", "gemm"),
    [
        ("h200_sxm", "vllm", "0.24.0", "zai-org/GLM-5", "bfloat16"),
        ("b200_sxm", "sglang", "0.5.14", "zai-org/GLM-5-FP8", "fp8_block"),
        ("gb200", "trtllm", "1.3.0rc20", "zai-org/GLM-5", "bfloat16"),
    ],
)
def test_a_step_of_decodes_takes_what_its_module_took(
    system: str, engine: str, version: str, model: str, gemm: str
) -> None:
    words: dict[str, str | int] = {"model": model, "gemm_type": gemm, "kv_cache_dtype": "bfloat16", "num_heads": 8}
    rows = modules(system, engine, version, "dsa_generation_module_perf", **words)
    few = rows["batch_size"] <= 64
    batch, context = rows["batch_size"][few].astype(float), rows["step"][few] + 1.0
    pricer = estimator(system, engine, version)
    core = pricer.estimate(SparseLatentDecode(num_heads=8, **WIDTHS, batch=batch, context_tokens=context))
    module = np.asarray(core.seconds) + projections(pricer, batch, 8, FORMATS[gemm])
    assert core.coverage is Coverage.MEASURED
    assert "less its projections" in core.source
    error = np.abs(module / (rows["latency"][few] / 1e3) - 1)
    # Rows whose projections alone are priced above a tenth less than the module keep a tenth of it.
    assert np.quantile(error, 0.95) < 0.01


def test_short_prompts_of_sglang_attend_to_everything_and_do_not_wait_for_launches() -> None:
    """Its modules take 0.74 ms from 4 tokens to 16,384; the device is done with 512 tokens much sooner."""
    pricer = estimator("b200_sxm", "sglang", "0.5.14")

    def seconds(batch: float, num_tokens: float) -> float:
        core = SparseLatentPrefill(num_heads=8, **WIDTHS, batch=batch, num_tokens=num_tokens)
        return float(pricer.estimate(core).seconds)

    assert seconds(1, 512) < 0.1e-3 < seconds(1, 8192)
    assert seconds(16, 1024) < 0.75e-3


def test_rows_beyond_the_captured_graphs_are_left_out() -> None:
    """SGLang on H200 took 1.3 ms for 512 requests of 128 tokens and 0.12 ms for 256: its graphs ended in between."""
    pricer = estimator("h200_sxm", "sglang", "0.5.14")
    core = SparseLatentDecode(num_heads=8, **WIDTHS, batch=512.0, context_tokens=129.0)
    estimate = pricer.estimate(core)
    assert float(estimate.seconds) < 0.3e-3
    assert estimate.coverage is not Coverage.MEASURED


def test_scores_cost_every_key_and_attention_only_the_best() -> None:
    """Beyond `top_k` keys, a token more costs its score alone: 2 x 32 heads x 128 FLOPs in fp8, counted at half."""
    contexts = np.array([2048.0, 2049.0, 4096.0])
    decode = SparseLatentDecode(num_heads=8, **WIDTHS, batch=1.0, context_tokens=contexts)
    flops = np.asarray(decode.flops)
    assert flops[1] - flops[0] == pytest.approx(32 * 128)
    assert flops[2] - flops[0] == pytest.approx(2048 * 32 * 128)
    read = np.asarray(decode.num_bytes)
    assert read[2] - read[0] == pytest.approx(2048 * (128 + 4))


def test_prefill_is_the_sum_of_its_tokens() -> None:
    """Pairs of a prompt of n tokens: n^2 / 2 scored, and kept as in a window of `top_k`."""
    prefill = SparseLatentPrefill(num_heads=8, **WIDTHS, batch=2.0, num_tokens=8192.0)
    positions = np.arange(8192) + 0.5
    assert float(prefill.pairs_within(0)) == pytest.approx(2 * positions.sum())
    assert float(prefill.kept_pairs) == pytest.approx(2 * np.minimum(positions, 2048).sum(), rel=1e-6)


def test_prompts_just_longer_than_the_kept_keys_are_no_longer_dense() -> None:
    """SGLang's dense attention ends with 2,048 tokens: 0.12 ms there, and 2.3 ms at 4,096 in bf16."""
    pricer = estimator("h200_sxm", "sglang", "0.5.14")
    lengths = np.array([2048.0, 2049, 3000, 4096])
    op = SparseLatentPrefill(num_heads=8, **WIDTHS, batch=1.0, num_tokens=lengths)
    dense, *sparse = np.asarray(pricer.estimate(op).seconds)
    assert dense < 0.2e-3
    assert sparse == sorted(sparse)
    assert sparse[0] > sparse[-1] / 3
