"""Diagnoses of runs whose server says what its prefix cache had of each prompt."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import windtunnel as wt
from windtunnel.production.diagnose import diagnose
from windtunnel.production.observed import Observed, observed
from windtunnel.production.replay import beginnings_of, replay_of
from windtunnel.report.diagnosis import diagnosis_document, diagnosis_report, evidence
from windtunnel.serving.scenario import Scenario
from windtunnel.serving.shorthand import parse_lengths

SHARED = {"workload.shared_prompts": {"tokens": 2000}}


def described(shares: bool, seed: int = 0, **settings: Any) -> Scenario:
    """Return a deployment whose workload tells of common beginnings, or not."""
    lengths = {"input_tokens": "200-1800", "output_tokens": "20-100"}
    known: dict[str, Any] = {name: parse_lengths(name, text) for name, text in lengths.items()}
    known |= {"model": "qwen3-8b", "device": "h100_sxm", "rate_per_s": 10.0, "num_requests": 150, "seed": seed}
    return wt.scenario(**known, settings=settings | (SHARED if shares else {}))


def recorded(scenario: Scenario, slower: float = 1.0, says_hits: bool = True) -> Observed:
    """Return a simulation as a client records it; its times are so many times as long."""
    table = wt.simulate(scenario).requests
    names = ("arrival_s", "input_tokens", "output_tokens", "ttft_s", "e2e_s", "cached_tokens")
    columns = {name: table[name] for name in (names if says_hits else names[:-1])}
    return observed(columns | {name: columns[name] * slower for name in ("ttft_s", "e2e_s")})


COLD = {"deployment.engine.enable_prefix_caching": False}


def test_made_up_beginnings_are_found_as_they_were() -> None:
    cached = np.array([0, 2000, 512, 2000, 0, 64])
    beginnings = beginnings_of(cached)
    assert beginnings is not None
    depths = np.append(np.cumsum(beginnings.node_tokens), 0)
    np.testing.assert_array_equal(depths[beginnings.request_node], cached)
    assert beginnings_of(np.zeros(3, np.int64)) is None
    run = recorded(described(True))
    assert run.cached_tokens is not None
    replay = replay_of(described(False), run)
    np.testing.assert_array_equal(replay.healthy().requests["cached_tokens"][2:], run.cached_tokens[2:])


@pytest.mark.full
def test_what_the_cache_had_is_taken_as_given_where_the_scenario_says_nothing() -> None:
    """Without it, prompts are taken to be computed whole, and the server seems twice as fast as it could be."""
    told = diagnose(described(False), recorded(described(True)))
    untold = diagnose(described(False), recorded(described(True), says_hits=False))
    assert abs(told.gaps["ttft"]) < 0.1
    assert untold.gaps["ttft"] < -0.4
    assert told.hits is not None
    assert untold.hits is None
    assert told.hits[1] == pytest.approx(told.hits[0], abs=0.01)


@pytest.mark.full
def test_a_cache_that_finds_too_little_is_named_with_what_it_lost() -> None:
    diagnosis = diagnose(described(True), recorded(described(True, **COLD)))
    first = diagnosis.findings[0]
    assert first.name == "prefix_cache_cold"
    assert first.severity == 1.0
    assert evidence(first) == "100% of the prompt tokens that should be in the cache were not, as the server says"
    assert diagnosis_document(diagnosis)["cache_hits"]["recorded"] == 0
    assert "0.0% of the prompt tokens were in the prefix cache, as the server says; predicted 66.0%" in str(
        diagnosis_report(diagnosis).notes
    )


@pytest.mark.full
def test_a_cache_that_finds_too_little_is_named_however_slow_the_run_is_beside() -> None:
    """A slow device alone would explain twice the latencies of a cold cache better."""
    before, now = recorded(described(True, seed=1)), recorded(described(True, **COLD), slower=2.0)
    found = diagnose(described(True), now, before).findings
    assert [finding.name for finding in found] == ["prefix_cache_cold", "host_stall"]


@pytest.mark.full
def test_a_cache_that_finds_what_it_should_is_not_to_blame() -> None:
    diagnosis = diagnose(described(True), recorded(described(True), slower=4.0))
    assert diagnosis.late
    assert "prefix_cache_cold" not in [each.name for each in (*diagnosis.findings, *diagnosis.others)]


@pytest.mark.full
def test_an_earlier_run_says_what_the_cache_should_find() -> None:
    before, now = recorded(described(True, seed=1)), recorded(described(True, **COLD))
    first = diagnose(described(False), now, before).findings[0]
    assert first.name == "prefix_cache_cold"
    half = replace(now, cached_tokens=np.where(np.arange(150) % 2, 2000, 0))
    assert diagnose(described(False), half, before).hits == pytest.approx((0.33, 0.66), abs=0.02)
