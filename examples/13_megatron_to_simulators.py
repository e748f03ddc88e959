"""List what one rank of a Megatron-LM command sends in a step; write the job as a SimAI workload and Chakra traces."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from windtunnel.formats.chakra.trace import ChakraKind, read_trace
from windtunnel.formats.chakra.training import write_training_traces
from windtunnel.formats.job_files import job_contents
from windtunnel.formats.megatron.read import read_megatron_arguments
from windtunnel.formats.simai.training import training_workload
from windtunnel.formats.simai.workload import workload_text
from windtunnel.training.layers.part import Task
from windtunnel.training.setup import resolve

COMMAND = """
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 2048 --num-attention-heads 16 --swiglu
  --ffn-hidden-size 5504 --seq-length 4096 --micro-batch-size 1 --global-batch-size 16 --vocab-size 32000 --bf16
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
""".replace("\n", " ")


def one_microsecond(task: Task) -> float:
    """Price every task; `windtunnel workload --write simai` uses the prices of `windtunnel train`."""
    return 1e-6 * task.count


setup = resolve(read_megatron_arguments(COMMAND, "h100_sxm").job)

print("group      collective      ranks        bytes  calls")
for call in job_contents(setup, device=0).calls:
    print(f"{call.group:9}  {call.operation:14}  {call.group_size:5}  {call.size_bytes:11,}  {call.num_calls:5}")

workload = training_workload(setup, one_microsecond, device=0)
print(f"\n{workload.num_layers} lines for SimAI, beginning with:")
print(workload_text(workload).splitlines()[0])

with TemporaryDirectory() as folder:
    *traces, groups = write_training_traces(setup, one_microsecond, Path(folder) / "job")
    kinds = Counter(node.kind for node in read_trace(traces[0]).nodes)
    counts = ", ".join(f"{kinds[kind]} {ChakraKind(kind).name.lower()}" for kind in sorted(kinds))
    print(f"\n{len(traces)} Chakra traces and {groups.name}; rank 0 has {counts} nodes")
