"""TensorRT-LLM's two capacity policies: one never pauses a request, the other fills the memory."""

import pytest

import windtunnel as wt


def simulated(scheduler: str) -> wt.Result:
    return wt.simulate(
        wt.scenario(
            model="llama-3.1-8b",
            device="h100_sxm",
            engine="trtllm",
            scheduler=scheduler,
            concurrency=64,
            num_requests=128,
            input_tokens=1000,
            output_tokens=1000,
            settings={
                "deployment.engine.num_gpu_blocks": 1500,
                "deployment.engine.block_size": 32,
                "deployment.engine.cudagraph_padding": True,
            },
        )
    )


@pytest.mark.full
def test_max_utilization_runs_more_at_once_and_pauses_them() -> None:
    """1,500 blocks of 32 tokens hold 23 requests to their end, and 46 at their beginning."""
    guaranteed, greedy = simulated("trtllm"), simulated("trtllm_max_utilization")
    assert guaranteed.summary.utilisation.num_preemptions == 0
    assert greedy.summary.utilisation.num_preemptions > 0
    assert guaranteed.steps["num_running"].max() == 1500 // -(-2000 // 32) == 23
    assert greedy.steps["num_running"].max() > 40
    assert greedy.summary.span_s < guaranteed.summary.span_s
    for result in (guaranteed, greedy):
        assert result.summary.checks is not None
        assert result.summary.checks.passed
