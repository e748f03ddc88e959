"""Parity with Vidur: the recorded cases, on Vidur's own look-up tables, batch for batch and request for request."""

from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from windtunnel.engine.vidur import replay, walked_settings
from windtunnel.engine.walked import WalkedRun, walk
from windtunnel.estimate.steps import recorded_steps
from windtunnel.interop.vidur import VidurBatches, VidurRequests, read_case, read_tables
from windtunnel.kernels import state
from windtunnel.spec.deployment import EngineSettings

CASES = (
    "a_llama2-7b_tp1_vllm_arxiv1k_qps2",
    "b_llama3-8b_tp1_sarathi512_conv512",
    "c_llama2-70b_tp2pp2_sarathi_arxiv500",
    "c_llama2-70b_tp4pp1_sarathi_arxiv500",
    "d_llama2-7b_tp1_ft_fixed",
    "d_llama2-7b_tp1_orca_arxiv300",
    "e_llama2-7b_4rep_lor_lightload",
    "e_llama2-7b_4rep_lor_vllm",
    "e_llama2-7b_4rep_rr_vllm",
    "f_llama2-7b_sarathi_midprefill_bug",
    "f_llama2-7b_sarathi_preempt",
    "f_llama2-7b_vllm_preempt",
    "g_llama2-7b_sarathi_uniform_static",
    "i_llama2-7b_tp1pp4_vllm",
)
RESTARTED_IN_ITS_PROMPT = {"f_llama2-7b_sarathi_midprefill_bug": 4050}
"""The prompt of the one request there that was restarted before it was computed: its record holds what was left."""


def table_of(case: str) -> str:
    for part, table in (
        ("_orca_", "llama2-7b_tp1_orca"),
        ("_ft_", "llama2-7b_tp1_orca"),
        ("tp2pp2", "llama2-70b_tp2pp2_pairwise_REALATTN"),
        ("tp4pp1", "llama2-70b_tp4pp1_pairwise"),
        ("tp1pp4", "llama2-7b_tp1pp4_vllm"),
        ("llama3-8b", "llama3-8b_tp1"),
    ):
        if part in case:
            return f"tables_{table}.npz"
    return "tables_llama2-7b_tp1_vllm.npz"


class Case:
    """A recorded run with what Vidur made of it."""

    def __init__(self, folder: Path) -> None:
        case = read_case(folder)
        self.config, self.batches, self.requests = case.config, case.batches, case.requests
        self.expected = pd.read_parquet(folder / "requests.parquet").sort_values("Request Id")
        if folder.name in RESTARTED_IN_ITS_PROMPT:
            whole = self.requests.prefill_tokens + self.requests.decode_tokens
            restarted = self.expected["request_num_restarts"].to_numpy() > 0
            prompts = np.where(restarted, RESTARTED_IN_ITS_PROMPT[folder.name], self.requests.prefill_tokens)
            self.requests = VidurRequests(self.requests.arrival_s, prompts, whole - prompts)


@cache
def case(folder: Path) -> Case:
    return Case(folder)


def assert_same_batches(run: WalkedRun, expected: VidurBatches) -> None:
    assert run.trail is not None
    for ours, theirs in zip(run.trail.members.T, (expected.batch, expected.request, expected.tokens), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", CASES)
def test_batches_and_times_equal_vidurs(reference: Path, name: str) -> None:
    recorded = case(reference / "vidur" / "cases" / name)
    tables = read_tables(reference / "vidur" / "op_tables" / table_of(name))
    run = replay(recorded.config, tables, recorded.requests, fuses_steps=False, keeps_trail=True)
    assert_same_batches(run, recorded.batches)
    assert run.trail is not None
    np.testing.assert_allclose(run.trail.stage_s[:, 0, 0], recorded.batches.start_s, rtol=1e-9)
    requests, walks, expected = run.requests, run.walks, recorded.expected
    np.testing.assert_array_equal(requests["num_preemptions"], expected["request_num_restarts"])
    for ours, theirs in (
        (requests["finish_s"] - requests["arrival_s"], "request_e2e_time"),
        (requests["first_token_s"] - requests["arrival_s"], "prefill_e2e_time"),
        (requests["scheduled_s"] - requests["arrival_s"], "request_scheduling_delay"),
        (run.execution_s, "request_execution_time"),
        (walks["paused_s"], "request_preemption_time"),
    ):
        np.testing.assert_allclose(ours, expected[theirs], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_steps_taken_at_once_give_the_same_times(reference: Path, name: str) -> None:
    recorded = case(reference / "vidur" / "cases" / name)
    tables = read_tables(reference / "vidur" / "op_tables" / table_of(name))
    fused = replay(recorded.config, tables, recorded.requests)
    single = replay(recorded.config, tables, recorded.requests, fuses_steps=False)
    assert fused.steps["num_steps"].sum() == single.steps["num_steps"].sum()
    for column in ("scheduled_s", "first_token_s", "finish_s", "num_preemptions"):
        np.testing.assert_array_equal(fused.requests[column], single.requests[column])


def test_lightllm_forms_vidurs_batches(reference: Path) -> None:
    """Its tables, made for blocks of one token, were not recorded; its step durations were."""
    recorded = case(reference / "vidur" / "cases" / "d_llama2-7b_tp1_lightllm_arxiv300")
    settings = walked_settings(recorded.config, replicates_bugs=True, fuses_steps=False)
    requests = recorded.requests
    records = state.new_requests(
        requests.arrival_s,
        requests.prefill_tokens,
        requests.decode_tokens,
        np.zeros(len(requests.arrival_s), np.int64),
    )
    cost = recorded_steps(recorded.batches.duration_s, EngineSettings(max_num_seqs=128))
    run = walk(settings, records, cost=cost, keeps_trail=True)
    assert_same_batches(run, recorded.batches)
    np.testing.assert_allclose(
        run.requests["finish_s"] - run.requests["arrival_s"], recorded.expected["request_e2e_time"], rtol=1e-9
    )


def test_a_restarted_prompt_is_computed_again_in_chunks_by_default(reference: Path) -> None:
    """Vidur ran 3,891 tokens of the restarted prompt one a step, and reports its first token 49 s before its second."""
    name = "f_llama2-7b_sarathi_midprefill_bug"
    recorded = case(reference / "vidur" / "cases" / name)
    tables = read_tables(reference / "vidur" / "op_tables" / table_of(name))
    theirs = replay(recorded.config, tables, recorded.requests)
    right = replay(recorded.config, tables, recorded.requests, replicates_bugs=False)
    i = int(np.argmax(theirs.requests["num_preemptions"]))
    decode_s = right.requests["finish_s"][i] - right.requests["first_token_s"][i]
    assert decode_s < 0.1 * (theirs.requests["finish_s"][i] - theirs.requests["first_token_s"][i])
    after_the_first = right.steps["decode_tokens"] @ right.steps["num_steps"] + right.steps["resumed_tokens"].sum()
    assert after_the_first == (recorded.requests.decode_tokens - 1).sum()
