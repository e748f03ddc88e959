"""Read a profile and show its time by class of kernel, and the share of communication that computation hides."""

import json
from pathlib import Path

from windtunnel.formats.captures.capture import read_capture
from windtunnel.formats.captures.kernel_time import class_time, device_time, kernel_table


def kernel(name: str, start_us: float, duration_us: float, stream: int) -> dict[str, object]:
    place = {"device": 0, "stream": stream}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start_us, "dur": duration_us, "args": place}


# One layer of a decode step on one of four GPUs, as torch.profiler writes it. Nsight Systems exports work the same way.
layer = [
    kernel("fused_add_rms_norm_kernel", 0, 3, 7),
    kernel("nvjet_tst_64x64", 3, 21, 7),
    kernel("flash_fwd_splitkv_kernel", 24, 15, 7),
    kernel("nvjet_tst_64x32", 39, 12, 7),
    kernel("ncclDevKernel_AllReduce_Sum_bf16", 45, 14, 20),
    kernel("nvjet_tst_128x64", 70, 40, 7),
]
Path("trace.json").write_text(json.dumps({"traceEvents": layer}))

capture = read_capture(Path("trace.json"))
for name, seconds in class_time(capture).items():
    print(f"{name:15}{seconds * 1e6:6.1f} us")

device = device_time(capture)[0]
print(f"\nbusy {device.busy_s / device.span_s:.0%}, longest gap {device.gaps_s.max() * 1e6:.0f} us")
print(f"{device.overlap_fraction:.0%} of the communication is hidden")

kernels = kernel_table(capture)
print(f"\nmost time: {capture.names[kernels['name'][0]]}, {kernels['share'][0]:.0%}")
