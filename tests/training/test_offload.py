"""Optimizer state and parameters in the host's memory: measured runs, memory, and what is refused."""

from typing import Any

import msgspec
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.training.job import load
from windtunnel.training.setup import resolve
from windtunnel.training.step import TrainingResult, simulate_training, step_interval

DGX2 = msgspec.structs.replace(catalog.node("dgx_v100"), host_memory_bytes=1.5e12, host_memory_bytes_per_s=256e9)
"""One V100 of 32 GB, two Xeon 8168 with 12 channels of DDR4-2666 and 1.5 TB (arXiv:2101.06840, table 2)."""
LLAMA: dict[str, Any] = {
    "model": "llama-2-7b",
    "device": "a100_sxm",
    "num_devices": 8,
    "sequence_tokens": 4096,
    "global_batch": 64,
    "framework": "deepspeed",
}
FULL = {"granularity": "full"}


def step(**changes: Any) -> TrainingResult:
    return simulate_training(load({**LLAMA, **changes}))


def gpt2_on_a_v100(num_layers: int, micro_batch: int, num_microbatches: int) -> TrainingResult:
    """GPT-2 of a width of 4096 with ZeRO-2 and an offloaded optimizer, as DeepSpeed's tutorial runs it."""
    shape = {"n_layer": num_layers, "n_embd": 4096, "n_head": 32, "n_positions": 1024, "vocab_size": 50257}
    return step(
        model={"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_ctx": 1024, **shape},
        device="v100_sxm",
        node=msgspec.to_builtins(DGX2),
        num_devices=1,
        sequence_tokens=1024,
        global_batch=micro_batch * num_microbatches,
        micro_batch=micro_batch,
        sharding={"zero": 2, "offload": "optimizer"},
        precision={"compute": "fp16"},
        recompute=FULL,
        dropout=True,
        kernels={"attention": "unfused", "cross_entropy": "fp32"},
    )


@pytest.mark.full
def test_ten_billion_parameters_on_one_v100() -> None:
    """ZeRO-Offload published 40 TFLOP/s for 10 billion parameters at a batch of 512 (arXiv:2101.06840, abstract).

    We are 34% fast: kernels of 2020 on a V100 were slower than those that price it. What waits for the host is 1% of
    the step here, so that the run says little of the host.
    """
    result = gpt2_on_a_v100(50, 10, 51)
    assert result.num_parameters == pytest.approx(10.3e9, rel=0.01)
    assert result.flops_per_s_per_device == pytest.approx(40e12, rel=0.36)
    assert result.host_s < 0.05 * result.step_s


def test_thirteen_billion_parameters_are_the_most_that_one_v100_trains() -> None:
    """The paper's largest model on 32 GB; each layer has 0.2 billion parameters. We say 13.1 billion."""
    largest = max(
        result.num_parameters for result in (gpt2_on_a_v100(layers, 1, 8) for layers in range(54, 70)) if result.fits
    )
    assert largest == pytest.approx(13e9, rel=0.02)
    # Master weight, two moments and gradient in fp32, 16-bit sums and a 16-bit copy on the way back.
    assert gpt2_on_a_v100(62, 1, 8).host_bytes == pytest.approx(20 * 12.7e9, rel=0.02)


@pytest.mark.parametrize(
    ("zero", "offload", "micro_batch", "measured_bytes"), [(2, "optimizer", 1, 16.9e9), (3, "optimizer", 2, 9.4e9)]
)
def test_what_stays_on_the_device_is_what_was_measured(
    zero: int, offload: str, micro_batch: int, measured_bytes: float
) -> None:
    """`torch.cuda.max_memory_allocated` of LLaMA-7B on 8 A800 with DeepSpeed 0.14.2, whose buckets are not published
    (gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a); we are 16% and 25% above.

    Its row with offloaded parameters is left out: 7.9 GB with four sequences are less than others keep of two.
    """
    result = step(sharding={"zero": zero, "offload": offload}, micro_batch=micro_batch, recompute=FULL)
    assert result.worst_memory.allocated_bytes == pytest.approx(measured_bytes, rel=0.27)


def test_hosts_that_are_not_tuned_are_slower_than_the_interval_of_tuned_ones() -> None:
    """The same runs took 35.4 and 31.2 s with offloading, 15.3 and 14.4 s without it: their hosts needed 15 times as
    long as ours. The interval does not reach them; what is said of an untuned host does not promise it.
    """
    result = step(sharding={"zero": 2, "offload": "optimizer"}, recompute=FULL)
    without = step(sharding={"zero": 2}, recompute=FULL)
    assert 15.3 / without.step_s == pytest.approx(1.44, abs=0.1)
    interval = step_interval(result)
    assert result.step_s < 35.4
    assert interval.high - result.step_s > 3 * result.host_s


def test_an_offloaded_step_is_longer_by_the_update_and_the_copies() -> None:
    """The oracle: 2 bytes of each parameter go up, and 3.88e9 are updated a second where memory has 256 GB/s."""
    on, off = step(sharding={"zero": 2}), step(sharding={"zero": 2, "offload": "optimizer"})
    parts = off.breakdown_s
    update_s = off.num_parameters / (3.88e9 * 409.6 / 256)
    assert parts["optimizer on the host"] == pytest.approx(update_s, rel=0.01)
    copied_s = 2 * off.num_parameters / 8 / (32e9 * 0.78)
    assert parts["copies between device and host in the optimizer's step"] == pytest.approx(copied_s, rel=0.01)
    assert on.step_s + update_s + copied_s <= off.step_s <= on.step_s + off.host_s + on.breakdown_s["optimizer"]
    faster = step(sharding={"zero": 2, "offload": "optimizer", "host_parameters_per_s": 1e12})
    assert faster.breakdown_s["optimizer on the host"] < 0.01


def test_parameters_come_to_the_device_for_every_use() -> None:
    kept = step(sharding={"zero": 3, "offload": "optimizer"}, sequence_tokens=64, global_batch=8)
    gone = step(sharding={"zero": 3, "offload": "parameters"}, sequence_tokens=64, global_batch=8)
    assert gone.breakdown_s["exposed communication (host)"] > 1.5 * kept.breakdown_s["exposed communication (host)"]
    assert gone.worst_memory.parameters_bytes == 0
    sharded = step(framework="fsdp2", sharding={"offload": "parameters"}).worst_memory
    assert sharded.gradients_bytes == sharded.optimizer_bytes == 0


def test_more_than_the_host_has_does_not_fit() -> None:
    result = step(
        model="llama-3.1-70b",
        device="gh200",
        num_devices=1,
        global_batch=1,
        sharding={"zero": 3, "offload": "parameters"},
        recompute=FULL,
        kernels={"cross_entropy": "chunked"},
    )
    assert result.fits_devices
    assert not result.fits
    assert result.host_bytes > 480e9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sharding": {"zero": 2, "offload": "parameters"}}, "needs sharding.zero = 3; it is 2"),
        ({"sharding": {"zero": 0, "offload": "optimizer"}}, "needs sharding.zero = 1 or 2 or 3; it is 0"),
        ({"framework": "fsdp2", "sharding": {"offload": "optimizer"}}, "is not modelled for fsdp2"),
        ({"optimizer": "muon", "sharding": {"zero": 2, "offload": "optimizer"}}, "is modelled for Adam"),
        ({"lora": {}, "precision": {"frozen_weights": "int8"}}, "int8 cannot be sharded"),
    ],
)
def test_what_is_not_modelled_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(load({**LLAMA, **changes}))


def test_moments_in_8_bits_leave_those_of_the_embedding() -> None:
    """bitsandbytes and Hugging Face's Trainer: 2 bytes a parameter and scales, 8 for the embedding's."""
    whole, few = (step(num_devices=8, sharding={"zero": 0}, precision={"moments": m}) for m in ("fp32", "int8"))
    table, others = 32000 * 4096, whole.num_parameters - 32000 * 4096
    saved = whole.worst_memory.optimizer_bytes - few.worst_memory.optimizer_bytes
    assert saved == pytest.approx(others * 2 * (4 - 1 - 4 / 256), rel=1e-3)
    assert table > 0


def test_frozen_weights_in_8_bits_take_half_and_are_slower() -> None:
    """LLM.int8() multiplies in 8 bits forward and unpacks backward; the head stays in 16 bits."""
    wide, half = (
        step(framework="fsdp2", sharding={"zero": 0}, lora={}, precision={"frozen_weights": name})
        for name in ("bf16", "int8")
    )
    ratio = half.worst_memory.parameters_bytes / wide.worst_memory.parameters_bytes
    assert ratio == pytest.approx(0.52, abs=0.01)
    assert half.breakdown_s["memory-bound kernels"] > wide.breakdown_s["memory-bound kernels"]
