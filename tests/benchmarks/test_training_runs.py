"""Published training runs: rows become jobs, what says too little is skipped, and predictions stay within budget."""

import csv
from pathlib import Path

import numpy as np
import pytest

from readers.training.runs import TrainingRun, read_training_runs
from windtunnel.errors import InputError
from windtunnel.model.parameters import count_parameters
from windtunnel.model.shape import ModelSpec
from windtunnel.training.setup import resolve
from windtunnel.training.step import simulate_with, training_prices

HEADER = (
    "source,release,task,model,params_B,layers,hidden,heads,accelerator,n_gpus,precision,gbs,mbs,seq_len,"
    "tp,pp,cp,vp,ep,etp,fsdp,act_ckpt,tokens_per_s_per_gpu,tflops_per_gpu,iter_time_s,mem_GB,quality,note\n"
)


def table(folder: Path, *rows: str) -> Path:
    path = folder / "runs.csv"
    path.write_text(HEADER + "\n".join(rows) + "\n")
    return path


def test_a_row_becomes_a_job(tmp_path: Path) -> None:
    row = "NeMo x,,pretrain,LLAMA3-70B,70,,,,H100-SXM5-80GB,64,FP8,128,1,8192,4,8,1,5,,,,,1619,727,,,A,"
    (run,), skipped = read_training_runs(table(tmp_path, row))
    assert not skipped
    at = run.job.parallelism
    assert (at.tp, at.pp, at.virtual_stages, run.job.precision.compute) == (4, 8, 5, "fp8")
    assert run.job.overlap.tensor_parallel is True
    assert run.step_s == pytest.approx(128 * 8192 / (1619 * 64))


def test_the_format_that_a_source_calls_fp8_is_its_own(tmp_path: Path) -> None:
    titan = "torchtitan x,,pretrain,Llama3-8B,8,,,,H100-SXM5-80GB,64,FP8,96,12,8192,8,1,,,,,8,,5000,,,,A,vanilla TP {}"
    rows = (titan.format("tensorwise"), titan.format("rowwise"), bridge(precision="FP8"), bridge(precision="FP8-MX"))
    runs, _ = read_training_runs(table(tmp_path, *rows))
    found = [run.job.precision.compute for run in runs]
    assert found == ["fp8_current", "fp8_rowwise", "fp8_current", "mxfp8"]


def test_mixtures_of_experts_have_what_bridges_recipes_decide(tmp_path: Path) -> None:
    row = (
        "Megatron-Bridge x,{release},pretrain,{model},,,,,{on},256,{format},4096,1,4096,1,{pp},1,{vp},{ep},"
        ",,,1000,,,,A,"
    )
    deepseek = {"release": "26.04", "model": "DeepSeekV3", "format": "MXFP8"}
    rows = (
        row.format(**deepseek, on="DGX-B200", pp=8, vp=2, ep=32),
        row.format(**deepseek, on="DGX-B200", pp=16, vp="", ep=8),
        row.format(**deepseek | {"release": "26.06"}, on="DGX-GB200", pp=4, vp=4, ep=64),
        row.format(release="26.04", model="Qwen3_235B_a22B", format="FP8", on="DGX-H100", pp=8, vp=4, ep=32),
    )
    runs, skipped = read_training_runs(table(tmp_path, *rows))
    assert not skipped
    assert [run.job.overlap.experts for run in runs] == [True, None, True, True]
    assert [run.job.parallelism.experts_exchange for run in runs] == ["by_node", "by_node", "hybrid", "all_to_all"]
    assert runs[1].job.recompute.modules == ("latent_up_projection",)
    for run in runs:
        resolve(run.job)
    assert [run.job.mtp_layers for run in runs] == [1, 1, 1, 0]
    assert runs[1].job.parallelism.layers_per_stage == (*[4] * 15, 1)


def test_the_recipes_of_an_early_release_drop_tokens(tmp_path: Path) -> None:
    row = "Megatron-Bridge x,25.09,pretrain,{model},,,,,{on},256,FP8,4096,1,4096,1,{pp},1,{vp},{ep},,,,1000,,,,A,"
    rows = (
        row.format(model="Qwen3_30B_a3B (tokendrop)", on="DGX-B200", pp=1, vp="", ep=8),
        row.format(model="Qwen3_235B_a22B (tokendrop)", on="DGX-H100", pp=8, vp=4, ep=32),
        row.format(model="DeepSeekV3 (dropless)", on="DGX-H100", pp=8, vp=4, ep=32),
        row.format(model="DeepSeekV3 (w/o MTP)", on="DGX-GB200", pp=8, vp=4, ep=32).replace("25.09", "25.11"),
    )
    runs, skipped = read_training_runs(table(tmp_path, *rows))
    assert not skipped
    jobs = [run.job for run in runs]
    assert [job.parallelism.experts_capacity for job in jobs] == [1.0, 1.0, None, None]
    assert [job.parallelism.experts_exchange for job in jobs] == ["all_to_all", "all_to_all", "by_node", "hybrid"]
    assert [job.kernels.cuda_graphs for job in jobs] == ["full", None, None, "partial"]
    assert [(job.overlap.experts, job.overlap.gradient_reduce) for job in jobs[1:3]] == [(None, None), (True, False)]
    assert [job.mtp_layers for job in jobs] == [0, 0, 1, 0]
    assert jobs[2].parallelism.layers_per_stage == (1, *[2] * 30, 0)


def test_fine_tuning_is_on_packed_documents(tmp_path: Path) -> None:
    rows = (bridge(task="SFT"), bridge(task="LoRA"), bridge())
    runs, _ = read_training_runs(table(tmp_path, *rows))
    assert [run.job.document_tokens for run in runs] == [200, 200, None]


def test_what_a_row_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    rows = (
        "NeMo x,,pretrain,Unheard-7B,7,,,,H100-SXM5-80GB,64,FP8,128,1,8192,4,8,1,5,,,,,1619,727,,,A,",
        "NeMo x,,pretrain,LLAMA3-70B,70,,,,H100-SXM5-80GB,64,FP8,128,1,8192,,,,,,,,,1619,727,,,A,",
        "NeMo x,,pretrain,LLAMA3-70B,70,,,,Abacus,64,FP8,128,1,8192,4,8,1,5,,,,,1619,727,,,A,",
        "Nobody,,pretrain,LLAMA3-70B,70,,,,H100-SXM5-80GB,64,FP8,128,1,8192,4,8,1,5,,,,,1619,727,,,A,",
        "NeMo x,,pretrain,LLAMA3-70B,70,,,,H100-SXM5-80GB,64,FP8,128,1,8192,4,8,1,5,,,,,,,,,A,",
    )
    runs, skipped = read_training_runs(table(tmp_path, *rows))
    assert not runs
    words = ("shape", "layout", "device", "source", "neither a time nor a rate")
    assert all(word in found.reason for word, found in zip(words, skipped, strict=True))


BRIDGE = "Megatron-Bridge x,,{task},{model},,,,,{on},{n},{precision},{batch},1,4096,1,1,1,,,,,,1000,,,,A,"


def bridge(**said: str) -> str:
    usual = {
        "task": "pretrain",
        "model": "LLAMA3_8B",
        "on": "DGX-GB200",
        "n": "64",
        "precision": "BF16",
        "batch": "128",
    }
    return BRIDGE.format(**usual | said)


@pytest.mark.parametrize(
    ("said", "model", "device"),
    [
        ({"model": "Mixtral_8x7B"}, "mistralai/Mixtral-8x7B-v0.1", "gb200"),
        ({"model": "GPT OSS 20B"}, "openai/gpt-oss-20b", "gb200"),
        ({"model": "LLAMA3.2_1B (w/o CP)"}, "meta-llama/Llama-3.2-1B", "gb200"),
        ({"model": "Qwen3_Next_80B_A3B"}, "Qwen/Qwen3-Next-80B-A3B-Instruct", "gb200"),
        ({"model": "DeepSeekV2"}, "deepseek-ai/DeepSeek-V2", "gb200"),
        ({"on": "NVIDIA Blackwell Ultra GPU (GB300)"}, "meta-llama/Meta-Llama-3-8B", "gb300"),
        ({"on": "DGX-B300"}, "meta-llama/Meta-Llama-3-8B", "b300_sxm"),
        ({"on": "AMD Instinct MI300X 192GB HBM3"}, "meta-llama/Meta-Llama-3-8B", "mi300x"),
        ({"on": "NVIDIA H100-SXM-80GB"}, "meta-llama/Meta-Llama-3-8B", "h100_sxm"),
        ({"on": "H100"}, "meta-llama/Meta-Llama-3-8B", "h100_sxm"),
        ({"model": "Llama-3.1-8B"}, "meta-llama/Llama-3.1-8B", "gb200"),
        ({"model": "LLAMA3-405B"}, "meta-llama/Llama-3.1-405B", "gb200"),
        ({"model": "LLAMA4_Maverick"}, "meta-llama/Llama-4-Maverick-17B-128E-Instruct", "gb200"),
        ({"model": "Mistral_7B"}, "mistralai/Mistral-7B-v0.3", "gb200"),
        ({"model": "DeepSeek3-671B"}, "deepseek-ai/DeepSeek-V3", "gb200"),
        ({"model": "Gemma3_12B"}, "google/gemma-3-12b-it", "gb200"),
        ({"model": "Nemotron_3_Nano"}, "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "gb200"),
        ({"model": "DeepSeek2-16B"}, "deepseek-ai/DeepSeek-V2-Lite", "gb200"),
        ({"on": "DGX H100"}, "meta-llama/Meta-Llama-3-8B", "h100_sxm"),
        ({"on": "NVIDIA H100 80GB HBM3"}, "meta-llama/Meta-Llama-3-8B", "h100_sxm"),
        ({"on": "HGX H200"}, "meta-llama/Meta-Llama-3-8B", "h200_sxm"),
        ({"on": "NVIDIA H200-NVL-141GB"}, "meta-llama/Meta-Llama-3-8B", "h200_nvl"),
        ({"on": "A100-PCIE-80GB"}, "meta-llama/Meta-Llama-3-8B", "a100_pcie"),
        ({"on": "p5.48xlarge"}, "meta-llama/Meta-Llama-3-8B", "h100_sxm"),
        ({"on": "TPUv5p-512"}, "meta-llama/Meta-Llama-3-8B", "tpu_v5p"),
    ],
)
def test_models_and_devices_of_the_catalog_are_found(
    tmp_path: Path, said: dict[str, str], model: str, device: str
) -> None:
    (run,), skipped = read_training_runs(table(tmp_path, bridge(**said)))
    assert not skipped
    assert (run.job.model, run.job.device) == (model, device)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Nemotron-340B", 341e9),
        ("NEMOTRON4_340B", 341e9),
        ("Grok1 314B", 314e9),
        ("GPT-3 175B", 175e9),
        ("GPT3_40B", 39e9),
        ("MT-NLG 530B", 530e9),
        ("OPT-175B", 175e9),
        ("BLOOM-176B", 176e9),
        ("LLaMA 65B", 65e9),
        ("GLM-130B", 130e9),
        ("Falcon-40B", 41e9),
        ("Falcon 180B", 179e9),
        ("PaLM-540B", 540e9),
        ("OLMo2 13B", 13.7e9),
        ("StarCoder2-7B", 7.2e9),
        ("DBRX", 132e9),
    ],
)
def test_models_without_a_checkpoint_have_their_published_shapes(tmp_path: Path, name: str, parameters: float) -> None:
    (run,), _ = read_training_runs(table(tmp_path, bridge(model=name)))
    assert isinstance(run.job.model, ModelSpec)
    assert count_parameters(run.job.model).total == pytest.approx(parameters, rel=0.02)


def test_a_source_that_nobody_knows_is_what_its_framework_usually_does(tmp_path: Path) -> None:
    head = "source,model,layers,hidden,heads,kv_heads,ffn,vocab,accelerator,n_gpus,precision,gbs,mbs,seq_len,tp,pp,"
    path = tmp_path / "runs.csv"
    path.write_text(
        head + "framework,iter_time_s\nA paper,Large-33B,60,6656,52,4,17920,32000,H100-SXM5-80GB,64,BF16,64,1,4096,4,2,"
        "Megatron-LM,9.5\nA paper,Large-33B,60,6656,52,4,17920,32000,H100-SXM5-80GB,64,BF16,64,1,4096,4,2,Other,9.5\n"
    )
    (run,), (skipped,) = read_training_runs(path)
    assert run.job.framework == "megatron"
    assert isinstance(run.job.model, ModelSpec)
    # Gated, with untied embeddings: 60 (2 x 6656^2 (1 + 4 / 52) + 3 x 6656 x 17920) + 2 x 32000 x 6656.
    assert count_parameters(run.job.model).total == pytest.approx(27.6e9, rel=0.01)
    assert "source" in skipped.reason


@pytest.mark.parametrize(
    ("precision", "compute"),
    [
        ("amp_fp8", "fp8"),
        ("FP8_CS", "fp8_current"),
        ("amp_bf16", "bf16"),
        ("FP8-MX", "mxfp8"),
        ("bf16-mixed", "bf16"),
        ("float8", "fp8"),
        ("FP8 blockwise", "fp8_block"),
        ("FP8 current scaling", "fp8_current"),
        ("fp8_rowwise", "fp8_rowwise"),
        ("FP8/BF16", "fp8"),
        ("FP4", "nvfp4"),
        ("TF32", "fp32"),
    ],
)
def test_formats_are_known_by_what_tables_call_them(tmp_path: Path, precision: str, compute: str) -> None:
    row = f"NeMo x,24.09,pretrain,LLAMA3-8B,8,,,,DGX-B200,8,{precision},128,1,8192,1,1,1,,,,,,1000,,,,A,"
    (run,), _ = read_training_runs(table(tmp_path, row))
    assert run.job.precision.compute == compute


def test_a_local_batch_in_the_notes_is_the_micro_batch(tmp_path: Path) -> None:
    row = "torchtitan x,,pretrain,Llama3-8B,8,,,,H100-SXM5-80GB,64,BF16,,,8192,1,1,1,,,,64,,5000,,,,A,{}"
    noted, silent = read_training_runs(table(tmp_path, row.format("FSDP; local batch 8"), row.format("FSDP")))[0]
    assert (noted.job.micro_batch, noted.job.global_batch) == (8, 512)
    assert (silent.job.micro_batch, silent.job.global_batch) == (1, 64)


def test_torchtitan_shards_over_context_parallel_ranks_too(tmp_path: Path) -> None:
    row = "torchtitan x,,pretrain,Llama3-8B,8,,,,H100-SXM5-80GB,8,BF16,,1,131072,1,1,4,,,,2,full,1000,,,,A,FSDP+CP"
    (run,), _ = read_training_runs(table(tmp_path, row))
    assert resolve(run.job).degrees.shard_group == 8


MLPERF = (
    "round,benchmark,accelerator,n_accel,global_batch_size,grad_accum,seq_len,nominal_seq_len,tp,pp,cp,vp,mbs,fp8,fp4,"
    "step_time_s_median,time_to_train_min_olympic,samples_at_stop_median,max_memory_GB\n"
)


def mlperf(folder: Path, *rows: str) -> tuple[list[TrainingRun], list[str]]:
    (folder / "mlperf.csv").write_text(MLPERF + "\n".join(rows) + "\n")
    runs, skipped = read_training_runs(folder / "mlperf.csv")
    return runs, [row.reason for row in skipped]


def test_submitters_ran_the_layouts_that_others_logged(tmp_path: Path) -> None:
    lora = "v5.0,llama2_70b_lora,{on},{n},{batch},1,8192,8192,{layout},1,True,,{step},{time},3072,168"
    blackwell = {"on": "NVIDIA Blackwell GPU (B200-SXM-180GB)", "n": 8, "batch": 8}
    rows = (
        lora.format(**blackwell, layout="1,1,1,", step=1.5, time=11.0),
        lora.format(**blackwell, layout=",,,", step=1.6, time=11.0),
        lora.format(**blackwell | {"n": 16, "batch": 16}, layout=",,,", step="", time=6.0),
        lora.format(**blackwell, layout=",,,", step="", time=2.0),
        lora.format(**blackwell | {"n": 64}, layout=",,,", step=0.3, time=11.0),
    )
    runs, reasons = mlperf(tmp_path, *rows)
    assert [(run.row, run.job.parallelism.tp) for run in runs] == [(0, 1), (1, 1), (2, 1)]
    # As many ranks of a model: the same layout. Its step is the share of the time that others' steps take.
    share = np.median([0.3, 1.5, 1.6]) * 384 / 660
    assert runs[2].step_s == pytest.approx(6.0 * 60 * share / (3072 / 16))
    assert reasons == ["neither a time nor a rate was measured", "its parallel layout was not published"]
    assert (runs[0].job.precision.frozen_weights, runs[0].memory_bytes) == ("fp8", 168 * 2**30)


def test_a_logged_throughput_gives_the_step_but_in_gpt3s_logs(tmp_path: Path) -> None:
    columns = MLPERF.strip() + ",logged_throughput_raw\n"
    lora = "v4.0,llama2_70b_lora,NVIDIA H100-SXM5-80GB,{},{},1,8192,8192,4,1,2,,1,True,,,{},11136,,{}\n"
    gpt3 = "v4.0,gpt3,NVIDIA H100-SXM5-80GB,512,2048,128,2048,2048,4,8,1,6,1,,,,{},1207959552,,354096.999\n"
    # Below three minutes too, and another run's time to train is shared out by these.
    (tmp_path / "mlperf.csv").write_text(
        columns + lora.format(1024, 128, 1.464, 189.6161) + lora.format(64, 8, 20.0, 12.0) + gpt3.format(2.0)
    )
    runs, skipped = read_training_runs(tmp_path / "mlperf.csv")
    assert [run.step_s for run in runs] == pytest.approx([128 / 189.6161, 8 / 12.0])
    assert [row.reason for row in skipped] == ["neither a time nor a rate was measured"]


def test_logs_that_print_both_have_the_batch_over_the_throughput_as_their_step(reference: Path) -> None:
    with (reference / "training" / "mlperf_summary.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["step_time_s_median"] and row["logged_throughput_raw"]]
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        whole = float(row["global_batch_size"]) / float(row["logged_throughput_raw"])
        ratios[row["benchmark"] == "gpt3"].append(whole / float(row["step_time_s_median"]))
    assert len(ratios[False]) >= 10
    assert ratios[False] == pytest.approx([1.0] * len(ratios[False]), rel=0.005)
    # GPT-3's counts tokens, and its time has evaluation in it.
    assert all(1.05 < ratio * 2048 < 1.15 for ratio in ratios[True])


def test_a_layout_must_make_the_logged_batch(tmp_path: Path) -> None:
    row = "v5.0,llama2_70b_lora,NVIDIA H200-SXM5-141GB,8,8,2,8192,8192,{},1,True,,3.1,22.9,3072,"
    logged = row.format("4,1,1,"), row.format("1,1,2,"), row.format(",,,")
    runs, _ = mlperf(tmp_path, *logged)
    # 8 devices, 2 micro-batches, 8 sequences: 2 devices a model, not 4.
    assert [(run.job.parallelism.tp, run.job.parallelism.cp) for run in runs] == [(1, 2)] * 3


def test_a_device_that_varies_context_parallelism_alone_does_so_for_other_ranks(tmp_path: Path) -> None:
    row = "v5.0,llama2_70b_lora,{},{},8,1,8192,8192,{},1,True,,0.5,9.0,3072,"
    gb200, h100 = "NVIDIA Blackwell GPU (GB200)", "NVIDIA H100-SXM5-80GB"
    logged = [row.format(gb200, 8, "1,1,1,"), row.format(gb200, 64, "1,1,8,"), row.format(h100, 32, "4,1,1,")]
    runs, _ = mlperf(tmp_path, *logged, row.format(gb200, 32, ",,,"))
    assert (runs[-1].job.parallelism.tp, runs[-1].job.parallelism.cp) == (1, 4)


def test_gaudis_layout_is_the_one_that_gives_its_steps(tmp_path: Path) -> None:
    row = "{},gpt3,Intel Gaudi2,{},{},{},2048,2048,,,,,,,,,153.6,1207959552,"
    logged = ("v3.0", 256, 1536, 384), ("v3.1", 256, 2048, 256), ("v3.1", 384, 2048, 128), ("v4.0", 1024, 2048, 64)
    timed = "v3.1,gpt3,NVIDIA H100-SXM5-80GB,512,2048,128,2048,2048,4,8,1,6,1,,,11.0,58.3,1207959552,"
    (_, *runs), reasons = mlperf(tmp_path, timed, *(row.format(*each) for each in logged))
    assert not reasons
    layouts = [(run.job.parallelism.tp, run.job.parallelism.pp, run.job.micro_batch) for run in runs]
    assert layouts == [(8, 8, 1), (8, 8, 2), (8, 6, 2), (8, 8, 2)]
    assert [run.job.precision.compute for run in runs] == ["bf16", "fp8", "fp8", "fp8"]
    for run in runs:
        resolve(run.job)


def test_a_replica_for_each_device_is_the_benchmarks_reference(tmp_path: Path) -> None:
    row = "v4.0,llama2_70b_lora,NVIDIA A100-SXM4-80GB,64,64,1,8192,8192,,,,,,,,19.5,75.5,3072,"
    (run,), _ = mlperf(tmp_path, row)
    job = run.job
    assert (job.framework, job.sharding.zero, job.recompute.granularity) == ("deepspeed", 3, "full")
    setup = resolve(job)
    assert simulate_with(setup, training_prices(setup)).fits


def test_virtual_stages_that_a_round_leaves_out_are_those_of_the_nearest(tmp_path: Path) -> None:
    row = "{},gpt3,NVIDIA H100-SXM5-80GB,512,2048,128,2048,2048,4,8,,{},1,,,11.0,58.3,1207959552,"
    runs, _ = mlperf(tmp_path, row.format("v3.0", 12), row.format("v3.1", ""), row.format("v4.1", 6))
    assert [run.job.parallelism.virtual_stages for run in runs] == [12, 12, 6]


MAXTEXT = "MaxText README,2024,pretrain,{model},,,,,{on},{n},BF16,,,,,,,,,,,,,{rate},,,B,slices {slices}x v5e-256"


RECIPE = (
    "Google tpu-recipes,2024,pretrain,Llama3.1-70B,,,,,TPU v6e (Trillium),128,BF16,,,,,,,,,,,,900,,34.8,,B,"
    "log; tokens per step 4194304; implied devices 128"
)


def test_runs_of_maxtext_have_their_scripts_settings(tmp_path: Path) -> None:
    rows = [
        MAXTEXT.format(model="MaxText-32B", on="TPU v5e", n=512, rate=128, slices=2),
        MAXTEXT.format(model="MaxText-128B", on="TPU v5p", n=128, rate=315, slices=1),
        RECIPE,
    ]
    (dense, wide, recipe), skipped = read_training_runs(table(tmp_path, *rows))
    assert not skipped
    assert (dense.job.framework, dense.job.micro_batch, dense.job.recompute.granularity) == ("maxtext", 4, "full")
    assert resolve(dense.job).degrees.shard_group == 256
    assert (wide.job.parallelism.tp, wide.job.recompute.granularity) == (8, "none")
    assert (recipe.job.global_batch, recipe.job.sequence_tokens, recipe.job.micro_batch) == (512, 8192, 4)
    for run, parameters in ((dense, 32e9), (wide, 128e9)):
        assert isinstance(run.job.model, ModelSpec)
        assert count_parameters(run.job.model).total == pytest.approx(parameters, rel=0.08)


def test_recipes_of_tpus_have_their_sequences_and_their_split(tmp_path: Path) -> None:
    """25,165,824 tokens a step are six sequences of 8,192 on each of 512 chips; Maverick splits tensors over four."""
    v5p = RECIPE.replace("TPU v6e (Trillium)", "TPU v5p")
    deepseek = (
        v5p.replace("Llama3.1-70B", "DeepSeek3-671B").replace("128,BF16", "512,BF16").replace("4194304", "25165824")
    )
    maverick = v5p.replace("Llama3.1-70B", "Llama4-Maverick-17B-128E")
    deepseek = deepseek.replace("devices 128", "devices 512")
    (deep, wide), skipped = read_training_runs(table(tmp_path, deepseek, maverick))
    assert not skipped
    assert (deep.job.sequence_tokens, deep.job.global_batch) == (8192, 3072)
    assert (wide.job.parallelism.tp, wide.job.sequence_tokens) == (4, 8192)


def test_recipes_say_what_is_launched_as_a_graph_and_what_waits_in_the_host(tmp_path: Path) -> None:
    row = "Megatron-Bridge x,{release},pretrain,{model},,,,,DGX-GB300,{n},MXFP8,512,8,4096,1,1,1,,{ep},,,,9000,,,,A,"
    rows = [row.format(release=release, model="Qwen3_30B_a3B", n=8, ep=8) for release in ("26.04", "26.06")]
    rows.append("Megatron-Bridge x,26.04,pretrain,LLAMA3_70B,,,,,DGX-GB200,64,FP8,128,2,8192,1,1,1,,,,1,,4000,,,,A,")
    (partial, whole, offloaded), _ = read_training_runs(table(tmp_path, *rows))
    assert (partial.job.kernels.cuda_graphs, partial.job.kernels.fused_experts) == ("routing", None)
    assert partial.job.parallelism.experts_exchange == "hybrid"
    assert (whole.job.kernels.cuda_graphs, whole.job.kernels.fused_experts) == ("full", True)
    assert offloaded.job.recompute.offload_layers == 40
    assert resolve(whole.job).job.overlap.experts


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"model": "Unheard_56B"}, "the shape of 'Unheard_56B' is not known"),
        ({"model": "Flux.1-dev 12B"}, "the shape of 'Flux.1-dev 12B' is not known"),
        ({"on": "A100-PCIe-40GB"}, "there is no device 'A100-PCIe-40GB' in the catalog"),
        ({"task": "GRPO"}, "a step of 'GRPO' is more than a forward and a backward pass"),
        ({"precision": "MXFP6"}, "the precision 'MXFP6' is not known"),
        ({"n": "nan"}, "n_gpus is 'nan'; a number above zero is needed"),
        ({"n": "8.5"}, "n_gpus is '8.5'; a whole number is needed"),
        ({"batch": "many"}, "gbs is 'many'; a number above zero is needed"),
        ({"batch": "-4"}, "gbs is '-4'; a number above zero is needed"),
    ],
)
def test_rows_that_are_refused_say_why(tmp_path: Path, said: dict[str, str], reason: str) -> None:
    runs, (skipped,) = read_training_runs(table(tmp_path, bridge(**said)))
    assert not runs
    assert skipped.reason == reason


def test_columns_that_a_table_leaves_out_are_blank(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("source,model,accelerator,n_gpus,precision,gbs,seq_len,tp,iter_time_s\n")
    with path.open("a") as file:
        file.write("NeMo x,LLAMA3-8B,H100-SXM5-80GB,8,BF16,128,8192,1,12.5\nNeMo x,LLAMA3-8B,H100-SXM5-80GB,8\n")
    (run,), (skipped,) = read_training_runs(path)
    assert (run.step_s, run.job.micro_batch) == (12.5, 1)
    assert "precision" in skipped.reason


def test_layers_that_do_not_divide_leave_room_for_embedding_and_head(tmp_path: Path) -> None:
    row = "NeMo x,,pretrain,LLAMA3.1_405B,405,,,,DGX-H100,1024,FP8,512,1,8192,8,8,2,8,,,,,302,763,,,A,"
    (run,), _ = read_training_runs(table(tmp_path, row))
    assert run.job.parallelism.layers_per_stage == (1, *[2] * 62, 1)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError):
        read_training_runs(tmp_path / "other.csv")
    with pytest.raises(InputError):
        read_training_runs(tmp_path / "absent.csv")


def errors(runs: list[TrainingRun]) -> np.ndarray:
    found = []
    prices = {}
    for run in runs:
        try:
            setup = resolve(run.job)
        except InputError:
            continue
        key = (setup.device.name, setup.node.name)
        prices.setdefault(key, training_prices(setup))
        if run.step_s is not None:
            found.append(simulate_with(setup, prices[key]).step_s / run.step_s - 1)
    return np.array(found)


@pytest.mark.full
def test_selective_recomputation_runs_are_predicted_within_calculons_error(reference: Path) -> None:
    # The same eight points: Calculon 3.65% on average and 8.87% at worst.
    runs, _ = read_training_runs(reference / "training" / "seqpar_calculon.csv")
    found = np.abs(errors(runs))
    assert len(found) == 8
    assert found.mean() < 0.035
    assert found.max() < 0.08


@pytest.mark.full
@pytest.mark.parametrize(("name", "budget"), [("megatron", 0.10), ("mlperf_summary", 0.10)])
def test_published_runs_are_predicted_within_budget(reference: Path, name: str, budget: float) -> None:
    runs, _ = read_training_runs(reference / "training" / f"{name}.csv")
    assert np.median(np.abs(errors(runs))) < budget


@pytest.mark.full
def test_runs_out_of_memory_are_told_from_those_that_fit(reference: Path) -> None:
    runs, _ = read_training_runs(reference / "training" / "bloom_chronicles.csv")
    setups = [(run, resolve(run.job)) for run in runs]
    prices = training_prices(setups[0][1])
    fits = [(run.out_of_memory, simulate_with(setup, prices).fits) for run, setup in setups]
    assert sum(not fit for out, fit in fits if out) >= 0.9 * sum(out for out, _ in fits)
    assert sum(fit for out, fit in fits if not out) >= 0.9 * sum(not out for out, _ in fits)
