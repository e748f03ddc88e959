"""The arrays that the serving loop reads must say what the estimator says, at the points priced and between them."""

from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from oracles.serving.cost import Prices
from windtunnel.catalog import model
from windtunnel.hardware import Device
from windtunnel.model.launches.forward import (
    StepBatch,
    decode_launches,
    head_launches,
    prefill_launches,
    token_launches,
)
from windtunnel.model.operators import Gemm, Launch, Op, Size
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.precision import Format, Precision
from windtunnel.model.shape import Shard
from windtunnel.pricing.estimator import COVERAGES, Coverage, Estimate
from windtunnel.serving.deployment import EngineSettings, HostOverheads, Profile, Speculative
from windtunnel.serving.engines.launches import decode_tokens, graph_sizes, num_launches, unhidden_s
from windtunnel.serving.scenario import resolve
from windtunnel.serving.setup import estimators
from windtunnel.serving.setup.estimators import estimator_for, estimator_key, measured_estimator, shard_of
from windtunnel.serving.setup.step_prices import (
    DeployedModel,
    batch_nodes,
    geometric_nodes,
    lower_steps,
    price_step,
    token_nodes,
)
from windtunnel.serving.shorthand import scenario
from windtunnel.serving.state.records import StepCost, played_back

MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_TOKENS = 8192, 256, 4096

DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "dense": {"model": "meta-llama/Llama-3.1-8B"},
    "experts": {"model": "Qwen/Qwen3-30B-A3B", "tp": 4, "ep": 4},
    "latent": {"model": "deepseek-ai/DeepSeek-V2-Lite", "quant": "fp8"},
}


class Priced:
    """A deployment with its estimator and what it was lowered to."""

    def __init__(self, name: str) -> None:
        made = scenario(
            device="h100_sxm",
            rate_per_s=1,
            input_tokens=1,
            output_tokens=1,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_TOKENS,
            **DEPLOYMENTS[name],
        )
        setup = resolve(made)
        self.engine, self.device, self.shard = setup.engine, setup.device, shard_of(setup)
        self.estimator = estimator_for(setup)
        self.lowered = lower_steps(self.estimator, DeployedModel(setup.device, self.shard, setup.engine, MAX_MODEL_LEN))

    def seconds(self, launches: list[Launch]) -> float:
        return sum(float(np.asarray(self.estimator.estimate(x.op).seconds) * x.count * x.adds) for x in launches)


@cache
def priced(name: str) -> Priced:
    return Priced(name)


def looked_up(cost: StepCost, batch: StepBatch) -> float:
    """A step's time, launched at once, as the loop adds it up, by its plain twin: Python cannot call compiled inner
    functions."""
    plain = Prices(cost)
    context = batch.decode_requests * batch.decode_context_tokens
    attention_s = plain.decode_attention_s(batch.decode_requests, round(context))
    if not batch.prefill_tokens:
        return float(cost.decode_token_s[batch.decode_requests] + attention_s + cost.unhidden_step_s)
    attention_s += plain.prefill_attention_s(batch.prefill_tokens, batch.prefill_pairs)
    token_s = cost.mixed_token_s[batch.num_tokens] + cost.sample_s[batch.sampled]
    return float(token_s + attention_s + cost.unhidden_step_s)


@pytest.mark.full
@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_steps_with_prefill_cost_what_their_operators_cost(name: str) -> None:
    one, rng = priced(name), np.random.default_rng(1)
    errors = []
    for _ in range(40):
        decodes, chunk = int(rng.integers(0, MAX_NUM_SEQS)), int(rng.integers(1, MAX_TOKENS - MAX_NUM_SEQS))
        done = int(rng.integers(0, MAX_MODEL_LEN - chunk))
        context = float(rng.integers(1, MAX_MODEL_LEN)) if decodes else 0.0
        batch = StepBatch(decodes, context, chunk, chunk * (done + chunk / 2), decodes + 1)
        exact = sum(launch.total_s for launch in price_step(one.estimator, one.shard, batch))
        errors.append((looked_up(one.lowered.cost, batch) - one.lowered.unhidden_s[batch.sampled]) / exact - 1)
    # What is left are steps of kv_b_proj and of grouped experts between the points priced.
    median, p90, most = np.percentile(np.abs(errors), (50, 90, 100))
    assert median < 0.002
    assert p90 < 0.012
    assert most < 0.06


def test_steps_in_piecewise_graphs_launch_attention_and_what_is_between() -> None:
    one = priced(next(iter(DEPLOYMENTS)))
    graphs = EngineSettings(max_cudagraph_capture_size=512, piecewise_cudagraphs=True)
    inside, beyond = num_launches(one.shard, graphs, np.array([512, 513]))
    layers = one.shard.model.num_layers
    assert 3 * layers < inside < 3 * layers + 5
    assert beyond == num_launches(one.shard, EngineSettings(max_cudagraph_capture_size=512), 512) > 9 * layers


def test_a_decode_step_with_attention_in_chunks_runs_in_pieces_on_vllm() -> None:
    """`ChunkedLocalAttentionBuilder` supports no graph of a whole step; asked for none in pieces, vLLM runs eagerly."""
    llama_4 = Shard(model("llama-4-maverick"), Precision(), Parallelism(tp=8))
    dense = Shard(model("llama-3.1-70b"), Precision(), Parallelism(tp=8))
    graphs = EngineSettings(max_cudagraph_capture_size=512, piecewise_cudagraphs=True)
    eager = num_launches(llama_4, EngineSettings(max_cudagraph_capture_size=0), 8, decode_queries=1)
    assert 3 * 48 < num_launches(llama_4, graphs, 8, decode_queries=1) < 3 * 48 + 5
    whole = msgspec.structs.replace(graphs, piecewise_cudagraphs=False)
    assert num_launches(llama_4, whole, 8, decode_queries=1) == eager
    assert num_launches(llama_4, msgspec.structs.replace(graphs, name="sglang"), 8, decode_queries=1) == 0
    assert num_launches(dense, graphs, 8, decode_queries=1) == num_launches(dense, whole, 8, decode_queries=1) == 0
    in_pieces = msgspec.structs.replace(graphs, full_cudagraphs=False)
    assert 3 * 80 < num_launches(dense, in_pieces, 8, decode_queries=1) < 3 * 80 + 5
    with_chunks, without = (unhidden_s(each, EngineSettings(), 1) for each in (llama_4, dense))
    assert with_chunks - without == pytest.approx(1e-3)


def test_the_host_pays_for_calls_of_flashinfers_experts_outside_graphs() -> None:
    """vLLM calls them from Python, which takes as long as tens of launches: in NVFP4, and in blocks of fp8 where the
    backend is named; no other format or engine does."""
    nvfp4, fp8 = (
        Shard(model("MiniMaxAI/MiniMax-M2.5"), Precision(weights=form, experts=form), Parallelism())
        for form in (Format.NVFP4, Format.FP8)
    )
    graphs = EngineSettings(max_cudagraph_capture_size=512, piecewise_cudagraphs=True)
    inside, beyond = num_launches(nvfp4, graphs, np.array([512, 513]))
    layers = nvfp4.model.num_layers
    assert beyond - num_launches(fp8, graphs, 513) > 20 * layers
    assert inside == num_launches(fp8, graphs, 512)
    trtllm = EngineSettings(name="trtllm", version="1.1.0", max_cudagraph_capture_size=512)
    assert num_launches(nvfp4, trtllm, 513) < beyond - 20 * layers
    blocks = Precision(weights=Format.FP8_BLOCK, experts=Format.FP8_BLOCK)
    deepseek = Shard(model("deepseek-ai/DeepSeek-R1-0528"), blocks, Parallelism(tp=8, ep=8))
    named = msgspec.structs.replace(graphs, moe_backend="trtllm")
    assert num_launches(deepseek, named, 513) - num_launches(deepseek, graphs, 513) == (30 - 8) * 58
    assert num_launches(deepseek, named, 512) == num_launches(deepseek, graphs, 512)


def test_a_release_may_take_the_host_longer_for_the_same_operators() -> None:
    """TensorRT-LLM from 1.2.0rc6 on: 16 more launches for each of DeepSeek-R1's 58 layers of experts, and 7 for each of
    its 61 attentions; in piecewise graphs for the attentions alone."""
    shard = Shard(model("deepseek-ai/DeepSeek-R1-0528"), Precision(), Parallelism(tp=8))
    graphs = {"piecewise_cudagraphs": True, "max_cudagraph_capture_size": 8, "piecewise_sizes": (256, 1152)}
    before, now = (
        num_launches(shard, EngineSettings(name="trtllm", version=version, **graphs), np.array([1152, 1153]))
        for version in ("1.1.0", "1.2.0rc6.post2")
    )
    assert now - before == pytest.approx([7 * 61, 16 * 58 + 7 * 61])


def test_trtllm_quantises_inputs_of_block_scaled_products_alone_apart() -> None:
    engine = EngineSettings(name="trtllm")
    bf16, fp8, block = (
        num_launches(Shard(model("Qwen/Qwen3-8B"), Precision(weights=form), Parallelism()), engine, 1)
        for form in (Format.BF16, Format.FP8, Format.FP8_BLOCK)
    )
    assert bf16 == fp8
    assert block - fp8 == 4 * 36  # two products of attention and two of the feed-forward


def test_drafts_take_the_host_time_in_steps_with_prompts() -> None:
    shard = Shard(model("deepseek-ai/DeepSeek-R1-0528"), Precision(), Parallelism(tp=8))
    plain = EngineSettings(name="trtllm", cudagraph_sizes=(1, 2, 4))
    drafts = Speculative(method="mtp", num_draft_tokens=3, acceptance_fraction=0.5)
    drafted = msgspec.structs.replace(plain, speculative=drafts)
    assert num_launches(shard, drafted, 100) - num_launches(shard, plain, 100) == 3 * 220
    assert num_launches(shard, drafted, 16, decode_queries=4) == 0
    ngram = msgspec.structs.replace(plain, speculative=msgspec.structs.replace(drafts, method="ngram"))
    assert num_launches(shard, ngram, 100) == num_launches(shard, plain, 100)


@pytest.mark.parametrize(("name", "of_layer"), [("dense", 10), ("experts", 9)])
def test_kernels_wait_for_the_one_before_them(name: str, of_layer: int) -> None:
    """Norms, projections, rotation, the write, attention, a product, ...: ten a layer; with experts, which are one, and
    fused all-reduces nine."""
    one = priced(name)

    def cost_with(gap_s: float) -> StepCost:
        host = msgspec.structs.replace(one.engine.host, kernel_gap_s=gap_s)
        engine = msgspec.structs.replace(one.engine, host=host)
        return lower_steps(one.estimator, DeployedModel(one.device, one.shard, engine, MAX_MODEL_LEN)).cost

    without, with_gaps = cost_with(0.0), cost_with(1e-6)
    num_kernels = (with_gaps.decode_token_s - without.decode_token_s) * 1e6
    assert num_kernels == pytest.approx(num_kernels[0])
    assert of_layer <= num_kernels[0] / one.shard.model.num_layers < of_layer + 0.5
    assert (with_gaps.sample_s - without.sample_s) * 1e6 == pytest.approx(num_kernels[0])
    assert (with_gaps.mixed_token_s == without.mixed_token_s).all()


def test_fused_all_reduces_wait_for_nothing_and_compute_the_norms() -> None:
    """Of 14 kernels of a layer two are norms and two all-reduces; a norm ends the step, an all-reduce begins it."""
    host = HostOverheads(unhidden_step_s=0.0, unhidden_request_s=0.0, kernel_gap_s=1e-6)
    apart = EngineSettings(fused_all_reduce=False, host=host)
    fused = msgspec.structs.replace(apart, fused_all_reduce=True)
    dense = Shard(model("Qwen/Qwen3-8B"), Precision(), Parallelism(tp=2))
    layers = dense.model.num_layers
    gaps = [unhidden_s(dense, engine, 0) * 1e6 for engine in (apart, fused)]
    assert gaps[0] - gaps[1] == pytest.approx(4 * layers + 2)
    alone = replace(dense, parallelism=Parallelism())
    assert unhidden_s(alone, fused, 0) == unhidden_s(alone, apart, 0)


def test_sglang_captures_chunks_in_pieces_where_it_can() -> None:
    """A graph, a write and a kernel an attention, a collective and a graph behind it; latent attention to 2,048 tokens;
    models and layouts that SGLang leaves out are launched kernel by kernel.
    """
    eager = EngineSettings(name="sglang", version="0.5.10", max_cudagraph_capture_size=512)
    graphs = msgspec.structs.replace(eager, piecewise_cudagraphs=True)
    dense = Shard(model("Qwen/Qwen3-8B"), Precision(), Parallelism(tp=2))
    num_layers = dense.model.num_layers
    of_head, of_collectives = 3, 2 * (2 * num_layers + 2)
    assert num_launches(dense, graphs, 8192) == 3 * num_layers + of_collectives + of_head
    latent = Shard(model("deepseek-ai/DeepSeek-R1-0528"), Precision(), Parallelism(tp=8))
    assert num_launches(latent, graphs, 2048) < num_launches(latent, eager, 2048) / 2
    assert num_launches(latent, graphs, 2049) == num_launches(latent, eager, 2049)
    drafted = msgspec.structs.replace(
        graphs, speculative=Speculative(method="mtp", num_draft_tokens=1, acceptance_fraction=0.5)
    )
    for shard, engine in (
        (Shard(model("Qwen/Qwen3.5-397B-A17B"), Precision(), Parallelism(tp=8)), graphs),
        (Shard(model("deepseek-ai/DeepSeek-V3.2"), Precision(), Parallelism(tp=8)), graphs),
        (replace(latent, parallelism=Parallelism(attention_dp=8, ep=8)), graphs),
        (replace(dense, parallelism=Parallelism(pp=2)), graphs),
        (latent, drafted),
    ):
        assert num_launches(shard, engine, 1) == num_launches(shard, eager, 1)


def test_experts_of_one_call_are_launched_by_it() -> None:
    """TensorRT-LLM's to 1.1, and FlashInfer's where named: two launches, else eight; of vLLM's NVFP4 experts thirty."""
    shard = priced("experts").shard
    four_bits = replace(shard, precision=msgspec.structs.replace(shard.precision, experts=Format.NVFP4))
    one_by_one = num_launches(shard, EngineSettings(), 1)
    trtllm = EngineSettings(name="trtllm", version="1.1.0")
    for where, engine in ((shard, trtllm), (shard, EngineSettings(moe_backend="cutlass"))):
        assert one_by_one - num_launches(where, engine, 1) == 6 * shard.model.num_layers
    assert num_launches(four_bits, EngineSettings(), 1) - one_by_one == 22 * shard.model.num_layers
    assert num_launches(four_bits, EngineSettings(moe_backend="marlin"), 1) == one_by_one
    as_written = num_launches(shard, EngineSettings(name="sglang"), 1)
    named = num_launches(shard, EngineSettings(name="sglang", moe_backend="cutlass"), 1)
    assert as_written - named == 6 * shard.model.num_layers


def test_recurrences_launch_their_kernels_behind_each_graph_of_a_step_in_pieces() -> None:
    """By hand: 45 recurrences of 16 kernels with their graphs, 15 attentions of three launches, and the head's."""
    model_ = model("Qwen/Qwen3.5-397B-A17B")
    shard, engine = (
        Shard(model_, Precision(), Parallelism()),
        EngineSettings(piecewise_cudagraphs=True, cudagraph_sizes=(512,)),
    )
    of_head = len(head_launches(shard, 1.0))
    assert num_launches(shard, engine, 512) == 45 * (16 + 1) + 15 * 3 + of_head
    assert num_launches(shard, engine, 513) > 45 * 30


def test_decodes_beyond_the_largest_graph_wait_for_the_host() -> None:
    """Every kernel is launched one by one there, as in a step with prefill that no graph holds; none is within."""
    shard = Shard(model("Qwen/Qwen3-8B"), Precision(), Parallelism())
    engine = EngineSettings(cudagraph_sizes=(1, 2, 4))
    in_decode = num_launches(shard, engine, np.array([1, 4, 5]), decode_queries=1)
    assert in_decode.tolist() == [0.0, 0.0, float(num_launches(shard, engine, 5))]
    assert num_launches(shard, EngineSettings(cudagraph_sizes=()), 1, decode_queries=1) == in_decode[-1]
    hybrid = Shard(model("Qwen/Qwen3.5-397B-A17B"), Precision(), Parallelism())
    recurrences = 45
    assert num_launches(hybrid, engine, 5) - num_launches(hybrid, engine, 5, decode_queries=1) == recurrences * (16 - 3)


def test_an_engine_that_compiles_nothing_launches_what_others_fuse() -> None:
    """By hand, of one layer: Qwen3's norms of queries and keys, and of fp8 the inputs of its four products quantised;
    Qwen3.5's four projections, gates and copies (its recurrence takes 15 kernels, and 16 in vLLM); latent attention's
    norms and copies.
    """
    sglang, vllm = EngineSettings(name="sglang"), EngineSettings(name="vllm")

    def added(shard: Shard) -> float:
        return float(num_launches(shard, sglang, 1) - num_launches(shard, vllm, 1))

    dense = Shard(model("Qwen/Qwen3-8B"), Precision(), Parallelism())
    num_layers = dense.model.num_layers
    assert added(dense) == num_layers
    assert added(replace(dense, precision=Precision(weights=Format.FP8))) == (1 + 4) * num_layers

    hybrid = Shard(model("Qwen/Qwen3.5-397B-A17B"), Precision(), Parallelism(tp=8))
    gated_delta, softmax = 45, 15
    of_experts = 3
    assert added(hybrid) == gated_delta * (1 + 1 + 15 - 16 + of_experts) + softmax * (1 + 3 + of_experts)
    narrow = replace(hybrid, precision=Precision(weights=Format.FP8_BLOCK))
    assert added(narrow) - added(hybrid) == gated_delta * (2 + 1 + 2) + softmax * (2 + 2)

    latent = Shard(model("deepseek-ai/DeepSeek-R1-0528"), Precision(), Parallelism(tp=8))
    assert added(latent) == 61 * (1 + 2)


@pytest.mark.full
@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_decode_steps_cost_what_their_padded_operators_cost(name: str) -> None:
    one, rng = priced(name), np.random.default_rng(2)
    errors = []
    for _ in range(40):
        decodes, context = int(rng.integers(1, MAX_NUM_SEQS + 1)), float(rng.integers(1, MAX_MODEL_LEN))
        padded = int(decode_tokens(one.engine, decodes)[-1])
        launches = [
            *token_launches(one.shard, padded),
            *head_launches(one.shard, padded),
            *decode_launches(one.shard, decodes, context),
        ]
        exact = one.seconds(launches)
        step_s = looked_up(one.lowered.cost, StepBatch(decodes, context)) - one.lowered.unhidden_s[decodes]
        errors.append(step_s / exact - 1)
    assert np.abs(errors).max() < 0.01


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_points_priced_are_exact(name: str) -> None:
    one = priced(name)
    cost = one.lowered.cost
    for tokens in (1, 64, 512, 1024, MAX_TOKENS):
        assert cost.mixed_token_s[tokens] == pytest.approx(one.seconds(token_launches(one.shard, tokens)))
    for row, column in ((1, 0), (64, 20), (256, -1)):
        exact = one.seconds(decode_launches(one.shard, row, cost.context_nodes[column]))
        assert cost.decode_attention_s[row, column] == pytest.approx(exact)
    for row, column in ((0, 0), (20, 30), (-1, -1)):
        chunk, length = cost.chunk_nodes[row], cost.length_nodes[column]
        exact = one.seconds(prefill_launches(one.shard, chunk / length, length))
        assert cost.prefill_attention_s[row, column] == pytest.approx(exact)


def test_batches_of_one_graph_cost_the_same_but_for_attention() -> None:
    lowered, sizes = priced("dense").lowered, graph_sizes(priced("dense").engine).tolist()
    cost, device_s = lowered.cost, lowered.cost.decode_token_s - lowered.unhidden_s
    for smaller, size in zip([0, *sizes], sizes, strict=False):
        if size <= MAX_NUM_SEQS:
            assert device_s[smaller + 1 : size + 1] == pytest.approx(device_s[size])
            assert cost.decode_token_s[size] == pytest.approx(cost.mixed_token_s[size] + cost.sample_s[size])


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_parts_are_parts(name: str) -> None:
    lowered = priced(name).lowered
    for whole, communication, compute in (
        (lowered.cost.decode_token_s, lowered.decode_communication_s, lowered.decode_compute_s),
        (lowered.cost.mixed_token_s, lowered.mixed_communication_s, lowered.mixed_compute_s),
    ):
        assert (whole > 0).all()
        assert (communication >= 0).all()
        assert (compute >= 0).all()
        assert (communication + compute <= whole * (1 + 1e-9)).all()
    assert (lowered.mixed_communication_s[1] > 0) == (priced(name).shard.tp > 1)
    assert lowered.mixed_compute_s[-1] > 0.5 * lowered.cost.mixed_token_s[-1] or name != "dense"


# Padding and grids


def test_graph_sizes_are_vllms() -> None:
    """vllm/config/vllm.py: 1, 2, 4, by 8 to 256, by 16 beyond."""
    sizes = graph_sizes(EngineSettings(max_cudagraph_capture_size=512)).tolist()
    assert sizes[:6] == [1, 2, 4, 8, 16, 24]
    assert sizes[-3:] == [480, 496, 512]
    assert 256 in sizes
    assert 264 not in sizes
    assert graph_sizes(EngineSettings(max_cudagraph_capture_size=20)).tolist() == [1, 2, 4, 8, 16]
    assert not graph_sizes(EngineSettings(max_cudagraph_capture_size=0)).size
    assert graph_sizes(EngineSettings(cudagraph_sizes=(8, 1, 3))).tolist() == [1, 3, 8]


def test_tensorrt_llm_captures_its_own_sizes_and_the_largest() -> None:
    """llm_args.py: by 8 to 128, then doubled to 1.2 and by 64 in 1.3; without padding 1 to 31, 32, 64 and 128."""

    def sizes(largest: int, version: str, **settings: Any) -> list[int]:
        name = settings.pop("name", "trtllm")
        given = EngineSettings(name=name, version=version, max_cudagraph_capture_size=largest, **settings)
        return list(graph_sizes(given).tolist())

    assert sizes(12, "1.2.0", cudagraph_padding=True) == [1, 2, 4, 8, 12]
    assert sizes(600, "1.2.0", cudagraph_padding=True)[-4:] == [128, 256, 512, 600]
    assert sizes(300, "1.3.0", cudagraph_padding=True)[-4:] == [128, 192, 256, 300]
    assert sizes(128, "1.3.0", cudagraph_padding=False) == [*range(1, 33), 64, 128]
    assert sizes(12, "0.5.9", name="sglang") == [1, 2, 4, 8, 12]
    assert sizes(600, "0.5.9", name="sglang")[-5:] == [496, 512, 544, 576, 600]
    drafts = Speculative(method="mtp", num_draft_tokens=3, acceptance_fraction=0.5)
    assert sizes(12, "0.5.9", name="sglang", speculative=drafts) == [*range(1, 9), 10, 12]


def test_batches_are_padded_up_to_the_next_graph_and_not_beyond_the_last() -> None:
    engine = EngineSettings(cudagraph_sizes=(1, 4, 8))
    assert decode_tokens(engine, 10)[1:].tolist() == [1, 4, 4, 4, 8, 8, 8, 8, 9, 10]
    assert decode_tokens(EngineSettings(max_cudagraph_capture_size=0), 3).tolist() == [0, 1, 2, 3]


def test_a_size_without_a_graph_waits_for_the_host_where_batches_are_not_padded() -> None:
    shard = Shard(model("Qwen/Qwen3-8B"), Precision(), Parallelism())
    engine = EngineSettings(name="trtllm", cudagraph_sizes=(1, 4), cudagraph_padding=False)
    assert decode_tokens(engine, 5).tolist() == [0, 1, 2, 3, 4, 5]
    in_graph = num_launches(shard, engine, np.array([1, 3, 4, 5]), decode_queries=1) == 0
    assert in_graph.tolist() == [True, False, True, False]


@pytest.mark.parametrize(("name", "padded"), [("vllm", [4, 8, 12]), ("sglang", [4, 16, 16])])
def test_graphs_of_drafts_count_requests_or_tokens(name: str, padded: list[int]) -> None:
    """Four tokens for each of up to three requests, with graphs of 1, 4 and 8 requests, or tokens."""
    shard = Shard(model("Qwen/Qwen3-8B"), Precision(), Parallelism())
    engine = EngineSettings(name=name, cudagraph_sizes=(1, 4, 8))
    assert decode_tokens(engine, 3, queries=4)[1:].tolist() == padded
    launches = num_launches(shard, engine, 4 * np.arange(1, 4), decode_queries=4)
    assert (launches > 0).tolist() == [False, False, name == "vllm"]


@pytest.mark.parametrize("most", [1, 2, 63, 64, 100, 512, 513, 8192, 9999])
def test_token_nodes_end_where_they_must(most: int) -> None:
    nodes = token_nodes(most)
    assert nodes[0] == 1
    assert most <= nodes[-1] < most + 64
    assert (np.diff(nodes) > 0).all()
    assert (np.diff(nodes) <= 64).all()
    assert set(range(1, min(most, 512))) <= set(nodes.tolist())
    assert np.array_equal(token_nodes(20_000)[: nodes.size], nodes), "a longer grid begins with the same nodes"
    batches = batch_nodes(most)
    assert batches[0] == 1
    assert most <= batches[-1] < most * 1.1 + 1
    assert np.array_equal(batch_nodes(20_000)[: batches.size], batches)
    assert (np.diff(batches) > 0).all()
    assert batches.size < 64 + 8 * max(np.log2(most) - 6, 0) + 2


def test_geometric_nodes_keep_a_quadratic_within_a_percent() -> None:
    nodes = geometric_nodes(5000)
    assert (nodes[0], nodes[-1]) == (1, 2 ** (50 / 4))
    between = np.linspace(1, 5000, 4000)
    found = np.interp(between, nodes, nodes**2)
    assert (found / between**2 - 1).max() < 0.0076


# What else is in a step


class OneSecond:
    """Every operator takes a second, so that a step counts its launches."""

    def estimate(self, op: Op) -> Estimate:
        shape = np.broadcast_shapes(*(np.shape(getattr(op, axis)) for axis in op.axes))
        seconds: Size = np.ones(shape) if shape else 1.0
        return Estimate(seconds, Coverage.MEASURED, "a second", 0.0)


def test_every_launch_of_a_step_is_counted_once() -> None:
    one = priced("dense")
    engine = EngineSettings(max_num_seqs=4, max_num_batched_tokens=8, max_cudagraph_capture_size=2)
    cost = lower_steps(OneSecond(), DeployedModel(one.device, one.shard, engine, 64)).cost
    # A layer: two norms, qkv, rope, cache write, o, gate-up, activation, down; then the last norm and the embedding.
    assert np.unique(cost.mixed_token_s).tolist() == [32 * 9 + 2]
    assert np.unique(cost.sample_s).tolist() == [2]
    assert np.unique(cost.decode_token_s).tolist() == [32 * 9 + 2 + 2]
    assert np.unique(cost.decode_attention_s).tolist() == [32]
    assert np.unique(cost.prefill_attention_s).tolist() == [32]
    assert (cost.decode_token_s.size, cost.mixed_token_s.size) == (4 + 1, 8 + 4 + 1)


def test_prices_say_where_they_come_from() -> None:
    one = priced("experts")
    steps = price_step(one.estimator, one.shard, StepBatch(8, 500, 0, 0, 8))
    assert all(x.total_s > 0 and x.estimate.source and x.estimate.coverage in COVERAGES for x in steps)
    (experts,) = [x for x in steps if x.name == "experts"]
    assert experts.total_s == pytest.approx(float(experts.estimate.seconds) * 48)


def test_recorded_steps_ignore_the_batch() -> None:
    durations: NDArray[np.float64] = np.array([0.1, 0.2])
    cost = played_back(durations, 3)
    np.testing.assert_array_equal(cost.recorded_step_s, durations)
    assert Prices(cost).decode_attention_s(3, 300) == 0
    assert cost.decode_token_s.size == 4


@pytest.mark.parametrize(("model", "fuses"), [("Qwen/Qwen3-32B", True), ("deepseek-ai/DeepSeek-V4-Flash", False)])
def test_streams_of_the_residual_keep_all_reduces_apart_from_norms(model: str, fuses: bool) -> None:
    """Mixing stands between both, so that vLLM's pass finds no pattern to fuse."""
    shape: Any = {"device": "b300_sxm", "tp": 4, "engine_version": "0.20.1"}
    setup = resolve(scenario(model=model, **shape, input_tokens=64, output_tokens=4, concurrency=1))
    assert setup.engine.fused_all_reduce == fuses
    limit = 64 * 2**20 if fuses else 0.0
    assert estimator_key(setup)[5:7] == (limit, limit / (2 * setup.model.hidden_size))


def test_estimators_differ_as_devices_nodes_and_profiles_do_and_tables_are_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two files of devices may have one name."""
    read: list[str] = []

    def reading(device: Device, *arguments: Any, **named: Any) -> Any:
        read.append(device.name)
        return measured_estimator(device, *arguments, **named)

    monkeypatch.setattr(estimators, "measured_estimator", reading)
    shape: Any = {"device": "l40s", "input_tokens": 64, "output_tokens": 4, "concurrency": 1}
    setup = resolve(scenario(model="qwen2.5-0.5b", **shape))
    faster = msgspec.structs.replace(setup.device, memory_bytes_per_s=2 * setup.device.memory_bytes_per_s)
    slower = msgspec.structs.replace(setup.node, scale_up=msgspec.structs.replace(setup.node.scale_up, latency_s=1.0))
    others = [{"device": faster}, {"node": slower}, *({"profile": Profile(folder=name)} for name in "ab")]
    assert len({estimator_key(replace(setup, **other)) for other in ({}, *others)}) == 1 + len(others)
    estimators._measured.cache_clear()
    for each in (setup, setup, replace(setup, device=faster), setup):
        assert estimator_for(each).estimate(Gemm(8, 1024, 1024, Format.BF16)).seconds > 0
    assert read == ["l40s", "l40s"]
