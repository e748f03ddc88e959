"""A small job's communication, carried out between processes of this machine."""

import sys
from pathlib import Path
from typing import Any

import pytest

from windtunnel.errors import InputError, MissingExtraError
from windtunnel.formats.collective_calls import CollectiveCall
from windtunnel.formats.job_files import job_contents
from windtunnel.lab import replay as lab
from windtunnel.schema import decode
from windtunnel.training.job import TrainingJob
from windtunnel.training.setup import TrainingSetup, resolve

ATTENTION = {"type": "grouped_query", "num_heads": 8, "num_kv_heads": 4, "head_dim": 32}
DENSE = {"type": "dense", "intermediate_size": 512}
EXPERTS = {"type": "experts", "num_experts": 4, "experts_per_token": 2, "intermediate_size": 256}


def setup_of(feed_forward: dict[str, Any], **fields: Any) -> TrainingSetup:
    model = {
        "name": "small",
        "hidden_size": 256,
        "vocab_size": 1000,
        "max_context_tokens": 128,
        "layers": [{"num_layers": 2, "attention": ATTENTION, "feed_forward": feed_forward}],
    }
    job = {"model": model, "device": "h100_sxm", "sequence_tokens": 128, "global_batch": 4, **fields}
    return resolve(decode(job, TrainingJob))


def by_name(calls: tuple[CollectiveCall, ...]) -> dict[tuple[str, int | None], int]:
    """(operation, bytes) -> calls, of those that have a size to compare."""
    return {(call.operation, call.size_bytes): call.num_calls for call in calls}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feed_forward", "fields"),
    [
        (EXPERTS, {"parallelism": {"tp": 2, "pp": 2, "ep": 2}}),
        (DENSE, {"parallelism": {"cp": 2}, "framework": "fsdp2"}),
    ],
    ids=["tensor, pipeline and experts", "context and sharded parameters"],
)
def test_every_collective_gives_what_it_must(feed_forward: dict[str, Any], fields: dict[str, Any]) -> None:
    pytest.importorskip("torch", reason="torch is not installed; a replay runs on its gloo")
    setup = setup_of(feed_forward, **fields)
    done = lab.replay(setup, largest_bytes=1 << 14)
    assert done.num_ranks == setup.degrees.num_devices
    assert by_name(done.calls) == by_name(job_contents(setup, 0).calls)
    # Every rank checks what it received; what it sends to another stage is checked there.
    received = sum(call.num_calls for call in done.calls if call.operation != "send")
    assert done.num_checked >= done.num_ranks * received - received


@pytest.mark.full
def test_a_job_with_too_many_ranks() -> None:
    pytest.importorskip("torch", reason="torch is not installed; a replay runs on its gloo")
    with pytest.raises(InputError, match="has 32 ranks; a replay takes at most 16"):
        lab.replay(setup_of(DENSE, parallelism={"tp": 4, "dp": 8}, global_batch=8))
    with pytest.raises(InputError, match="messages of 2 bytes cannot be shared by 4 ranks"):
        lab.replay(setup_of(DENSE, parallelism={"dp": 4}), largest_bytes=2)


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match="torch is not installed") as caught:
        lab.replay(setup_of(DENSE, parallelism={"dp": 4}))
    assert caught.value.hint == "pip install 'windtunnel[replay]'"


def test_the_rank_that_went_wrong_is_named_before_those_that_missed_it(tmp_path: Path) -> None:
    (tmp_path / "0.failed").write_text("rank 0: connection closed by peer\nTraceback")
    (tmp_path / "3.failed").write_text("rank 3: qkv_proj: expected [2]..., received [1]...\nTraceback")
    assert str(lab._first_failure(tmp_path)).startswith("rank 3: qkv_proj")
