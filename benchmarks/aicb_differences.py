"""Print docs/reference/aicb-differences.md: what AICB's workloads contain, what is correct, and the cause.

python benchmarks/aicb_differences.py > docs/reference/aicb-differences.md
"""

from collections import Counter
from collections.abc import Iterator

from windtunnel.formats.aicb.arguments import TrainingArguments, read_command
from windtunnel.formats.aicb.csv_records import RecordList
from windtunnel.formats.aicb.deepspeed import zero_records
from windtunnel.formats.aicb.job import job_of
from windtunnel.formats.aicb.megatron import megatron_records
from windtunnel.formats.aicb.model import aicb_model
from windtunnel.formats.aicb.simai import simai_training
from windtunnel.formats.simai.workload import SimaiWorkload, meaning
from windtunnel.model.operators import Collective
from windtunnel.model.parameters import count_parameters
from windtunnel.model.shape import ModelSpec
from windtunnel.training.program import device_program
from windtunnel.training.setup import resolve
from windtunnel.units import format_bytes

SIMAI = "python -m workload_generator.SimAI_training_workload_generator --use-distributed-optimizer"
MEGATRON = "python -m workload_generator.generate_megatron_workload --use-distributed-optimizer"
ZERO = "python -m workload_generator.generate_deepspeed_stage1_2_workload --frame=DeepSpeed"
ZERO3 = "python -m workload_generator.generate_deepspeed_stage3_workload --frame=DeepSpeed"
GPT_13B = "--num_layers=40 --hidden_size=5120 --num_attention_heads=40 --vocab_size=50257 --seq_length=4096"
GPT_175B = "--num_layers=96 --hidden_size=12288 --num_attention_heads=96 --vocab_size=50257 --seq_length=2048"
MIXTRAL = (
    "--num_layers=32 --hidden_size=4096 --num_attention_heads=32 --ffn_hidden_size=14336 --vocab_size=32000 --swiglu "
    "--seq_length=4096 --moe_enable --num_experts=8 --moe_router_topk=2 --moe_grouped_gemm"
)
LLAMA_7B = "--num_layers=32 --hidden_size=4096 --ffn_hidden_size=11008 --num_attention_heads=32 --seq_length=2048"

CASES = {
    "SimAI workload, GPT 13B, tp 8 with sequence parallelism, 16 GPUs, no times": (
        f"{SIMAI} --world_size=16 --tensor_model_parallel_size=8 --global_batch=4 {GPT_13B} --enable_sequence_parallel"
    ),
    "SimAI workload, GPT 13B, tp 8 without sequence parallelism, 16 GPUs, with times": (
        f"{SIMAI} --world_size=16 --tensor_model_parallel_size=8 --global_batch=4 {GPT_13B} --aiob_enable"
    ),
    "SimAI workload, Mixtral 8x7B, tp 2, ep 8, 64 GPUs, with times": (
        f"{SIMAI} --world_size=64 --tensor_model_parallel_size=2 --expert_model_parallel_size=8 --global_batch=64 "
        f"{MIXTRAL} --enable_sequence_parallel --aiob_enable"
    ),
    "List, GPT 175B, tp 8, pp 8 with sequence parallelism, 1,024 GPUs, first stage": (
        f"{MEGATRON} --world_size=1024 --tensor_model_parallel_size=8 --pipeline_model_parallel=8 --global_batch=256 "
        f"{GPT_175B} --enable_sequence_parallel"
    ),
    "List, Mixtral 8x7B, tp 2, ep 8, 64 GPUs": (
        f"{MEGATRON} --world_size=64 --tensor_model_parallel_size=2 --expert_model_parallel_size=8 --global_batch=64 "
        f"{MIXTRAL} --enable_sequence_parallel"
    ),
    "List, LLaMA 7B, ZeRO-1, 128 GPUs, two microbatches": (
        f"{ZERO} --stage=1 --world_size=128 --micro_batch=4 --global_batch=1024 {LLAMA_7B}"
    ),
    "List, LLaMA 7B, ZeRO-3, 128 GPUs": (
        f"{ZERO3} --stage=3 --world_size=128 --micro_batch=4 --global_batch=512 {LLAMA_7B}"
    ),
}

REASONS = (
    (
        "Parameters",
        "The embedding has four times its rows; the position table has one row per token of the sequence",
        "`V h / tp`",
        "the 4 bytes of an element are taken for 4 elements (aicb issue 10)",
    ),
    (
        "Parameters",
        "Gated feed-forward networks and experts have two matrices",
        "three matrices",
        "`--swiglu` changes only the width",
    ),
    (
        "Parameters",
        "Keys and values have as many heads as queries; no router",
        "grouped queries; a router on every rank",
        "AICB has no argument for either",
    ),
    (
        "Parameters",
        "Every pipeline stage has the embedding and the head",
        "only the first has the embedding, only the last the head",
        "one stage is built and used for all",
    ),
    (
        "Parameters",
        "DeepSeek's dense layers are as wide as one expert; its presets use the dense width as the hidden size",
        "their own width; 7168, 5120 and 2048",
        "one argument sets both; presets in megatron_workload_with_aiob.sh",
    ),
    (
        "Parameters",
        "DeepSeek's shared experts, however many, count as one expert twice",
        "each counts once",
        "the shared expert is listed both among the experts and as matrices",
    ),
    (
        "SimAI, tensor parallel",
        "With times: the backward pass sends nothing; with sequence parallelism a column's gradient has 0 bytes",
        "per layer, two all-reduces, or two reduce-scatters, two all-gathers and two gathers of kept inputs",
        "the sizes are set to 0, the second collective is dropped (SimAI issues 123 and 292)",
    ),
    (
        "SimAI, tensor parallel",
        "Without times: the backward pass of sequence parallelism sends nothing; one rank alone all-reduces",
        "as above; nothing on one rank",
        "the generator was copied and the copies diverged",
    ),
    (
        "SimAI, tensor parallel",
        "The embedding is all-reduced under sequence parallelism",
        "reduce-scattered",
        "Megatron-Core, `VocabParallelEmbedding`",
    ),
    (
        "SimAI, tensor parallel",
        "Gradients of norms: an all-reduce of the whole model, and without sequence parallelism",
        "of the norms only, with sequence parallelism only",
        "`total_params` is used as the norms' parameters",
    ),
    (
        "SimAI, tensor parallel",
        "Without times: an all-reduce of the embedding at every microbatch",
        "none; once per step if the embedding is tied over stages",
        "the tied embedding's reduction is inside the loop",
    ),
    (
        "SimAI, loss",
        "Three all-reduces once, on every stage",
        "at every microbatch, on the last stage",
        "they are after the loop",
    ),
    (
        "SimAI, data parallel",
        "Without times: parameters are gathered over tp; experts are reduced with the dense weights and again apart",
        "gathered over the data-parallel group; reduced once",
        "a collective's name without a suffix means another group in the forward column",
    ),
    (
        "SimAI, data parallel",
        "Gradient reduction is listed first, which SimAI runs last",
        "at the layers of the last microbatch, where it overlaps",
        "no computation is left to overlap with",
    ),
    (
        "SimAI, experts",
        "Token counts are gathered over the tensor-parallel group, one message per layer",
        "they are sent with the dispatched tokens and left out here: a few bytes per layer",
        "a comment says that this is the experts' group",
    ),
    (
        "SimAI, header",
        "`vpp` is the number of layers",
        "the number of virtual stages",
        "SimAI divides the pipeline's bubble by `vpp`",
    ),
    (
        "SimAI, times",
        "Backward equals forward; recomputation doubles a message, or attention twice; DeepSeek's attention takes 0 ns",
        "each pass is priced by its operators",
        "AICB has one table of forward times",
    ),
    (
        "List, pipeline",
        "The optimizer steps twice, on parameters divided by the stages twice; no loss; messages are not divided by tp",
        "once, on the stage's parameters; loss on the last stage; `T / tp` with sequence parallelism",
        "`step()` is called in both branches; layers were divided before",
    ),
    ("List, pipeline", "Only the first stage", "any stage, `--stage N`", "a list without a process group uses rank 0"),
    (
        "List, experts",
        "No backward pass",
        "dispatch and combine again",
        "the backward pass is computed but its result is not kept",
    ),
    (
        "List, head",
        "No output layer; attention comes before the feed-forward network in both passes",
        "an output layer on the last stage; the reverse order in the backward pass",
        "the model calls only its layers",
    ),
    (
        "List, products",
        "A column-parallel matrix under sequence parallelism has tp times its tokens",
        "the tokens of the gathered sequence, once",
        "the gathered length is multiplied again",
    ),
    ("List, norms", "0 bytes", "`2 h` per layer", "no parameter is marked as part of a norm"),
    (
        "List, ZeRO",
        "Stages 1 and 2 reduce at every microbatch; embeddings are matrix products",
        "stage 1 reduces once; embeddings are look-ups",
        "the reduction does not check for the last microbatch",
    ),
    (
        "Inference",
        "A prefill is one sequence for any batch; no embedding, no head, no shared expert of Qwen3-Next",
        "`windtunnel simulate` and `explain`",
        "`m` is the sequence length in a prefill",
    ),
    (
        "Batch",
        "A batch that does not divide is rounded down, if too small to zero",
        "an error that names the relation",
        "the assertion is commented out",
    ),
)


def in_workload(workload: SimaiWorkload) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for layer in workload.layers():
        for phase, is_weight in ((layer.forward, False), (layer.input_gradient, False), (layer.weight_gradient, True)):
            said = meaning(phase.collective, is_weight)
            if said:
                found[said[1], said[0]] += phase.size_bytes
    return found


def in_list(records: RecordList) -> Counter[tuple[str, str]]:
    """Of the step; what is exchanged before it is left out."""
    found: Counter[tuple[str, str]] = Counter()
    for record in records.records():
        if record.kind in ("computation", "epoch_end", "barrier") or record.stage.startswith("init"):
            continue
        kind = {"isend": "send", "irecv": "receive"}.get(record.kind, record.kind)
        group = {"ep_dp_group": "dp_ep"}.get(str(record.group), str(record.group).removesuffix("_group"))
        assert not isinstance(record.size, tuple)
        found[group, kind] += round(record.size)
    return found


def in_aicb(generator: str, arguments: TrainingArguments) -> Counter[tuple[str, str]]:
    if generator.startswith("SimAI"):
        # Sizes do not depend on the times.
        return in_workload(simai_training(arguments, {} if arguments.aiob_enable else None))
    if generator == "generate_megatron_workload":
        return in_list(megatron_records(arguments))
    return in_list(zero_records(arguments, generator))


def in_graph(arguments: TrainingArguments, has_messages: bool) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for action in device_program(resolve(job_of(arguments, "h100_sxm")), 0):
        for message in (action.receives, action.sends) if has_messages else ():
            if message:
                found["pp", "send" if message.is_send else "receive"] += round(message.size_bytes)
        for task in action.tasks:
            if isinstance(task.op, Collective):
                group = {"experts_dp": "dp_ep", "experts_tp": "tp"}.get(str(task.group), str(task.group))
                found[group, task.op.op] += round(float(task.op.message_bytes) * task.count)
    return found


def case_table(command: str) -> Iterator[str]:
    found = read_command(command)
    assert isinstance(found.arguments, TrainingArguments)
    theirs = in_aicb(found.generator, found.arguments)
    ours = in_graph(found.arguments, has_messages=not found.generator.startswith("SimAI"))
    yield "| group | collective | AICB | correct | AICB / correct |"
    yield "|---|---|---:|---:|---:|"
    for key in sorted(theirs | ours, key=lambda key: -max(theirs[key], ours[key])):
        group, operation = key
        if max(theirs[key], ours[key]) < 1024:
            continue
        ratio = f"{theirs[key] / ours[key]:.3g}" if ours[key] else "-"
        yield f"| {group} | {operation} | {format_bytes(theirs[key])} | {format_bytes(ours[key])} | {ratio} |"


def parameter_table() -> Iterator[str]:
    yield "| run | AICB | correct | AICB / correct |"
    yield "|---|---:|---:|---:|"
    for name, command in {
        "GPT 13B": f"{SIMAI} {GPT_13B}",
        "GPT 175B": f"{SIMAI} {GPT_175B}",
        "Mixtral 8x7B": f"{SIMAI} {MIXTRAL} --enable_sequence_parallel",
    }.items():
        arguments = read_command(command).arguments
        assert isinstance(arguments, TrainingArguments)
        theirs = aicb_model(arguments).num_parameters
        model = job_of(arguments, "h100_sxm").model
        assert isinstance(model, ModelSpec)
        positions = arguments.seq_length * arguments.hidden_size
        ours = count_parameters(model).total + positions
        yield f"| {name} | {theirs / 1e9:.2f} billion | {ours / 1e9:.2f} billion | {theirs / ours:.3g} |"


def page() -> str:
    lines = [
        "<!-- Printed by benchmarks/aicb_differences.py. -->",
        "",
        "# Where AICB's workloads are wrong",
        "",
        "This page lists the differences between AICB's workloads and what the frameworks do. To compare with results",
        "made with AICB, use `windtunnel workload --compat aicb`, which writes the files of",
        "[AICB](https://github.com/aliyun/aicb) 23eec3c byte for byte. Without `--compat`, the same command, or any",
        "job, gives the correct workload.",
        "",
        "Bytes are those of one rank and one step, by group. Sizes are defined as in NCCL: the whole logical tensor. A",
        "correct list includes Megatron's gathers of kept inputs in the backward pass, which overlap with computation.",
        "",
        "## Differences and their causes",
        "",
        "| part | AICB | correct | cause |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in REASONS),
        "",
        "## Parameters",
        "",
        "Parameters of the whole model at tp 1, pp 1, including position tables. The correct counts use the same",
        "arguments: Mixtral has no grouped queries, because AICB has no argument for them.",
        "",
        *parameter_table(),
        "",
        "## Bytes",
    ]
    for title, command in CASES.items():
        lines += ["", f"{title}:", "", *case_table(command)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
