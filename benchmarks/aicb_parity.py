"""AICB's recorded files against ours: how many are equal to the byte, and what they cost.

python benchmarks/aicb_parity.py [folder of reference data]
"""

import gzip
import resource
import sys
import time
from pathlib import Path

from reference import REFERENCE
from windtunnel.formats.aicb.arguments import read_command
from windtunnel.formats.aicb.write import generate

# AICB's own seconds and MiB were recorded on a machine of this kind, a process each; ours follow each other in one, so
# that the last peaks contain those before.
LARGE = {
    "SimAI workload, 405B, 2,048 micro-batches (AICB: 13.8 s, 628 MiB)": (
        "python -m workload_generator.SimAI_training_workload_generator --model_name=llama_405B --world_size=16384 "
        "--tensor_model_parallel_size=8 --pipeline_model_parallel=1 --global_batch=4194304 --num_layers=128 "
        "--hidden_size=16384 --ffn_hidden_size=53248 --num_attention_heads=128 --enable_sequence_parallel"
    ),
    "list, 175B, 2,048 micro-batches with products (AICB: 168.7 s, 2,071 MiB)": (
        "python -m workload_generator.generate_megatron_workload --model_name=gpt_175B --world_size=1024 "
        "--tensor_model_parallel_size=8 --pipeline_model_parallel=1 --global_batch=262144 --num_layers=96 "
        "--hidden_size=12288 --num_attention_heads=96 --vocab_size=50257 --enable_sequence_parallel "
        "--computation_enable"
    ),
    "list, LLaMA 65B, ZeRO-2 contiguous, 16,384 GPUs (AICB: 6.5 s, 310 MiB)": (
        "python -m workload_generator.generate_deepspeed_stage1_2_workload --frame=DeepSpeed --stage=2 "
        "--world_size=16384 --global_batch=65536 --micro_batch=4 --num_layers=80 --hidden_size=8192 "
        "--ffn_hidden_size=22016 --num_attention_heads=64 --contiguous_gradients"
    ),
}


def parity(folder: Path) -> tuple[int, int, float]:
    """(equal, files, CPU seconds)."""
    equal, files, commands = 0, 0, sorted(folder.glob("*/command.txt"))
    start = time.process_time()
    for file in commands:
        text = file.read_text()
        for recorded in file.parent.glob("*.gz"):
            made = generate(read_command(text), folder / "aiob_Example.txt" if "comp_filepath" in text else None)
            is_equal = gzip.decompress(recorded.read_bytes()).decode() == made.text
            equal += f"{made.name}.gz" == recorded.name and is_equal
            files += 1
            if not is_equal:
                print(f"{file.parent.name} differs")
    return equal, files, time.process_time() - start


def main() -> int:
    folder = (Path(sys.argv[1]) if len(sys.argv) > 1 else REFERENCE) / "aicb"
    if folder.is_dir():
        equal, files, seconds = parity(folder)
        print(f"{equal} of {files} recorded files equal to the byte, {seconds:.2f} s CPU for all\n")
        assert equal == files
    else:
        print(f"no recorded files at {folder}\n")
    print("| file | lines | CPU | peak memory |\n|---|---:|---:|---:|")
    for name, command in LARGE.items():
        start = time.process_time()
        text = generate(read_command(command)).text
        seconds = time.process_time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"| {name} | {text.count(chr(10)):,} | {seconds:.2f} s | {peak:,.0f} MiB |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
