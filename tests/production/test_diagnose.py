"""Diagnoses of runs that a fault was put into."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import windtunnel as wt
from windtunnel.errors import InputError
from windtunnel.production.causes import CAUSES, TEXTS, Change
from windtunnel.production.diagnose import LATENCIES, Diagnosis, diagnose, served_by
from windtunnel.production.observed import Observed
from windtunnel.production.replay import Replay, received, replay_of
from windtunnel.report.diagnosis import change_of, diagnosis_document, diagnosis_report, evidence, verdict
from windtunnel.serving.scenario import Scenario
from windtunnel.serving.shorthand import parse_lengths
from windtunnel.workload.generate.requests import generate

MORE_FAULTS = (
    *(("all_reduce", 4.0), ("slow_rank", 1.4), ("batch_limit", 4.0)),
    *(("tokenizer", 1e-4), ("compilation", 4.0)),
)


def described(**options: Any) -> Scenario:
    known = {"model": "qwen3-8b", "device": "h100_sxm", "tp": 2, "rate_per_s": 12.0, "num_requests": 120}
    lengths = {
        name: parse_lengths(name, text) for name, text in (("input_tokens", "200-1800"), ("output_tokens", "20-100"))
    }
    return wt.scenario(**{**known, **lengths, **options})


def sent(scenario: Scenario, seed: int = 0) -> Observed:
    requests = generate(scenario.workload, seed)
    nothing = np.zeros(requests.arrival_s.size)
    position = np.arange(nothing.size)
    return Observed(
        requests.arrival_s, requests.input_tokens, requests.output_tokens, nothing, nothing, nothing, position
    )


def recorded(replay: Replay, requests: Observed, change: Change, seed: int = 1) -> Observed:
    """Return the requests with simulated latencies, and 5% of noise."""
    random_ = np.random.default_rng(seed)
    times = replay.latencies(change)
    ttft_s, tpot_s = (
        times[name] * np.exp(0.05 * random_.standard_normal(times[name].size)) for name in ("ttft", "tpot")
    )
    e2e_s = ttft_s + np.nan_to_num(tpot_s) * (requests.output_tokens - 1)
    return Observed(
        requests.arrival_s,
        requests.input_tokens,
        requests.output_tokens,
        ttft_s,
        e2e_s,
        requests.sent_late_s,
        requests.position,
    )


def diagnosed(name: str, severity: float, has_before: bool = True, **options: Any) -> Diagnosis:
    scenario = described(**options)
    requests, others = sent(scenario), sent(scenario, seed=5)
    replay = replay_of(scenario, requests)
    served = served_by(replay, replay.healthy(), replay.latencies(Change()))
    change = CAUSES[name].change(severity, served) if name else Change()
    before = [recorded(replay_of(scenario, others), others, Change(), seed=2)] if has_before else []
    return diagnose(scenario, recorded(replay, requests, change), before)


@cache
def diagnosed_alone(name: str, severity: float) -> Diagnosis:
    """A diagnosis that several tests look at."""
    return diagnosed(name, severity)


@pytest.mark.parametrize(
    ("name", "severity"),
    [("eager", 1.0), ("host_stall", 4e-3), *(pytest.param(*pair, marks=pytest.mark.full) for pair in MORE_FAULTS)],
)
def test_a_fault_is_found_with_its_severity_and_its_share(name: str, severity: float) -> None:
    diagnosis = diagnosed_alone(name, severity)
    first = diagnosis.findings[0]
    assert first.name == name
    assert first.severity == pytest.approx(severity, rel=0.3)
    assert first.shares[diagnosis.late[0]] == pytest.approx(1.0, abs=0.2)
    assert first.without_s[diagnosis.late[0]] == pytest.approx(diagnosis.healthy_s[diagnosis.late[0]], rel=0.15)


@pytest.mark.full
@pytest.mark.parametrize("has_before", [True, False])
def test_a_healthy_run_raises_no_alarm(has_before: bool) -> None:
    diagnosis = diagnosed("", 0.0, has_before)
    assert not diagnosis.late
    assert not diagnosis.findings
    assert verdict(diagnosis).startswith("Healthy")


@pytest.mark.full
def test_experts_out_of_balance_are_told_from_other_operators() -> None:
    diagnosis = diagnosed("experts", 2.5, model="qwen3-30b-a3b", tp=1)
    best = (*diagnosis.findings, *diagnosis.others)[:2]
    assert "experts" in {finding.name for finding in best}


@pytest.mark.full
def test_without_an_earlier_run_a_fault_within_the_interval_is_only_a_candidate() -> None:
    diagnosis = diagnosed("slow_rank", 1.3, has_before=False)
    assert not diagnosis.findings
    assert diagnosis.widths["tpot"] > diagnosis.gaps["tpot"] > 0.15
    assert verdict(diagnosis).startswith("Unclear: end to end is ")
    assert diagnosis_report(diagnosis).is_good is None


def slowed(run: Observed, times: float) -> Observed:
    return replace(run, ttft_s=run.ttft_s * times, e2e_s=run.e2e_s * times)


@pytest.mark.full
def test_earlier_runs_that_differ_hide_a_difference_as_large() -> None:
    """One of a run 20% slower stands out beside runs that agree, and not beside runs 25% apart."""
    scenario = described()
    requests, others = sent(scenario), sent(scenario, seed=5)
    now = slowed(recorded(replay_of(scenario, requests), requests, Change()), 1.2)
    before = recorded(replay_of(scenario, others), others, Change(), seed=2)
    again = recorded(replay_of(scenario, others), others, Change(), seed=3)
    assert diagnose(scenario, now, before).late == diagnose(scenario, now, [before]).late != ()
    steady = diagnose(scenario, now, [before, again])
    assert steady.late
    unsteady = diagnose(scenario, now, [before, slowed(again, 1.25)])
    assert not unsteady.late
    assert unsteady.widths["e2e"] > 0.25 > diagnose(scenario, now, before).widths["e2e"] > steady.widths["e2e"]
    assert "2 earlier healthy runs" in str(diagnosis_report(unsteady))


@pytest.mark.full
def test_two_faults_are_both_found() -> None:
    scenario = described()
    requests, others = sent(scenario), sent(scenario, seed=5)
    replay = replay_of(scenario, requests)
    change = Change(host_s={"unhidden_step_s": 8e-3}).joined(Change(host_s={"prompt_token_s": 4e-4}))
    before = recorded(replay_of(scenario, others), others, Change(), seed=2)
    diagnosis = diagnose(scenario, recorded(replay, requests, change), before)
    assert {finding.name for finding in diagnosis.findings[:2]} == {"host_stall", "tokenizer"}


@pytest.mark.full
def test_a_second_cause_is_not_named_for_what_the_prediction_leaves_open() -> None:
    # Requests wait behind a small limit; a stall of 2 ms is within the interval of a prediction without an earlier run.
    scenario = described(num_requests=60)
    change = Change(engine={"max_num_seqs": 4}, host_s={"unhidden_step_s": 2e-3})
    requests = sent(scenario)
    diagnosis = diagnose(scenario, recorded(replay_of(scenario, requests), requests, change))
    assert len(diagnosis.findings) == 1
    assert diagnosis.findings[0].name in ("batch_limit", "kv_preemption")  # each makes as many wait


@pytest.mark.full
def test_times_in_milliseconds_are_refused_and_failed_requests_are_told_of() -> None:
    scenario = described()
    requests = sent(scenario)
    run = recorded(replay_of(scenario, requests), requests, Change())
    with pytest.raises(InputError, match="about 1,000 times as long as predicted") as refused:
        diagnose(scenario, slowed(run, 1000.0))
    assert refused.value.hint is not None
    assert "ttft_ms and e2e_ms" in refused.value.hint
    assert verdict(diagnose(scenario, replace(run, num_failed=7))).endswith("; 7 further requests failed.")


def test_the_report_names_the_cause_and_what_to_change_in_the_engines_words() -> None:
    diagnosis = diagnosed_alone("eager", 1.0)
    text = verdict(diagnosis)
    assert text.startswith("Slow: ")
    # The command that is known has no such option.
    assert "Check whether the server runs with --enforce-eager, and remove it; then" in text
    asked = "check whether the server runs with --disable-cuda-graph, and remove it"
    assert change_of(diagnosis.findings[0], "sglang") == asked
    document = diagnosis_document(diagnosis)
    assert document["is_slow"]
    assert document["causes"][0]["cause"] == "eager"
    assert diagnosis_report(diagnosis).is_good is False


def test_nothing_is_said_to_have_waited_longer_than_until_the_first_token() -> None:
    scenario = described()
    replay = replay_of(scenario, sent(scenario))
    served = served_by(replay, replay.healthy(), replay.latencies(Change()))
    waits = CAUSES["compilation"].severities(replace(served, first_token_s=3.0))
    assert waits == pytest.approx([0.5, 1.0, 2.0, 4.0])


def test_every_cause_has_its_texts() -> None:
    assert set(TEXTS) - set(CAUSES) == {"sampler", "stall"}
    for texts in TEXTS.values():
        assert texts["title"]
        assert texts["evidence"]
        assert texts["change"]


def test_changes_add_up() -> None:
    both = Change(host_s={"stream_s": 1.0}, factors={"other": 2.0}).joined(
        Change(host_s={"stream_s": 2.0}, factors={"other": 1.5}, pause_s=3.0)
    )
    assert both == Change({}, {"stream_s": 3.0}, {"other": 3.0}, 1.0, 3.0)


def test_latencies_are_those_of_a_simulation_of_the_same_requests() -> None:
    scenario = described()
    replay = replay_of(scenario, sent(scenario))
    result, times = wt.simulate(scenario), replay.latencies(Change())
    for name in LATENCIES:
        np.testing.assert_allclose(times[name], result.requests[f"{name}_s"], rtol=1e-9)


REPLICAS = {
    "tp": 1,
    "rate_per_s": 40.0,
    "num_requests": 240,
    "settings": {"deployment.replicas": 3, "deployment.engine.enable_prefix_caching": False},
}
"""Without a cache, with which the loop of pools, as which a slow replica is simulated, would be compiled once more."""


@pytest.mark.parametrize(
    ("name", "severity"), [("missing_replicas", 2.0), pytest.param("slow_replica", 2.0, marks=pytest.mark.full)]
)
def test_faults_of_one_of_several_replicas_are_found(name: str, severity: float) -> None:
    first = diagnosed(name, severity, **REPLICAS).findings[0]
    assert first.name == name
    assert first.severity == pytest.approx(severity, rel=0.15)


def test_a_slow_replica_slows_its_own_requests_alone() -> None:
    scenario = described(**REPLICAS)
    replay = replay_of(scenario, sent(scenario))
    healthy, slow = (replay.latencies(change)["tpot"] for change in (Change(), Change(slow_replica=2.0)))
    ratio = slow / healthy
    assert 0.25 < np.mean(ratio > 1.4) < 0.42
    assert np.median(ratio) == pytest.approx(1, abs=0.02)


@pytest.mark.full
def test_a_cold_prefix_cache_is_found_where_prompts_share_their_beginning() -> None:
    shared = {"settings": {"workload.shared_prompts": {"tokens": 2000}}, "tp": 1}
    scenario = described(**shared)
    requests = sent(scenario)
    replay = replay_of(scenario, requests)
    assert served_by(replay, replay.healthy(), replay.latencies(Change())).shares_prefixes
    before = recorded(replay, requests, Change(), seed=2)
    cold = recorded(replay, requests, Change(engine={"enable_prefix_caching": False}))
    assert diagnose(scenario, cold, before).findings[0].name == "prefix_cache_cold"


@pytest.mark.full
def test_another_version_is_found_beside_an_earlier_run() -> None:
    scenario = described(tp=1)
    requests, others = sent(scenario), sent(scenario, seed=5)
    replay = replay_of(scenario, requests)
    versions = served_by(replay, replay.healthy(), replay.latencies(Change()), True).other_versions
    assert "0.24" not in versions
    before = recorded(replay_of(scenario, others), others, Change(), seed=2)
    first = diagnose(scenario, recorded(replay, requests, Change(version="0.8")), before).findings[0]
    assert first.name == "version"
    assert evidence(first) == "latencies are those of version 0.8 with its defaults"


@pytest.mark.full
def test_a_deployment_with_too_many_replicas_or_too_few_is_named() -> None:
    spare = diagnosed("", 1.0, **{**REPLICAS, "rate_per_s": 3.0})
    assert spare.enough_replicas in (1, 2)
    assert "over-provisioned" in diagnosis_document(spare)["provision"]
    short = diagnosed("", 1.0, **{**REPLICAS, "rate_per_s": 4000.0, "settings": {"deployment.engine.max_num_seqs": 4}})
    assert short.is_underprovisioned
    assert "under-provisioned" in str(diagnosis_report(short).notes)


@pytest.mark.full
def test_causes_that_do_the_same_are_both_named() -> None:
    alone = diagnosed_alone("batch_limit", 4.0)
    first = alone.findings[0]
    other = replace(first, name="kv_preemption", change=CAUSES["kv_preemption"].change(900.0, None))  # type: ignore[arg-type]
    assert "Just as likely" not in verdict(replace(alone, others=[replace(other, gain=first.gain - 5)]))
    said = verdict(replace(alone, others=[other]))
    assert said.endswith(
        " Just as likely: KV cache too small; raise --gpu-memory-utilization, or set --kv-cache-dtype fp8."
    )


@pytest.mark.full
def test_a_client_that_falls_behind_is_told_from_the_server() -> None:
    # Parts come one after the other to a client that is busy for nine tenths of the time; later ones wait too.
    requests = sent(described(rate_per_s=6.0))
    replay = replay_of(described(rate_per_s=6.0), requests)
    healthy = replay.latencies(Change())
    part_s = 0.9 * float((requests.arrival_s + healthy["e2e"]).max()) / float(requests.output_tokens.sum())
    seen = recorded(replay, requests, Change(client_part_s=part_s))
    assert np.mean(seen.e2e_s - healthy["e2e"]) > 1.2 * np.mean(seen.ttft_s - healthy["ttft"]) > 0
    diagnosis = diagnose(described(rate_per_s=6.0), seen, recorded(replay, requests, Change(), seed=2))
    assert [finding.name for finding in diagnosis.findings] == ["client_backlog"]
    assert diagnosis.findings[0].severity == pytest.approx(part_s, rel=0.1)


def test_what_a_client_receives_waits_for_what_came_before() -> None:
    latencies = {"ttft": np.array([1.0, 1.0, 1.0]), "e2e": np.array([3.0, 1.0, 2.0])}
    arrival_s, tokens = np.array([0.0, 0.0, 5.0]), np.array([3, 1, 2])
    slow = received(latencies, arrival_s, tokens, 0.75)
    # Parts come at 1, 1, 2, 3 s, and at 6 and 7 s, when the client has caught up.
    assert slow["ttft"].tolist() == pytest.approx([1.75, 2.5, 1.75])
    assert slow["e2e"].tolist() == pytest.approx([4.0, 2.5, 2.75])
    assert slow["tpot"][[0, 2]].tolist() == pytest.approx([1.125, 1.0])
    assert received(latencies, arrival_s, tokens, 1e-9)["e2e"] == pytest.approx(latencies["e2e"])


@pytest.mark.full
def test_a_cause_of_next_to_nothing_does_not_lead_the_answer() -> None:
    diagnosis = diagnosed_alone("host_stall", 4e-3)
    first, late = diagnosis.findings[0], diagnosis.late[0]
    little = replace(first, shares={**first.shares, late: 0.04})
    text = verdict(replace(diagnosis, findings=[little]))
    assert text.endswith("; the causes that are known explain 4.0% of it, host stall the most.")
