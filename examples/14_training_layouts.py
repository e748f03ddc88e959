"""Compare a training step in four layouts: its time, MFU, bubble and memory."""

import windtunnel as wt
from windtunnel.training.job import TrainingParallelism

LAYOUTS = {
    "tensor": TrainingParallelism(tp=8, pp=4),
    "pipeline": TrainingParallelism(tp=4, pp=8),
    "interleaved": TrainingParallelism(tp=4, pp=8, virtual_stages=5),
    "context": TrainingParallelism(tp=4, pp=4, cp=2, virtual_stages=5),
}

for name, parallelism in LAYOUTS.items():
    job = wt.TrainingJob(
        model="meta-llama/Llama-3.1-70B",
        device="h100_sxm",
        num_devices=64,
        sequence_tokens=8192,
        global_batch=128,
        parallelism=parallelism,
    )
    result = wt.simulate_training(job)
    memory = result.worst_memory.needed_bytes / 2**30
    print(f"{name:12} {result.step_s:5.1f} s, MFU {result.mfu:5.1%}, bubble {result.bubble_fraction:5.1%}, ", end="")
    print(f"{memory:3.0f} GiB on the fullest device {'fits' if result.fits else 'does not fit'}")
