"""Decode context parallelism: what a rank holds, computes and exchanges, and what cannot be divided."""

from typing import Any

import numpy as np
import pytest

import windtunnel as wt
from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.model.attention.grouped_query import DecodeAttention
from windtunnel.model.attention.latent import LatentDecodeAttention
from windtunnel.model.launches.forward import decode_launches, prefill_launches
from windtunnel.model.memory import kv_bytes_per_token
from windtunnel.model.operators import Collective
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.shape import Shard
from windtunnel.serving.scenario import check_divided


def shard_of(model: str, tp: int, dcp: int) -> Shard:
    spec = catalog.model(model)
    return Shard(model=spec, precision=spec.precision, parallelism=Parallelism(tp=tp, dcp=dcp), devices_per_node=8)


@pytest.mark.parametrize(("model", "tp", "dcp"), [("deepseek-ai/DeepSeek-R1", 8, 8), ("qwen3-235b-a22b", 8, 2)])
def test_a_rank_holds_and_reads_its_part(model: str, tp: int, dcp: int) -> None:
    whole, divided = shard_of(model, tp, 1), shard_of(model, tp, dcp)
    assert kv_bytes_per_token(divided, 8192) == kv_bytes_per_token(whole, 8192) / dcp
    core = decode_launches(whole, 32.0, 4096.0)[0].op
    launches = {launch.name: launch.op for launch in decode_launches(divided, 32.0, 4096.0)}
    part = next(op for op in launches.values() if not isinstance(op, Collective))
    assert isinstance(core, DecodeAttention | LatentDecodeAttention)
    assert isinstance(part, type(core))
    assert part.context_tokens == 4096.0 / dcp
    assert part.num_heads == core.num_heads * dcp
    if isinstance(part, DecodeAttention):
        assert part.flops == pytest.approx(core.flops)  # heads of all ranks over a part of the context


def test_what_ranks_exchange() -> None:
    """Queries of 576 values and outputs of 512 for each of 128 heads, and sums in fp32 from each rank."""
    every = decode_launches(shard_of("deepseek-ai/DeepSeek-R1", 8, 8), 32.0, 4096.0)
    messages = {launch.name: launch.op.message_bytes for launch in every if isinstance(launch.op, Collective)}
    assert messages == {
        "query_all_gather": 32 * 128 * 576 * 2,
        "sums_all_gather": 32 * 128 * 8 * 4,
        "output_reduce_scatter": 32 * 128 * 512 * 2,
    }
    gathers = (launch for launch in every if launch.name == "query_all_gather")
    assert sum(launch.count for launch in gathers) == 61


def test_chunks_gather_what_is_cached_before_them() -> None:
    """A chunk of 1,000 tokens after 3,000: half of such a prompt's length of 7,000 is a seventh of it."""
    shard = shard_of("deepseek-ai/DeepSeek-R1", 8, 8)
    chunk = {launch.name: launch for launch in prefill_launches(shard, np.array([1000 / 7000]), np.array([7000.0]))}
    gather = chunk["context_all_gather"]
    assert isinstance(gather.op, Collective)
    assert np.asarray(gather.op.message_bytes) == pytest.approx(3000 * 576 * 2)
    assert gather.adds == 1.0
    prompts = {launch.name: launch for launch in prefill_launches(shard, np.array([2.0]), np.array([4000.0]))}
    assert prompts["context_all_gather"].adds == 0.0


@pytest.mark.parametrize(
    ("model", "tp", "dcp", "message"),
    [
        ("qwen3-235b-a22b", 8, 4, "are held 2 times"),
        ("llama-3.1-8b", 4, 2, "are held 1 time"),
        ("gpt-oss-20b", 8, 2, "has windows, an indexer or recurrent states"),
        ("deepseek-ai/DeepSeek-V3.2", 8, 2, "has windows, an indexer or recurrent states"),
    ],
)
def test_what_cannot_be_divided_is_refused(model: str, tp: int, dcp: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_divided(catalog.model(model), Parallelism(tp=tp, dcp=dcp))


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InputError, match="dcp = 3 does not divide tp = 8"):
        wt.scenario(
            model="deepseek-ai/DeepSeek-R1", device="h200_sxm", tp=8, settings={"deployment.parallelism.dcp": 3}
        )


@pytest.mark.full
def test_vllms_command_divides_contexts() -> None:
    command = read_launch_command("vllm serve deepseek-ai/DeepSeek-R1 -tp 8 -dcp 8")
    assert command.raw["deployment"]["parallelism"] == {"tp": 8, "dcp": 8}
    long: dict[str, Any] = {"input_tokens": 2000, "output_tokens": 20, "concurrency": 4, "num_requests": 8}
    whole, divided = (
        wt.simulate(wt.scenario(model="deepseek-ai/DeepSeek-R1", device="h200_sxm", tp=8, settings=settings, **long))
        for settings in ({}, {"deployment.parallelism.dcp": 8})
    )
    assert divided.memory.num_blocks == pytest.approx(8 * whole.memory.num_blocks, rel=0.01)
