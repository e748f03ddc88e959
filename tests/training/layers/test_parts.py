"""Training operators: parameters and bytes against closed forms, FLOPs against counts, memory against papers."""

from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from windtunnel.model import operators as ops
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.parameters import count_parameters
from windtunnel.model.shape import LayerGroup, ModelSpec
from windtunnel.schema import decode, encode
from windtunnel.training.job import TrainingJob
from windtunnel.training.layers.chunks import Parameters, chunk_parameters, chunks
from windtunnel.training.layers.part import Part
from windtunnel.training.layers.parts import layer_parts, layer_work
from windtunnel.training.layers.rank import Group, Rank
from windtunnel.training.layers.sharding import gather_tasks, optimizer_tasks, reduce_tasks
from windtunnel.training.memory import chunk_work, state_bytes
from windtunnel.training.setup import resolve


def gpt(layers: int = 8, hidden: int = 1024, heads: int = 16) -> ModelSpec:
    attention = GroupedQueryAttention(num_heads=heads, num_kv_heads=heads, head_dim=hidden // heads)
    group = LayerGroup(
        num_layers=layers, attention=attention, feed_forward=DenseFeedForward(intermediate_size=4 * hidden, gated=False)
    )
    return ModelSpec(name="gpt", hidden_size=hidden, vocab_size=51200, max_context_tokens=2048, layers=(group,))


def rank(model: Any = None, **changes: Any) -> Rank:
    raw = {
        "model": model if isinstance(model, str) else encode(model or gpt()),
        "device": "h100_sxm",
        "sequence_tokens": 2048,
        "global_batch": 64,
        **changes,
    }
    return Rank(resolve(decode(raw, TrainingJob)))


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-405B",
        "deepseek-ai/DeepSeek-V3",
        "Qwen/Qwen3-235B-A22B",
        "openai/gpt-oss-120b",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        "deepseek-ai/DeepSeek-V3.2",
        "XiaomiMiMo/MiMo-V2-Flash",
        "google/gemma-4-31B-it",
    ],
)
def test_stages_and_ranks_add_up_to_the_model(name: str) -> None:
    """Invariant 23."""
    one = rank(name, sequence_tokens=4096)
    assert sum(chunk_parameters(one, chunk).total for chunk in chunks(one.setup)) == pytest.approx(
        count_parameters(one.setup.model).total, rel=1e-4
    )


@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, 8), (2, 2, 4), (1, 4, 16), (4, 1, 8)])
def test_expert_parallel_ranks_add_up_to_the_model(tp: int, pp: int, ep: int) -> None:
    one = rank("Qwen/Qwen3-30B-A3B", num_devices=64, sequence_tokens=4096, parallelism={"tp": tp, "pp": pp, "ep": ep})
    held = [chunk_parameters(one, chunk) for chunk in chunks(one.setup)]
    known = one.setup.degrees
    whole = sum(part.dense * tp + part.experts * known.ep * known.experts_tp for part in held)
    # Norms and routers are on every tensor rank: 0.05% of this model.
    assert whole == pytest.approx(count_parameters(one.setup.model).total, rel=5e-3)


@given(
    tp=st.sampled_from([2, 4, 8]),
    cp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2, 4]),
    split=st.booleans(),
    micro_batch=st.integers(1, 2),
)
def test_tensor_parallel_bytes_of_a_layer_are_the_closed_form(
    tp: int, cp: int, pp: int, split: bool, micro_batch: int
) -> None:
    one = rank(
        num_devices=tp * cp * pp,
        micro_batch=micro_batch,
        parallelism={"tp": tp, "cp": cp, "pp": pp, "sequence_parallel": split},
    )
    message = 2.0 * micro_batch * 2048 / cp * 1024
    work = layer_work(one, one.setup.model.layers[0])
    forward = sum(task.wire_bytes for task in work.forward if task.group == Group.TENSOR)
    backward = sum(task.wire_bytes for task in work.backward_input if task.group == Group.TENSOR)
    each = message * (tp - 1) / tp
    # Sequence-parallel: 2 all-gathers and 2 reduce-scatters, and 2 gathers more on the way back; else 2 all-reduces.
    assert forward == pytest.approx(4 * each)
    assert backward == pytest.approx((6 if split else 4) * each)


@given(
    zero=st.sampled_from([0, 1, 2]),
    tp=st.sampled_from([1, 2]),
    dp=st.sampled_from([2, 4, 8]),
    reduce=st.sampled_from(["fp32", "bf16"]),
)
def test_data_parallel_bytes_are_the_closed_form(zero: int, tp: int, dp: int, reduce: str) -> None:
    one = rank(
        num_devices=tp * dp, parallelism={"tp": tp}, sharding={"zero": zero}, precision={"gradient_reduce": reduce}
    )
    held = chunk_parameters(one, chunks(one.setup)[0])
    wire = 4.0 if reduce == "fp32" else 2.0
    share = (dp - 1) / dp
    reduced = sum(task.wire_bytes for task in reduce_tasks(one, held))
    gathered = sum(task.wire_bytes for task in gather_tasks(one, held))
    assert reduced == pytest.approx((2 if zero == 0 else 1) * share * held.total * wire)
    assert gathered == pytest.approx(0 if zero == 0 else share * held.total * 2)


def test_hybrid_sharding_reduces_inside_a_group_and_between_groups() -> None:
    one = rank(num_devices=16, sharding={"zero": 3, "group": 8})
    tasks = {task.group: task for task in reduce_tasks(one, Parameters(1e9))}
    assert tasks[Group.DATA].wire_bytes == pytest.approx(4e9 * 7 / 8)
    assert tasks[Group.REPLICAS].wire_bytes == pytest.approx(2 * 4e9 / 8 / 2)


def test_a_layer_costs_six_flops_a_parameter_and_token() -> None:
    one = rank()
    work = layer_work(one, one.setup.model.layers[0])
    products = sum(
        task.flops
        for task in work.forward + work.backward_input + work.backward_weight
        if task.op.kind == "gemm" and task.group is None
    )
    assert products == pytest.approx(6 * 12 * 1024**2 * 2048)
    attention = sum(task.flops for task in work.forward + work.backward_input if task.op.kind == "prefill_attention")
    assert attention == pytest.approx((1 + 2.5) * 2 * 2048**2 * 1024)


def products(one: Rank, index: int) -> tuple[float, float]:
    """Return the FLOPs of a layer's attention in matrix products, forward and both gradients."""
    group = msgspec.structs.replace(one.setup.model.layers[index], feed_forward=None)
    work = layer_work(one, group)
    return tuple(
        sum(task.flops for task in tasks if task.op.kind == "gemm" and task.group is None)
        for tasks in (work.forward, work.backward_input + work.backward_weight)
    )  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "index", "others"),
    [
        # Convolutions of four values, a bias of each rate and a decay of each head.
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", 0, 3 * 4096 * 4 + 4096 + 32),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", 2, 0),
        ("XiaomiMiMo/MiMo-V2-Flash", 0, 0),
        ("XiaomiMiMo/MiMo-V2-Flash", 1, 64),  # a sink of each head
        ("google/gemma-4-31B-it", 1, 0),
        # What queries and outputs absorb, and the indexer, are within the core.
        ("deepseek-ai/DeepSeek-V3.2", 0, 512 * 128 * 256 + 1536 * 64 * 128 + 7168 * (128 + 64)),
    ],
)
def test_a_projection_costs_six_flops_a_parameter_and_token(name: str, index: int, others: int) -> None:
    one = rank(name, sequence_tokens=4096)
    attention = one.setup.model.layers[index].attention
    assert attention is not None
    matrices = attention.num_parameters(one.setup.model.hidden_size) - others
    forward, backward = products(one, index)
    assert forward == pytest.approx(2 * matrices * 4096)
    assert backward == pytest.approx(4 * matrices * 4096)


def core_of(one: Rank, name: str, index: int = 0) -> Part:
    return next(part for part in layer_parts(one, one.setup.model.layers[index]) if part.name == name)


def test_sparse_attention_is_trained_on_the_keys_that_its_indexer_chose() -> None:
    """DeepSeek-V3.2, 8,192 tokens: formulas of arXiv:2512.02556, section 2.1, written out."""
    part = core_of(rank("deepseek-ai/DeepSeek-V3.2", sequence_tokens=8192), "sparse_attention")
    kept, every = 8192 * 2048 - 2048**2 / 2, 8192**2 / 2
    weights = 128 * 512 * (128 + 128) + 1536 * 64 * 128 + 7168 * (128 + 64)
    attention, scores = kept * 2 * 128 * (512 + 64 + 512), every * 2 * 64 * 128
    # Scores in fp8 count half.
    assert part.forward[0].flops == pytest.approx(attention + scores / 2 + 2 * 8192 * weights)
    target, indexer = kept * 2 * 128 * (512 + 64), kept * 4 * 64 * 128
    assert part.backward_input[0].flops == pytest.approx(2.5 * attention + target + indexer + 4 * 8192 * weights)
    # Queries, latents, the indexer's; absorbed queries and outputs, a logarithm of each head, 2,048 positions.
    inputs = 2 * (128 * 192 + 576 + 64 * 129 + 128)
    own = 128 * (2 * 512 * 2 + 4) + 4 * 2048
    assert part.kept_bytes == pytest.approx(8192 * (inputs + own))
    assert part.dropped_bytes == pytest.approx(8192 * own)


def test_layers_that_share_a_choice_have_no_indexer_to_train() -> None:
    one = rank("zai-org/GLM-5.2", sequence_tokens=8192)
    first, sharing = core_of(one, "sparse_attention"), core_of(one, "sparse_attention", 1)
    every, kept = 8192**2 / 2, 8192 * 2048 - 2048**2 / 2
    weights = 2048 * 32 * 128 + 6144 * (128 + 32)
    assert first.forward[0].flops - sharing.forward[0].flops == pytest.approx(every * 32 * 128 + 2 * 8192 * weights)
    gradients = [part.backward_input[0].flops for part in (first, sharing)]
    assert gradients[0] - gradients[1] == pytest.approx(kept * 4 * 32 * 128 + 4 * 8192 * weights)


def test_the_core_of_kimi_delta_attention_is_run_again_backward() -> None:
    part = core_of(rank("moonshotai/Kimi-Linear-48B-A3B-Instruct", sequence_tokens=4096), "kimi_delta")
    assert part.forward[0].flops == pytest.approx(6 * 4096 * 32 * 128 * 128)
    assert part.backward_input[0].flops == 3 * part.forward[0].flops
    # Keys, queries and values, rates in fp32, and two matrices of 64 tokens for each head.
    assert part.kept_bytes == 4096 * (3 * 4096 * 2 + 4096 * 4 + 2 * 64 * 32 * 2)


def test_attention_within_chunks_is_that_of_documents() -> None:
    """Llama 4: 32,768 tokens in chunks of 8,192 have 4 x 8,192^2 / 2 pairs; a window has nearly twice that."""
    part = core_of(rank("meta-llama/Llama-4-Scout-17B-16E-Instruct", sequence_tokens=32768), "attention")
    assert part.forward[0].flops == pytest.approx(4 * 40 * 128 * 4 * 8192**2 / 2)


def test_narrow_values_cost_their_width() -> None:
    """MiMo-V2-Flash: keys of 192 and values of 128, 64 heads."""
    part = core_of(rank("XiaomiMiMo/MiMo-V2-Flash", sequence_tokens=4096), "attention")
    assert part.forward[0].flops == pytest.approx(2 * (192 + 128) * 64 * 4096**2 / 2)
    assert part.kept_bytes == 4096 * (64 * 192 + 4 * (192 + 128)) * 2 + 4096 * 64 * 4


def test_full_recomputation_repeats_the_forward_pass() -> None:
    plain, full = rank(), rank(recompute={"granularity": "full"})
    group = plain.setup.model.layers[0]
    again = layer_work(full, group)
    assert [task.op for task in again.recomputed] == [task.op for task in layer_work(plain, group).forward]
    assert again.kept_bytes == 2048 * 1024 * 2


@pytest.mark.parametrize("framework", ["fsdp2", "maxtext"])
def test_pytorch_and_xla_do_not_repeat_a_layers_last_product(framework: str) -> None:
    full = rank(framework=framework, recompute={"granularity": "full"})
    group = full.setup.model.layers[0]
    again, forward = layer_work(full, group).recomputed, layer_work(full, group).forward
    place = [task.name for task in forward].index("down_proj")
    assert [task.op for task in again] == [task.op for task in forward[:place]]
    # A mask that dropout keeps stands behind it.
    masked = layer_work(rank(framework=framework, dropout=True, recompute={"granularity": "full"}), group)
    assert [task.op for task in masked.recomputed] == [task.op for task in masked.forward]


def test_eager_norms_move_more_bytes_than_fused_ones_but_layer_norms_do_not() -> None:
    def moved(model: Any, fused: bool, phase: str) -> float:
        one = rank(model, framework="fsdp2", kernels={"fused": fused})
        work = layer_work(one, one.setup.model.layers[0])
        return float(next(task for task in getattr(work, phase) if task.name.startswith("input_norm")).op.num_bytes)

    llama = "meta-llama/Llama-3.1-8B"
    assert moved(llama, False, "forward") == 9 * moved(llama, True, "forward")
    assert moved(llama, False, "backward_input") == 13 * moved(llama, True, "backward_input")
    assert moved(None, False, "forward") == moved(None, True, "forward")


def test_pytorch_copies_beside_collectives_along_the_sequence_of_several_sequences() -> None:
    def copies(framework: str, micro_batch: int, pieces: bool = False) -> list[float]:
        parallelism, overlap = {"tp": 4, "sequence_parallel": True}, {"tensor_parallel": pieces}
        one = rank(
            framework=framework, micro_batch=micro_batch, parallelism=parallelism, overlap=overlap, num_devices=4
        )
        work = layer_work(one, one.setup.model.layers[0])
        tasks = work.forward + work.backward_input
        return [float(task.op.num_bytes) for task in tasks if task.name.endswith("put_copy")]

    assert copies("megatron", 4) == copies("fsdp2", 1) == []
    # Two gathers and two scatters forward; backward two of each and two more gathers for weights' gradients.
    assert copies("fsdp2", 4) == [4 * 2048 * 1024 * 2 * 2] * 10
    assert len(copies("fsdp2", 4, pieces=True)) == 2


def test_asynchronous_tensor_parallelism_of_pytorch_hides_no_gather_for_weights() -> None:
    def beside(framework: str) -> dict[str, tuple[str | None, int]]:
        overlap = {"tensor_parallel": True}
        one = rank(framework=framework, parallelism={"tp": 4}, overlap=overlap, num_devices=4)
        work = layer_work(one, one.setup.model.layers[0])
        return {task.name: (task.beside, task.pieces) for task in work.backward_input if task.group}

    assert beside("fsdp2")["qkv_proj_input_all_gather"] == (None, 1)
    assert beside("fsdp2")["qkv_proj_reduce_scatter"] == ("qkv_proj_dgrad", 4)
    assert beside("megatron")["qkv_proj_input_all_gather"] == ("qkv_proj_dgrad", 1)
    assert beside("megatron")["qkv_proj_reduce_scatter"] == ("qkv_proj_wgrad", 1)


@pytest.mark.parametrize(("tp", "split"), [(1, False), (8, False), (8, True)])
@pytest.mark.parametrize("selective", [False, True])
def test_activations_of_a_layer_are_korthikantis(tp: int, split: bool, selective: bool) -> None:
    # arXiv:2205.05198, equations 1, 2, 4 and table 2: s b h (10 + 24 / t + 5 a s / (h t)), or all of it over t.
    hidden, heads, sequence, batch = 6144, 64, 2048, 4
    one = rank(
        gpt(48, hidden, heads),
        device="a100_sxm",
        num_devices=tp,
        micro_batch=batch,
        dropout=True,
        parallelism={"tp": tp, "sequence_parallel": split},
        kernels={"attention": "unfused"},
        learned_positions=True,
        recompute={"granularity": "selective"} if selective else {},
    )
    kept = layer_work(one, one.setup.model.layers[0]).kept_bytes
    scores = 0.0 if selective else 5 * heads * sequence / hidden / tp
    outside = 34 / tp if split else 10 + 24 / tp
    assert kept == pytest.approx(sequence * batch * hidden * (outside + scores), rel=0.005)


def test_state_is_sixteen_bytes_a_parameter_and_zero_divides_it() -> None:
    # arXiv:1910.02054, figure 1: 2 + 2 + 12 bytes; here gradients are summed in fp32.
    held = Parameters(1e9)
    plain = rank(num_devices=8, sharding={"zero": 0})
    assert sum(state_bytes(plain, held)) == pytest.approx(18e9)
    first = rank(num_devices=8, sharding={"zero": 1})
    assert sum(state_bytes(first, held)) == pytest.approx((2 + 4 + 12 / 8) * 1e9)
    third = rank(num_devices=8, sharding={"zero": 3}, framework="fsdp2")
    assert sum(state_bytes(third, held)) == pytest.approx((4 + 12) / 8 * 1e9)


def test_the_optimizer_moves_what_it_owns() -> None:
    one = rank(num_devices=8)
    update = optimizer_tasks(one, Parameters(8e9))[0]
    # Gradients read for their norm, clipped and read, two moments and the master copy read and written, the 16-bit
    # parameter written.
    assert update.op.num_bytes == pytest.approx(1e9 * (16 + 16 + 8 + 2))


@given(num_layers=st.integers(1, 4), total=st.sampled_from([8, 12]))
def test_partial_recomputation_covers_some_layers(num_layers: int, total: int) -> None:
    assume(num_layers < total)
    one = rank(gpt(total), recompute={"granularity": "full", "num_layers": num_layers})
    counts = [count for work, count in chunk_work(one, chunks(one.setup)[0]) if work.recomputed]
    assert sum(counts) == num_layers


def test_dense_layers_come_before_experts() -> None:
    one = rank("deepseek-ai/DeepSeek-V3", sequence_tokens=4096)
    (chunk,) = chunks(one.setup)
    kinds = [isinstance(group.feed_forward, DenseFeedForward) for group, _ in chunk.layers]
    assert kinds == sorted(kinds, reverse=True)


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-Linear-48B-A3B-Instruct"])
def test_parts_of_a_layer_have_unique_computations(name: str) -> None:
    one = rank(name, sequence_tokens=4096)
    for group in one.setup.model.layers:
        names = [task.name for part in layer_parts(one, group) for task in part.forward]
        assert len(names) == len(set(names))


def test_packed_documents_attend_to_themselves_only() -> None:
    whole, packed = rank(), rank(document_tokens=256)
    both = [layer_work(one, one.setup.model.layers[0]).forward for one in (whole, packed)]
    attention = [sum(task.flops for task in tasks if task.name == "attention") for tasks in both]
    assert attention[0] == pytest.approx(8 * attention[1])
    others = [sum(task.flops for task in tasks if task.name != "attention") for tasks in both]
    assert others[0] == others[1]


def test_a_token_goes_once_to_a_rank_however_many_of_its_experts_are_there() -> None:
    shape = {"num_devices": 8, "sequence_tokens": 4096}
    sent, moved = [], []
    for exchange in ("all_to_all", "by_node"):
        one = rank("Qwen/Qwen3-30B-A3B", parallelism={"ep": 8, "experts_exchange": exchange}, **shape)
        forward = layer_work(one, one.setup.model.layers[0]).forward
        sent.append(sum(task.wire_bytes for task in forward if task.group == Group.EXPERTS))
        moved.append({task.name for task in forward})
    # Eight experts of a token meet 8 (1 - (7/8)^8) of 8 ranks.
    assert sent[1] / sent[0] == pytest.approx(1 - (7 / 8) ** 8)
    assert moved[0] - moved[1] == {"permute", "unpermute"}


def test_all_tokens_may_go_to_all_ranks() -> None:
    """Megatron-Core's `MoEAllGatherTokenDispatcher`: hidden states are gathered, and sums of experts scattered."""
    split = {"ep": 8, "experts_exchange": "all_gather"}
    one = rank("Qwen/Qwen3-30B-A3B", parallelism=split, num_devices=8, sequence_tokens=4096)
    work = layer_work(one, one.setup.model.layers[0])
    for tasks in (work.forward, work.backward_input):
        sent = [task.op for task in tasks if task.group == Group.EXPERTS and isinstance(task.op, ops.Collective)]
        assert [(op.op, op.message_bytes) for op in sent] == [
            ("all_gather", 8 * 4096 * 2048 * 2.0),
            ("reduce_scatter", 8 * 4096 * 2048 * 2.0),
        ]


def test_a_scale_in_the_tensor_costs_a_pass_where_no_kernel_found_it() -> None:
    taken = {}
    for compute in ("fp8", "fp8_current", "fp8_rowwise"):
        one = rank("meta-llama/Llama-3.1-8B", precision={"compute": compute})
        work = layer_work(one, one.setup.model.layers[0])
        taken[compute] = {
            task.name: task.op.num_bytes
            for task in work.forward + work.backward_input
            if task.name.startswith("quantise_")
        }
    more = {name for name, num_bytes in taken["fp8_current"].items() if num_bytes > taken["fp8"][name]}
    gradients = {"quantise_o_proj_gradient", "quantise_down_proj_gradient", "quantise_qkv_proj_gradient"}
    assert more == {"quantise_o_proj_input", *gradients}
    assert all(taken["fp8_rowwise"][name] > num_bytes for name, num_bytes in taken["fp8_current"].items())
