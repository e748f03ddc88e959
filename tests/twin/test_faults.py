"""Faults that a user of a twin chooses change what its requests go through while they last, and nothing after."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from live_twins import scenario_of
from windtunnel.errors import InputError
from windtunnel.twin.clock import TwinClock
from windtunnel.twin.engine import Answer, Twin
from windtunnel.twin.faults import fault_of
from windtunnel.twin.live import prepare_live


def served(faults: Sequence[str], deployment: dict[str, Any] | None = None, prompt: int | None = None) -> list[Answer]:
    """Send a request of 64 and 20 tokens every half second for six seconds."""
    twin = Twin(
        prepare_live(scenario_of(deployment or {}), max_requests=64),
        TwinClock(None),
        64,
        faults=[fault_of(text) for text in faults],
    )
    answers = []

    async def send() -> None:
        for number in range(12):
            twin.run_to(0.5 * number)
            twin.clock.reached_s = max(twin.clock.reached_s, 0.5 * number)
            first = (number if prompt is None else prompt) << 20
            answers.append(twin.submit((64, 20), lambda *_: None, range(first, first + 84)))
            twin.run_to(1e9)
        twin.close()

    asyncio.run(send())
    return answers


def decode_s(answers: Sequence[Answer]) -> Any:
    return np.array([answer.finish_s - answer.first_token_s for answer in answers])


def test_a_slow_rank_slows_the_steps_of_its_time_only() -> None:
    usual, slow = decode_s(served(())), decode_s(served(["slow_rank=2@1.9..3.9"]))
    np.testing.assert_allclose(slow[[0, 1, 2, 8, 9]], usual[[0, 1, 2, 8, 9]], rtol=1e-9)
    assert 1.6 < slow[4] / usual[4] <= 2.0 + 1e-9


def test_a_cold_cache_has_nothing() -> None:
    usual = [answer.cached_tokens for answer in served((), prompt=7)]
    cold = [answer.cached_tokens for answer in served(["cold_cache@2.4"], prompt=7)]
    assert usual == [0] + [48] * 11
    assert cold == [0, *[48] * 4, 0, *[48] * 6]


@pytest.mark.interpreted
def test_transfers_wait_for_a_link_that_is_down() -> None:
    pools = {"pools": [{"name": name, "role": name, "replicas": 1} for name in ("prefill", "decode")]}
    usual, down = (
        np.array([answer.finish_s for answer in served(faults, dict(pools))])
        for faults in ((), ["kv_link_down@1.9..2.3"])
    )
    np.testing.assert_allclose(down[:4], usual[:4])
    assert down[4] > 2.3 + decode_s(served((), dict(pools)))[4] * 0.9


def test_memory_that_is_gone_preempts() -> None:
    def preemptions(faults: Sequence[str]) -> int:
        twin = Twin(
            prepare_live(scenario_of({"engine": {"num_gpu_blocks": 300}}), max_requests=64),
            TwinClock(None),
            64,
            faults=[fault_of(text) for text in faults],
        )
        ranks = twin.live.loop.pool.ranks

        async def send() -> list[Answer]:
            answers = [twin.submit((160, 200), lambda *_: None, range(n << 20, (n << 20) + 360)) for n in range(10)]
            twin.run_to(1e9)
            twin.close()
            return answers

        answers = asyncio.run(send())
        assert ranks["free_blocks"][0] == 300 or "@0.5" in str(faults)
        return sum(answer.num_preemptions for answer in answers)

    assert preemptions(()) == 0
    assert preemptions(["preemption_storm=0.5@0.5"]) > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slow_rank", "cannot be read"),
        ("slow_rnk=2@1..2", "there is no fault 'slow_rnk'"),
        ("slow_rank@1..2", "how many times as long"),
        ("slow_rank=2@2..1", "ends before it begins"),
        ("preemption_storm=2@1..2", "the share of KV blocks"),
        ("kv_link_down@1", "has no end"),
        ("cold_cache=3@5", "has an amount, and cold_cache takes none"),
        ("kv_link_down=0@1..2", "has an amount"),
    ],
)
def test_wrong_faults_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        fault_of(text)


def test_faults_of_what_is_not_there_are_refused() -> None:
    with pytest.raises(InputError, match="no pools"):
        served(["kv_link_down@1..2"])
