"""Find the load that one device sustains, the slowest operator of a step, and the time of a training step.

Each answer is one call. In a notebook, the last line of a cell shows a result as its report.
"""

import windtunnel as wt

chat = wt.scenario(
    model="llama-3.1-8b", device="h100_sxm", rate_per_s=4, input_tokens=512, output_tokens=128, num_requests=200
)

loads = wt.capacity(chat, slo="ttft_p90=500ms,tpot_p99=20ms", num_streams=1)
print(
    f"one H100 sustains {loads.load:.0f} requests/s; above that, {loads.streams[0].beyond.limited_by} exceeds its limit"
)

step = wt.explain(chat, batch=64, context=576)
slowest = max(step.launches, key=lambda launch: launch.total_s)
print(f"a decode step of 64 requests takes {step.step_s * 1e3:.1f} ms; most of it is {slowest.name}")

training = wt.train(
    model="llama-3.1-8b", device="h100_sxm", num_devices=16, tp=2, sequence_tokens=4096, global_batch=64
)
print(f"a training step on 16 H100 takes {training.step_s:.1f} s at an MFU of {training.mfu:.0%}")

html = loads._repr_html_()  # what a notebook shows where `loads` is the last line of a cell
print(f"its report is a fragment of HTML: {html[:35]}...")
