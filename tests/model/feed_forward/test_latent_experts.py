"""Experts behind a projection to a latent width (Nemotron 3 Super and Ultra): counts, formats, launches, prices."""

import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.config import model_from_config
from windtunnel.model.feed_forward.experts import Experts, ExpertsFeedForward
from windtunnel.model.launches.forward import token_launches
from windtunnel.model.memory import weight_bytes
from windtunnel.model.operators import Collective, Gemm, Launch
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import Format
from windtunnel.model.shape import Shard
from windtunnel.pricing.aiconfigurator.estimator import measured_estimator
from windtunnel.pricing.estimator import Coverage

SUPER, ULTRA = "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16"


def shard(name: str = SUPER, **degrees: int) -> Shard:
    model = catalog.model(name)
    return Shard(model, model.precision, Parallelism(**degrees))


def launched(on: Shard, num_tokens: int = 64) -> dict[str, Launch]:
    return {launch.name: launch for launch in token_launches(on, num_tokens)}


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        (SUPER, 120.6e9, 12.7e9),  # "120.6 billion total parameters, of which 12.7 billion are active" (report)
        (ULTRA, 550e9, 55e9),  # the model card: 550B total, 55B active
    ],
)
def test_parameters_are_those_published(name: str, total: float, active: float) -> None:
    count = count_parameters(catalog.model(name))
    assert count.total == pytest.approx(total, rel=0.01)
    assert min(abs(count.active - active), abs(count.active - count.embedding - active)) < 0.01 * active


def test_a_block_is_counted_by_hand() -> None:
    """512 experts of two matrices at 1,024, two projections, a router with its bias, a shared expert at 4,096."""
    block = next(part for _, part in catalog.model(SUPER).feed_forwards)
    assert isinstance(block, ExpertsFeedForward)
    count = block.parameters(4096)
    assert count.routed == 512 * 2 * 1024 * 2688
    assert count.router == 512 * 4096 + 512 + 2 * 4096 * 1024
    assert count.shared == 2 * 4096 * 5376


def test_experts_compute_at_the_latent_width_between_two_whole_projections() -> None:
    launches = launched(shard(tp=8))
    experts = launches["experts"].op
    assert isinstance(experts, Experts)
    assert (experts.hidden_size, experts.experts_per_token, experts.gated) == (1024, 22, False)
    for name, (outputs, inputs) in {"latent_down_proj": (1024, 4096), "latent_up_proj": (4096, 1024)}.items():
        op = launches[name].op
        assert isinstance(op, Gemm)
        assert (op.n, op.k, op.format) == (outputs, inputs, Format.BF16)
        assert launches[name].count == 40
    order = list(launches)
    assert order.index("latent_down_proj") < order.index("experts") < order.index("latent_up_proj")
    shared = launches["shared_up_proj"].op
    assert isinstance(shared, Gemm)
    assert (shared.n, shared.k) == (5376 // 8, 4096)


def test_ranks_exchange_tokens_at_the_latent_width() -> None:
    launches = launched(shard(tp=1, attention_dp=8, ep=8))
    for name in ("dispatch_all_gather", "combine_reduce_scatter"):
        op = launches[name].op
        assert isinstance(op, Collective)
        assert op.message_bytes == 8 * 64 * 1024 * 2
    summed = launched(shard(tp=8))["experts_all_reduce"].op
    assert isinstance(summed, Collective)
    assert summed.message_bytes == 64 * 4096 * 2


def test_every_rank_keeps_the_projections() -> None:
    repeated = 40 * (512 * 4096 + 512 + 2 * 4096 * 1024) * 2  # and the router
    heads = 8 * 2 * 128 * 4096 * 2  # of eight layers, two key/value heads on four ranks
    assert weight_bytes(shard(tp=4)) * 4 - weight_bytes(shard(tp=2)) * 2 == pytest.approx(2 * (repeated + heads))


@pytest.mark.parametrize("name", [SUPER.replace("BF16", "FP8"), ULTRA])
def test_experts_are_measured_at_the_latent_width(name: str) -> None:
    experts = launched(shard(name, tp=8, ep=8))["experts"].op
    estimate = measured_estimator(catalog.device("b200_sxm"), None, "vllm", "0.24.0").estimate(experts)
    assert estimate.coverage is Coverage.MEASURED
    assert "b200_sxm/moe/vllm/0.24.0" in estimate.source


def test_a_config_that_names_its_blocks_needs_no_number_of_layers() -> None:
    config = {
        "model_type": "nemotron_h",
        "hidden_size": 64,
        "layers_block_type": ["mlp", "attention"],
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 128,
    }
    assert model_from_config(config, "tiny").num_layers == 2
    with pytest.raises(InputError, match="has no num_hidden_layers"):
        model_from_config({**config, "layers_block_type": "mlp"}, "tiny")
