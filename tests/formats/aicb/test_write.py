"""AICB's files, byte for byte, and what is refused."""

import gzip
from pathlib import Path

import pytest

from recorded import entries
from windtunnel.errors import InputError
from windtunnel.formats.aicb.arguments import read_command
from windtunnel.formats.aicb.csv_records import read_records, records_text
from windtunnel.formats.aicb.write import GeneratedFile, generate
from windtunnel.formats.simai.workload import read_workload, workload_text

MEGATRON = "python -m workload_generator.generate_megatron_workload"
SIMAI = "python -m workload_generator.SimAI_training_workload_generator"
ZERO = "python -m workload_generator.generate_deepspeed_stage1_2_workload --frame=DeepSpeed"
ZERO3 = "python -m workload_generator.generate_deepspeed_stage3_workload --frame=DeepSpeed"
SCRIPT = "sh scripts/megatron_workload_with_aiob.sh"
INFERENCE = "sh scripts/inference_workload_with_aiob.sh"


def made(command: str, times: Path | None = None) -> GeneratedFile:
    return generate(read_command(command), times)


def lines(command: str, times: Path | None = None) -> list[str]:
    return made(command, times).text.splitlines()


def layer(rows: list[str], name: str) -> list[str]:
    """The columns of the first line of that name."""
    return next(line for line in rows if line.startswith(f"{name}\t")).split("\t")


def refused(command: str) -> str:
    with pytest.raises(InputError) as caught:
        made(command)
    return f"{caught.value.message}; {caught.value.hint}"


@pytest.mark.parametrize("name", entries("aicb/*/command.txt"))
def test_every_recorded_file_is_written_byte_for_byte(reference: Path, name: str) -> None:
    folder = reference / "aicb" / name
    command = (folder / "command.txt").read_text()
    files = list(folder.glob("*.gz"))
    if not files:  # AICB crashed
        refused(command)
        return
    generated = made(command, reference / "aicb" / "aiob_Example.txt" if "comp_filepath" in command else None)
    assert f"{generated.name}.gz" == files[0].name
    assert generated.text == gzip.decompress(files[0].read_bytes()).decode()


def test_recorded_files_are_read_and_written_back(reference: Path) -> None:
    for file in sorted((reference / "aicb").glob("*/*.gz")):
        text = gzip.decompress(file.read_bytes()).decode()
        if file.name.endswith(".txt.gz"):
            assert workload_text(read_workload(file)) == text
        elif not file.name.startswith("vidur"):
            assert records_text(read_records(file)) == text


# Recorded runs of AICB whose files are not kept with the others; their figures are.


def test_pipeline_stage_steps_twice_with_parameters_divided_twice() -> None:
    rows = lines(
        f"{MEGATRON} --world_size=1024 --tensor_model_parallel_size=8 --pipeline_model_parallel=8 --global_batch=1536 "
        "--num_layers=96 --hidden_size=12288 --num_attention_heads=96 --vocab_size=50257 --enable_sequence_parallel "
        "--use-distributed-optimizer"
    )
    assert len(rows) == 1 + 12_116
    assert sum(",1568366592,step," in line for line in rows) == 2


@pytest.mark.parametrize(
    ("world", "layers", "hidden", "width", "heads", "num_lines", "num_reduces"),
    [(128, 32, 4096, 11008, 32, 450, 141), (16384, 80, 8192, 22016, 64, 17_402, 16_544)],
)
def test_contiguous_gradients_go_to_the_ranks_that_keep_them(
    world: int, layers: int, hidden: int, width: int, heads: int, num_lines: int, num_reduces: int
) -> None:
    rows = lines(
        f"{ZERO} --stage=2 --contiguous_gradients --world_size={world} --global_batch={world} --num_layers={layers} "
        f"--hidden_size={hidden} --ffn_hidden_size={width} --num_attention_heads={heads}"
    )
    reduces = [line.split(",") for line in rows if line.startswith("CommType.reduce,")]
    assert (len(rows), len(reduces)) == (num_lines, num_reduces)
    parameters = sum(int(line.split(",")[3]) for line in rows if ",init," in line)
    assert sum(int(fields[3]) for fields in reduces) == parameters
    assert {int(fields[5]) for fields in reduces} == set(range(world))


def test_a_range_that_begins_where_a_rank_ends_sends_that_rank_nothing() -> None:
    # Elements: embedding 8, a layer of 2, 4 x 4, 2, 3 x 2 = 26, norm 2, head 8: 44, so 4 ranks keep 11 each. The
    # bucket is so small that every parameter flushes the one before it; one begins at 22.
    rows = lines(
        f"{ZERO} --stage=2 --contiguous_gradients --world_size=4 --global_batch=4 --num_layers=1 --hidden_size=2 "
        "--ffn_hidden_size=1 --num_attention_heads=1 --vocab_size=4 --reduce_bucket_size=1"
    )
    reduces = [
        tuple(map(int, (fields[3], fields[5])))
        for fields in (line.split(",") for line in rows)
        if fields[0] == "CommType.reduce"
    ]
    assert (0, 1) in reduces
    assert sum(size for size, _ in reduces) == 2 * 44


def reduced(elements: list[int], num_ranks: int, bucket_size: int, num_microbatches: int) -> list[tuple[int, int]]:
    """Bytes and rank of every reduction, parameter by parameter: those that one rank keeps in turn are one."""
    part, kept, start = -(-sum(elements) // num_ranks), [], 0
    for size in elements:
        first = max(start - 1, 0) // part if start % part == 0 else start // part
        ranks = range(first, (start + size - 1) // part + 1)
        kept.append([(rank, max(start, rank * part), min(start + size, (rank + 1) * part)) for rank in ranks])
        start += size
    bucket: list[int] = []
    found = []

    def flush() -> None:
        shares: list[tuple[int, int, int]] = []
        for rank, low, high in (share for position in reversed(bucket) for share in kept[position]):
            low = shares.pop()[1] if shares and shares[-1][0] == rank else low
            shares.append((rank, low, high))
        found.extend((2 * (high - low), rank) for rank, low, high in shares)
        bucket.clear()

    for position in [*reversed(range(len(elements)))] * num_microbatches:
        if elements[position] + sum(elements[other] for other in bucket) > bucket_size:
            flush()
        bucket.append(position)
    flush()
    return found


@pytest.mark.parametrize("bucket_size", [1, 9, 30, 70, 1000])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_gradients_that_wait_for_the_next_micro_batch_stay_in_the_world(
    bucket_size: int, num_microbatches: int
) -> None:
    rows = lines(
        f"{ZERO} --stage=2 --contiguous_gradients --world_size=4 --global_batch={4 * num_microbatches} --num_layers=2 "
        f"--hidden_size=2 --ffn_hidden_size=1 --num_attention_heads=1 --vocab_size=4 --reduce_bucket_size={bucket_size}"
    )
    fields = [line.split(",") for line in rows]
    elements = [int(each[3]) // 2 for each in fields if each[0] == "CommType.broadcast"]
    reduces = [(int(each[3]), int(each[5])) for each in fields if each[0] == "CommType.reduce"]
    assert reduces == reduced(elements, 4, bucket_size, num_microbatches)
    assert {rank for _, rank in reduces} == {0, 1, 2, 3}


def test_recomputation_without_sequence_parallelism_doubles_flash_attention_only(reference: Path) -> None:
    command = (
        f"{SIMAI} --world_size=32 --tensor_model_parallel_size=2 --global_batch=64 --num_layers=2 --aiob_enable "
        "--comp_filepath there.txt"
    )
    times = reference / "aicb" / "aiob_Example.txt"
    plain, again = (
        layer(lines(command, times), "attention_layer"),
        layer(lines(f"{command} --recompute_activations", times), "attention_layer"),
    )
    assert int(again[2]) - int(plain[2]) == 512_000
    assert again[3:5] == plain[3:5]


def test_scripts_presets_override_what_is_typed() -> None:
    generated = made(
        f"{SCRIPT} -m moe --world_size 512 --tensor_model_parallel_size 2 --sp --ep 8 --experts 8 --topk 2"
    )
    assert generated.name.startswith(
        "None-Mixtral_8*7B-world_size512-tp4-pp1-ep8-gbs1024-mbs1-seq4096-MOE-True-GEMM-True"
    )
    assert generated.remarks == ("the script's model moe sets --tensor_model_parallel_size 4 over 2",)


def test_the_script_of_lists_takes_its_nodes_as_torchrun_does() -> None:
    typed = "-m 13 --tensor_model_parallel_size 4 --nproc_per_node 8 --workload_only"
    launched = "--nnodes 2 --node_rank 0 --master_addr localhost --master_port 29500"
    assert (
        made(f"sh scripts/megatron_gpt.sh {launched} {typed}").text
        == made(f"WORLD_SIZE=2 sh scripts/megatron_gpt.sh {typed}").text
    )


def test_the_script_of_lists_makes_its_world_and_batch_itself() -> None:
    """The batch is two micro-batches of the world that is typed, the list that of nodes times GPUs."""
    typed = "-m 13 --world_size 8 --tensor_model_parallel_size 4 --global_batch 9 --swiglu"
    generated = made(f"WORLD_SIZE=2 sh scripts/megatron_gpt.sh {typed} --nproc_per_node 8 --workload_only")
    direct = made(
        f"{MEGATRON} --model_name=gpt_13B --world_size=16 --tensor_model_parallel_size=4 --global_batch=4 "
        "--num_layers=40 --hidden_size=5120 --num_attention_heads=40 --seq_length=2048 --vocab_size=50257 --swiglu "
        "--use-distributed-optimizer"
    )
    assert (generated.name, generated.text) == (direct.name, direct.text)
    assert generated.remarks == ("the script sets --world_size 16 over 8", "the script sets --global_batch 4 over 9")


def test_deepseek_671b_has_1451_lines(reference: Path) -> None:
    rows = lines(
        f"{SCRIPT} -m deepseek671 --world_size 2048 --sp --ep 64 --topk 8 --moe_enable --frame DeepSeek "
        "--global_batch 4096 --swiglu --aiob_enable --comp_filepath there.txt",
        reference / "aicb" / "aiob_Example.txt",
    )
    assert rows[1] == "1451"


@pytest.mark.parametrize(
    ("options", "dispatch", "combine"),
    [
        ("-m deepseek-671B", 1_892_352, 3_670_016),
        ("-m deepseek-671B -p prefill -s 4096", 242_221_056, 469_762_048),
        ("-m qwen3-235B -p prefill -b 4 -w 32 -e 32", 34_603_008, 67_108_864),
        ("-m qwen3-235B -t 4", 270_336, 524_288),
        ("-m qwen3-next-80B", 675_840, 1_310_720),
        ("-m qwen3-next-80B -p prefill", 21_626_880, 41_943_040),
    ],
)
def test_tokens_sent_to_experts_in_inference(options: str, dispatch: int, combine: int) -> None:
    rows = lines(f"{INFERENCE} {options}")
    assert layer(rows, "moe_route")[3:5] == ["ALLTOALL_EP", str(dispatch)]
    assert layer(rows, "moe_expert")[3:5] == ["ALLTOALL_EP", str(combine)]


def test_tables_for_vidur_add_up_a_layers_modules() -> None:
    command = "python -m workload_generator.Vidur_workload_generator Qwen3-Moe-235B qwen3_moe_default.json"
    rows = lines(
        f"{command} --world_size 8 --expert_model_parallel_size 8 --tensor_model_parallel_size 4 --micro_batch 32"
    )
    assert rows[:3] == ["layer_id\tlayer_name\tcomp_time\tcomm_size", "0\tattention\t2\t262144", "0\tmoe\t3\t794624"]
    assert len(rows) == 1 + 2 * 94


def test_inference_times_reach_their_modules(tmp_path: Path) -> None:
    times = tmp_path / "times.txt"
    section = "{}:\n    time_gpu_max: 9\n    time_gpu_min: 1\n    time_gpu_avg: {}\n"
    sections = [("atten_qkv", 3), ("atten_flash", 4), ("mlp_up", 5), ("moe_route", 6), ("moe_up_gate", 7.5)]
    times.write_text("inference_term:decode\n" + "".join(section.format(*names) for names in sections))
    rows = lines(f"{INFERENCE} -m deepseek-671B", times)
    assert layer(rows, "attention_layer")[2] == "7000"
    assert layer(rows, "shared_experts")[2] == layer(rows, "dense_mlp")[2] == "5000"
    assert layer(rows, "moe_expert")[2] == "7500"
    assert layer(rows, "moe_route")[2] == "1"  # AICB does not look it up for DeepSeek


def test_a_batch_too_small_for_one_micro_batch_makes_none_and_is_told() -> None:
    generated = made(f"{SIMAI} --world_size=64 --global_batch=32 --num_layers=2")
    assert "\ncross_entropy1\t" in generated.text
    assert "attention" not in generated.text
    assert "AICB makes 0 microbatches of it" in generated.remarks[0]


def test_gradient_accumulation_costs_no_time_and_no_records() -> None:
    generated = made(f"{SIMAI} --world_size=8 --global_batch=8192 --num_layers=2")
    assert generated.text.count("attention_layer") == 1024 * 2


def test_prefixes_and_both_spellings_of_arguments_are_understood() -> None:
    short = read_command(f"{ZERO3} --seq_len=64 --pipeline_model_parallel_size 2 --world=4 --dtype float16")
    assert (short.arguments.seq_length, short.arguments.pipeline_model_parallel) == (64, 2)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("python train.py", "does not run a generator of AICB"),
        ("python -m workload_generator.generate_megatron_worklod", "did you mean generate_megatron_workload"),
        (f"{MEGATRON} --world_size=banana", "invalid int value: 'banana'"),
        (f"{MEGATRON} --word_size=8", "AICB refuses the command: unrecognized arguments: --word_size=8"),
        (f"{MEGATRON} --world_size=6 --tensor_model_parallel_size=4", "6 is not a multiple of"),
        (f"{MEGATRON} --world_size=0", "--world_size is 0; at least 1 is needed"),
        (f"{MEGATRON} --moe_enable", "--moe_enable needs --enable_sequence_parallel"),
        (
            f"{MEGATRON} --world_size=3 --tensor_model_parallel_size=3",
            "the output of mlp_column, 4096, is not a multiple",
        ),
        (f"{ZERO} --stage=1 --amp_enabled", "AICB fails with UnboundLocalError"),
        (f"{ZERO} --stage=4", "--stage is 4; it is 1, 2 or 3"),
        (f"{SIMAI} --frame=DeepSeek --enable_sequence_parallel --moe_enable --num_experts=4", "AttributeError"),
        (f"{MEGATRON} --frame=Megaton", "did you mean Megatron?"),
        (f"{SIMAI} --aiob_enable", "give it --comp_filepath"),
        (f"{SIMAI} --aiob_enable --comp_filepath=/no/such/file", "there is no file /no/such/file"),
        (f"{SCRIPT} -m 14", "the script has no model '14'"),
        (f"{SCRIPT} --world_size=64", "it reads --name value, not --name=value"),
        (f"{SCRIPT} --world_size", "a value is missing after --world_size"),
        (f"{SCRIPT} --world_size many", "--world_size is 'many'; a whole number is needed"),
        ("sh scripts/megatron_gpt.sh -m 13", "asks the machine"),
        ("sh scripts/megatron_gpt.sh -m 13 --nproc_per_node 8", "without --workload_only"),
        ("sh scripts/megatron_gpt.sh -m 13 --nproc_per_node many --workload_only", "a whole number is needed"),
        ("sh scripts/deepspeed_llama.sh -m 13", "asks the machine"),
        (f"{INFERENCE} -m llama", "the script has no model 'llama'"),
        (f"{INFERENCE} -p warmup", "--phase is 'warmup'"),
        (f"{INFERENCE} -t 16", "tensor and expert parallelism need at least 16"),
        (f"{INFERENCE} -c /no/such/config.json", "there is no file /no/such/config.json"),
        ("python -m workload_generator.SimAI_inference_workload_generator Llama x.json", "AICB has no inference model"),
        ("python -m workload_generator.generate_collective_test --test_comm=allreduce", "--test_comm is 'allreduce'"),
        ("python -m workload_generator.generate_collective_test --begin_size=0", "for ever"),
        ("python -m 'unfinished", "this is no shell command"),
    ],
)
def test_commands_that_are_refused(command: str, message: str) -> None:
    assert message in refused(command)
