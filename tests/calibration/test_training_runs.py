"""Tables of measured training runs: rows as jobs, refused rows with their reasons, errors as of serving runs."""

from pathlib import Path

import pytest

from windtunnel.calibration.measured_runs import read_run_file, write_run_file
from windtunnel.calibration.run_files import read_measurements
from windtunnel.calibration.validate import predict_runs
from windtunnel.errors import InputError
from windtunnel.report.calibration.validation import validation_document

HEAD = "id,model,accelerator,n_gpus,precision,gbs,mbs,seq_len,tp,pp,framework,"
HEAD += "iter_time_s,tokens_per_s_per_gpu,tflops_per_gpu"
ROWS = """a,Llama 3.1 8B,H100-SXM5-80GB,8,BF16,128,1,8192,1.0,1,Megatron-LM,11.5,,
b,llama-3.1-8b,DGX-H100,8,FP8,128,1,8192,1,1,NeMo 24.07,,14000,
c,llama-3.1-8b,h100_sxm,8,BF16,128,1,8192,1,1,torchtitan,,,400
d,llama-3.1-8b,H100,8,BF16,128,1,8192,1,1,,11,,
e,llama-3.1-8b,h100_sxm,8,BF16,128,1,8192,1,1,,,,
f,no-such-model,h100_sxm,8,BF16,128,1,8192,1,1,,11,,
g,llama-3.1-8b,h100_sxm,8,BF16,128,1,,1,1,,11,,
h,llama-3.1-8b,h100_sxm,8,BF16,128,1,8192,16,1,,11,,
i,llama-3.1-8b,h100_sxm,8,BF16,128,1,8192,1,1,other,11,,
"""


def table(folder: Path, text: str) -> list[Path]:
    path = folder / "training.csv"
    path.write_text(text)
    return [path]


@pytest.mark.full
def test_a_table_of_training_runs_is_predicted_and_refused_row_by_row(tmp_path):
    runs = read_measurements(table(tmp_path, f"{HEAD}\n{ROWS}"), {})
    jobs = [run.job for run in runs]
    assert [(job.device, job.node, job.framework, job.precision.compute) for job in jobs[:3] if job] == [
        ("h100_sxm", None, "megatron", "bf16"),
        ("h100_sxm", "dgx_h100", "megatron", "fp8"),
        ("h100_sxm", None, "fsdp2", "bf16"),
    ]
    assert [run.measured for run in runs[:3]] == [
        {"step": 11.5},
        {"step": pytest.approx(128 * 8192 / (8 * 14000))},
        {"rate": 400e12},
    ]
    document = validation_document(predict_runs(runs))
    assert (document["predicted"], document["runs"]) == (5, 9)
    assert {name: scores["runs"] for name, scores in document["scores"].items()} == {"step": 4, "rate": 1}
    assert document["taken"] == {"h100_sxm": 1, "seq_len 8192": 1}  # "H100" may be several; Llama 3's length
    reasons = " | ".join(document["refused"])
    assert "nothing was measured" in reasons
    assert "no model 'no-such-model'" in reasons
    assert "there is no framework 'other'" in reasons
    assert sum(document["refused"].values()) == 4


def test_a_shape_that_the_row_gives_stands_for_a_name_that_the_catalog_lacks(tmp_path):
    head, row = "model,layers,hidden,heads,vocab,accelerator,n_gpus,gbs,seq_len,iter_time_s", "GPT-X,24,2304,24,51200"
    (run,) = read_measurements(table(tmp_path, f"{head}\n{row},A100-SXM4-80GB,32,512,2048,3.5\n"), {})
    assert run.job is not None
    assert (run.job.model.hidden_size, run.job.model.num_layers) == (2304, 24)
    head, row = "model,layers,accelerator,n_gpus,gbs,seq_len,iter_time_s", "llama-3.1-8b,8,h100_sxm,8,8,8192,1"
    (run,) = read_measurements(table(tmp_path, f"{head}\n{row}\n"), {})
    assert run.job is not None
    assert (run.job.model.num_layers, run.job.model.hidden_size) == (8, 4096)  # shortened
    row = "gemma-3-12b,8,h100_sxm,8,8,8192,1"
    (run,) = read_measurements(table(tmp_path, f"{head}\n{row}\n"), {})
    assert run.refused == "google/gemma-3-12b-it has 48 layers, and the row says 8"


SILENT = """model,params_B,layers,hidden,accelerator,n_gpus,precision,gbs,mbs,seq_len,tp,pp,fsdp,act_ckpt,\
framework,release,note,iter_time_s,tokens_per_s_per_gpu,tflops_per_gpu,hfu_pct
Llama3-8B,,,,H100 96GB HBM2e 500W (own),64,FP8,96,12,,8,,8,selective(op),torchtitan,2025-06,async TP rowwise,,3914,,
Llama3.1-70B,,,,TPU v6e (Trillium),128,BF16,,,,,,,,MaxText,2025,tokens per step 4194304,34.8,941,,
Llama3.1-70B,,,,TPU v6e,128,BF16,,,,,,,,MaxText,2025,,34.8,941.5,,
MaxText-32B,,,,TPU v5p,128,BF16,,,,,,,,MaxText,2024,slices 2x v5p-128,,,319,
GPT-39.1B,39.1,48,8192,A100-SXM4-80GB,512,FP16,1536,,2048,8,2,,full,Megatron-LM,2021-01,,,,128,41
GPT-39.1B,39.1,,,A100-SXM4-80GB,512,FP16,1536,,2048,8,2,,full,Megatron-LM,2021-01,,6.4,,,
GPT-18B,18,,6144,A100-SXM4-80GB,64,BF16,64,1,2048,8,1,,,Megatron-LM,2024-01,,6.4,,,
GPT-7B,7,,,A100-SXM4-80GB,64,BF16,64,1,2048,8,1,,,Megatron-LM,2024-01,,6.4,,,
Llama3-8B,,,,h100_sxm,64,BF16,64,1,,,,,,Megatron-LM,,,6.4,,,
Llama3-8B,,,,A100-PCIE-40GB,64,BF16,64,1,,8,,,,Megatron-LM,,,6.4,,,
"""


def test_what_a_row_leaves_out_is_taken_from_its_framework_model_date_and_note_and_said(tmp_path):
    runs = read_measurements(table(tmp_path, SILENT), {})
    jobs = [run.job for run in runs]
    assert [run.refused for run in runs[-3:]] == [
        "the shape of 'GPT-7B' is not known: layers and hidden are empty",
        "its parallel layout is empty: tp, pp, fsdp",
        "there is no device 'A100-PCIE-40GB' in the catalog; did you mean a100_pcie, h100_pcie or a100_40gb_sxm?",
    ]
    titan, trillium, by_rate, scale, gpt, same, sized = jobs[:7]
    assert (titan.sequence_tokens, titan.precision.compute, titan.device.tdp_w) == (8192, "fp8_rowwise", 500.0)
    assert (titan.kernels.attention, titan.kernels.fused, titan.overlap.tensor_parallel) == ("flash2", True, True)
    assert titan.recompute.modules == ("norms", "activation", "every_second_product")
    assert runs[0].labels["assumed"] == "seq_len 8192"
    assert (trillium.global_batch, trillium.micro_batch, trillium.sharding.group) == (512, 4, None)
    assert trillium.recompute.offload_layers == 1000
    assert (by_rate.global_batch, by_rate.micro_batch) == (512, 4)  # 34.8 s x 941.5 tokens/s x 128 / 8192
    assert (scale.micro_batch, scale.parallelism.tp, scale.sharding.group) == (6, 4, 16)
    assert (scale.model.num_layers, scale.model.hidden_size) == (32, 8192)
    assert (gpt.kernels.attention, gpt.sharding.zero, gpt.precision.gradients) == ("unfused", 0, "bf16")
    # The rate counts recomputation: of layers 3 in 4 are the model's, of the head all.
    assert runs[4].measured["rate"] == pytest.approx(0.75 * 128e12, rel=0.01)
    assert (same.model.num_layers, same.model.hidden_size) == (48, 8192)
    assert runs[5].labels["assumed"] == "layers 48, hidden 8192"
    assert sized.model.num_layers == 40  # 18e9 / (12 x 6144^2)
    assert sized.kernels.attention is None


NAMED = """model,accelerator,n_gpus,precision,mbs,ga,seq_len,tp,pp,vp,framework,task,act_ckpt,iter_time_s
LLAMA3_70B,DGX-GB200,64,FP8_CS,1,8,8192,2,4,5,NeMo,pretrain,,3
Llama 3.1 405b 24.09,DGX-H100,256,fp8 mx,1,4,8192,8,8,8,NeMo,,,3
Nemotron4 15b 24.11,H100-SXM5-80GB 700W (RoCE),16,BF16,2,1,4096,1,1,,torchtitan,SFT,full,3
MPT-7b,A100-SXM4-80GB,8,amp_bf16,4,2,2048,1,1,,fsdp,,,3
DeepSeekV3 (tokendrop),DGX-GB200,256,FP8,1,16,4096,1,4,4,Megatron-Bridge,LoRA,selective+sequence-parallel,3
"""


def test_names_formats_and_frameworks_are_read_as_tables_write_them(tmp_path):
    first, second, third, fourth, fifth = (run.job for run in read_measurements(table(tmp_path, NAMED), {}))
    assert (first.model, first.device, first.node) == ("meta-llama/Meta-Llama-3-70B", "gb200", "gb200_nvl72")
    assert (first.precision.compute, first.overlap.tensor_parallel) == ("fp8_current", True)
    assert first.global_batch == 64 // (2 * 4) * 1 * 8
    assert (second.model, second.precision.compute) == ("meta-llama/Llama-3.1-405B", "mxfp8")
    # 126 layers over 64 chunks, embedding and head counted as a layer each.
    assert second.parallelism.layers_per_stage == (1, *[2] * 62, 1)
    assert (third.model, third.device, third.recompute.granularity) == ("nvidia/Nemotron-4-15B", "h100_sxm", "full")
    assert (fourth.model.num_layers, fourth.model.hidden_size, fourth.precision.compute) == (32, 4096, "bf16")
    assert (fifth.model, fifth.lora is not None) == ("deepseek-ai/DeepSeek-V3", True)
    assert (fifth.precision.compute, fifth.parallelism.experts_exchange) == ("fp8_current", "by_node")
    assert fifth.parallelism.sequence_parallel is True
    assert sum(fifth.parallelism.layers_per_stage) == 61


@pytest.mark.parametrize(
    ("model", "accelerator", "framework", "read"),
    [
        ("QWEN3_235B", "p4d.24xlarge", "megatron_bridge", ("Qwen/Qwen3-235B-A22B", "a100_40gb_sxm", "fp8_current")),
        ("Mistral-Nemo", "AMD Instinct MI300X", "Primus", ("mistralai/Mistral-Nemo-Base-2407", "mi300x", "fp8")),
        ("Llama2 34B", "TPU v5p", "NeMo", ("codellama/CodeLlama-34b-hf", "tpu_v5p", "fp8")),
    ],
)
def test_names_that_go_on_elsewhere_are_read_and_said(model, accelerator, framework, read, tmp_path):
    head = "model,accelerator,n_gpus,precision,gbs,seq_len,tp,framework,iter_time_s"
    (run,) = read_measurements(table(tmp_path, f"{head}\n{model},{accelerator},8,FP8,8,4096,8,{framework},1\n"), {})
    assert run.job is not None
    assert (run.job.model, run.job.device, run.job.precision.compute) == read
    assert ("Qwen/Qwen3-235B-A22B" in run.labels.get("assumed", "")) == (model == "QWEN3_235B")


def test_a_framework_may_be_named_with_the_model(tmp_path):
    head = "model,accelerator,n_gpus,gbs,seq_len,framework,iter_time_s"
    (run,) = read_measurements(table(tmp_path, f"{head}\nPaxml GPT5B,h100_sxm,16,64,2048,NeMo,1\n"), {})
    assert run.job is not None
    assert (run.job.framework, run.job.micro_batch, run.job.model.hidden_size) == ("maxtext", 4, 4096)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("FP8_CS", "fp7", "the precision 'fp7' is not known"),
        ("NeMo,pretrain", "NeMo,RLHF", "a step of 'RLHF' is not known"),
        ("FP8_CS,1,8", "FP8_CS,,8", "gbs is empty, and so is mbs"),
        ("selective+sequence-parallel", "selective+other", "no recomputation 'selective+other'"),
    ],
)
def test_what_a_row_says_and_nobody_knows_refuses_it(before, after, reason, tmp_path):
    assert before in NAMED
    runs = read_measurements(table(tmp_path, NAMED.replace(before, after)), {})
    assert [reason in run.refused for run in runs].count(True) == 1


def test_runs_with_jobs_are_written_and_read(tmp_path):
    runs = read_measurements(table(tmp_path, f"{HEAD}\n{ROWS}"), {})
    write_run_file(runs, tmp_path / "runs.jsonl")
    assert read_run_file(tmp_path / "runs.jsonl") == runs


OWN = """Model,GPU Type,# GPUs,Sequence Length,Global Batch Size,TP,PP,Precision,Step Time (ms),Tokens/s/GPU
Llama 3 70B,H100,64,8192,128,4,4,BF16,,1000
Llama 3 70B,H100,64,8192,128,4,4,FP8,10000,
"""


def test_columns_are_read_as_people_name_them(tmp_path):
    first, second = read_measurements(table(tmp_path, OWN), {})
    assert first.job is not None
    assert (first.job.num_devices, first.job.parallelism.pp, first.job.sequence_tokens) == (64, 4, 8192)
    assert (first.measured["step"], second.measured["step"]) == (pytest.approx(128 * 8192 / 64e3), 10.0)
    with pytest.raises(InputError, match=r"says n_gpus twice: in # GPUs and world_size"):
        read_measurements(table(tmp_path, OWN.replace("Precision", "world_size")), {})
    with pytest.raises(InputError, match="column 'colour'"):
        read_measurements(table(tmp_path, OWN.replace("Precision", "colour")), {})


@pytest.mark.full
def test_published_runs_are_met_as_their_benchmark_says(reference):
    from measured_runs import training_measurements

    runs = training_measurements(reference / "training" / "torchtitan.csv")
    scores = validation_document(predict_runs(runs))["scores"]["step"]
    assert scores["runs"] == 26
    assert scores["median"] == pytest.approx(0.044, abs=0.005)
