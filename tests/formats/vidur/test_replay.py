"""Parity with Vidur: the recorded cases, on Vidur's own look-up tables, batch for batch and request for request."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest

from readers.vidur_runs import VidurBatches, find_tables, read_case
from recorded import entries
from windtunnel.errors import InputError
from windtunnel.formats.vidur.read import OperatorTables, VidurConfig, random_replicas, read_config, read_tables
from windtunnel.formats.vidur.replay import host_s, pool_plan, replay
from windtunnel.report.serving.vidur import replay_metrics
from windtunnel.serving.run import LoopRun, prepare_loop
from windtunnel.serving.state.records import played_back

RECORDED = entries("vidur/cases/*/config.json")


def tables_of(reference: Path, config: VidurConfig) -> OperatorTables:
    path = find_tables(reference / "vidur" / "op_tables", config)
    return read_tables(path, config.kv_cache_prediction_granularity)


def tables_or_skip(reference: Path, config: VidurConfig) -> OperatorTables:
    try:
        return tables_of(reference, config)
    except InputError as error:
        pytest.skip(error.message)


class Case:
    """A recorded run with what Vidur made of it."""

    def __init__(self, folder: Path) -> None:
        case = read_case(folder)
        self.config, self.batches, self.requests = case.config, case.batches, case.requests
        self.expected = pd.read_parquet(folder / "requests.parquet").sort_values("Request Id")


@cache
def case(folder: Path) -> Case:
    return Case(folder)


def assert_same_batches(run: LoopRun, expected: VidurBatches, time_limit_s: float) -> None:
    """All batches, but that Vidur does not record those that its time limit catches in flight."""
    assert run.trail is not None
    members = run.trail.members
    recorded = np.isin(members[:, 0], expected.number)
    in_flight = np.unique(members[~recorded, 0])
    assert in_flight.size == 0 or time_limit_s > 0
    assert (run.trail.stage_s[in_flight, -1, 1] >= time_limit_s).all()
    for ours, theirs in zip(members[recorded].T, (expected.batch, expected.request, expected.tokens), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def run_on_recorded_durations(recorded: Case) -> LoopRun:
    """A run whose look-up tables were not recorded; its step durations were."""
    if recorded.config.num_pipeline_stages > 1 or recorded.config.time_limit:
        pytest.skip("without look-up tables, durations of several stages and of batches in flight are not known")
    plan = pool_plan(recorded.config, replicates_bugs=True, fuses_steps=False)
    requests = recorded.requests
    is_random = recorded.config.router == "random"
    replicas = random_replicas(recorded.config, requests.num_requests) if is_random else None
    max_num_seqs = recorded.config.batch_size_cap
    cost = played_back(recorded.batches.duration_s, max_num_seqs)
    return prepare_loop([plan._replace(cost=cost)], requests, replicas=replicas).run(keeps_trail=True)


@pytest.mark.full
@pytest.mark.parametrize("name", RECORDED)
def test_batches_and_times_equal_vidurs(reference: Path, name: str) -> None:
    recorded = case(reference / "vidur" / "cases" / name)
    try:
        tables = tables_of(reference, recorded.config)
    except InputError:
        run = run_on_recorded_durations(recorded)
    else:
        run = replay(recorded.config, tables, recorded.requests, fuses_steps=False, keeps_trail=True)
    assert_same_batches(run, recorded.batches, recorded.config.time_limit)
    assert run.trail is not None
    np.testing.assert_allclose(run.trail.stage_s[recorded.batches.number, 0, 0], recorded.batches.start_s, rtol=1e-9)
    requests, sequences, expected = run.requests, run.sequences, recorded.expected
    assert sequences is not None
    finished = np.isfinite(requests["finish_s"])
    np.testing.assert_array_equal(finished, expected["request_e2e_time"].notna())
    for ours, theirs in (
        (requests["finish_s"] - requests["arrival_s"], "request_e2e_time"),
        (requests["first_token_s"] - requests["arrival_s"], "prefill_e2e_time"),
        (requests["scheduled_s"] - requests["arrival_s"], "request_scheduling_delay"),
        (run.execution_s, "request_execution_time"),
        (sequences["paused_s"], "request_preemption_time"),
        (requests["num_preemptions"], "request_num_restarts"),
    ):
        np.testing.assert_allclose(ours[finished], expected[theirs][finished], rtol=1e-9, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("name", RECORDED)
def test_all_request_metrics_equal_vidurs(reference: Path, name: str) -> None:
    recorded = case(reference / "vidur" / "cases" / name)
    tables = tables_or_skip(reference, recorded.config)
    has_host = not recorded.config.skip_cpu_overhead_modeling
    run = replay(recorded.config, tables, recorded.requests, fuses_steps=not has_host, keeps_trail=has_host)
    spent_s = host_s(run, recorded.config, tables) if has_host else 0.0
    for column, ours in replay_metrics(run, spent_s).items():
        np.testing.assert_allclose(ours, recorded.expected[column], rtol=1e-9, atol=1e-9, err_msg=column)


@pytest.mark.full
@pytest.mark.parametrize("name", RECORDED)
def test_steps_taken_at_once_give_the_same_times(reference: Path, name: str) -> None:
    recorded = case(reference / "vidur" / "cases" / name)
    tables = tables_or_skip(reference, recorded.config)
    fused = replay(recorded.config, tables, recorded.requests)
    single = replay(recorded.config, tables, recorded.requests, fuses_steps=False)
    assert fused.steps["num_steps"].sum() == single.steps["num_steps"].sum()
    for column in ("scheduled_s", "first_token_s", "finish_s", "num_preemptions"):
        np.testing.assert_array_equal(fused.requests[column], single.requests[column])


@pytest.mark.full
def test_a_restarted_prompt_is_computed_again_in_chunks_by_default(reference: Path) -> None:
    """Vidur ran 3,891 tokens of the restarted prompt one a step, and reports its first token 49 s before its second."""
    name = "f_llama2-7b_sarathi_midprefill_bug"
    recorded = case(reference / "vidur" / "cases" / name)
    tables = tables_of(reference, recorded.config)
    theirs = replay(recorded.config, tables, recorded.requests)
    right = replay(recorded.config, tables, recorded.requests, replicates_bugs=False)
    i = int(np.argmax(theirs.requests["num_preemptions"]))
    decode_s = right.requests["finish_s"][i] - right.requests["first_token_s"][i]
    assert decode_s < 0.1 * (theirs.requests["finish_s"][i] - theirs.requests["first_token_s"][i])
    after_the_first = right.steps["decode_tokens"] @ right.steps["num_steps"] + right.steps["resumed_tokens"].sum()
    assert after_the_first == (recorded.requests.output_tokens - 1).sum()


@pytest.mark.full
def test_a_batch_longer_than_what_was_sent_between_stages_is_refused(reference: Path) -> None:
    recorded = case(reference / "vidur" / "cases" / "i_llama2-7b_tp1pp4_vllm")
    tables = tables_or_skip(reference, recorded.config)
    sent = {"send_recv": tables.token_s["send_recv"][:1000]}
    with pytest.raises(InputError, match="lies outside the look-up tables"):
        replay(recorded.config, replace(tables, token_s=tables.token_s | sent), recorded.requests)


def configured(folder: Path) -> VidurConfig:
    """A run of two replicas with random routing, nine requests with Poisson gaps and uniform lengths."""
    model = {"num_layers": 2, "num_q_heads": 8, "num_kv_heads": 8, "embedding_dim": 512, "mlp_hidden_dim": 1024}
    config = {
        "cluster_config": {
            "num_replicas": 2,
            "replica_config": {
                "model_name": "a/Tiny-1b-hf",
                "model_config": model,
                "device_config": {"total_memory_gb": 1},
            },
            "global_scheduler_config": {"name": "random"},
            "replica_scheduler_config": {"name": "vllm"},
        },
        "request_generator_config": {
            "name": "synthetic",
            "seed": 42,
            "max_tokens": 256,
            "num_requests": 9,
            "interval_generator_config": {"name": "poisson"},
            "length_generator_config": {"name": "uniform"},
        },
        "execution_time_predictor_config": {"prediction_max_prefill_chunk_size": 8, "prediction_max_batch_size": 8},
    }
    path = folder / "config.json"
    path.write_bytes(msgspec.json.encode(config))
    return read_config(path)


def test_draws_of_requests_that_never_arrived_are_skipped(tmp_path: Path) -> None:
    """Nine requests were drawn, with a gap and a length each, before the first replica was."""
    config = configured(tmp_path)
    generator = random.Random(42)
    for _ in range(2 * 9):
        generator.random()
    assert random_replicas(config, 4).tolist() == [generator.randint(1, 2) - 1 for _ in range(4)]


def test_tables_are_found_by_their_names_and_by_what_they_hold(tmp_path: Path) -> None:
    config = configured(tmp_path)
    axes = {"attn_prefill_chunk": np.arange(1, 9), "attn_decode_bs": np.arange(1, 9)}
    for name in ("tiny-1b_tp2", "tiny-1b_tp1_dgx", "tiny-1b_tp1_lightllm", "other-1b_tp1", "tiny-1b_tp1pp2"):
        np.savez(tmp_path / f"tables_{name}.npz", **axes)
    np.savez(tmp_path / "tables_tiny-1b_tp1.npz", **{name: axis[:4] for name, axis in axes.items()})
    assert find_tables(tmp_path, config).name == "tables_tiny-1b_tp1pp2.npz"
    np.savez(tmp_path / "tables_tiny-1b_tp1_vllm.npz", **axes)
    assert find_tables(tmp_path, config).name == "tables_tiny-1b_tp1_vllm.npz"
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="has no look-up tables of a/Tiny-1b-hf with tp 1, pp 1 for vllm"):
        find_tables(tmp_path / "none", config)
