"""Show where one decode step of a mixture-of-experts model spends its time, and the source of each time."""

import windtunnel as wt
from windtunnel.serving.explain import explain_step, step_batch

setup = wt.resolve(
    wt.scenario(
        model="openai/gpt-oss-120b", device="h100_sxm", tp=2, concurrency=64, input_tokens=2048, output_tokens=256
    )
)
step = explain_step(setup, step_batch(decode_requests=64, context_tokens=2048))

print(f"{step.step_s * 1e3:.1f} ms, bound by {step.bound_by}; {step.memory.kv_tokens:,} tokens of KV cache")
for launch in sorted(step.launches, key=lambda launch: -launch.total_s)[:5]:
    share, of_bandwidth = launch.total_s / step.device_s, launch.bandwidth_fraction
    print(f"{launch.name:24}{launch.count:4.0f} x {launch.each_s * 1e6:6.1f} us {share:6.1%} of the step, ", end="")
    print(f"{of_bandwidth:5.1%} of the peak bandwidth ({launch.coverage})")
