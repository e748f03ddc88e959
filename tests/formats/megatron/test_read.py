from pathlib import Path
from typing import Any

import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.formats.job_files import read_job_file
from windtunnel.formats.megatron.read import MegatronJob, read_megatron_arguments
from windtunnel.formats.megatron.write import megatron_script
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.attention.latent import LatentAttention
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.parameters import count_parameters
from windtunnel.model.shape import ModelSpec
from windtunnel.training.setup import resolve

GPT3 = (
    "torchrun --nproc_per_node 8 --nnodes 16 pretrain_gpt.py --num-layers 96 --hidden-size 12288 "
    "--num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 "
    "--global-batch-size 1536 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --bf16 "
    "--tokenizer-type GPT2BPETokenizer --train-iters 500000"
)

SCRIPT = r"""#!/bin/bash
# Trains a Mixtral.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-2}
TP=2
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --master_addr ${MASTER_ADDR:-"localhost"}
)
MODEL_ARGS=(
    --disable-bias-linear
    --seq-length 4096
    --num-layers 32   # as published
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --normalization RMSNorm
    --position-embedding-type rope
    --swiglu
    --untie-embeddings-and-output-weights
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --vocab-size 32000
)
MOE_ARGS="--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1"
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size=256 --bf16 --lr 1e-4 --train-samples 1000)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    $MOE_ARGS \
    "${TRAINING_ARGS[@]}" \
    --tensor-model-parallel-size ${TP} \
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --data-path $DATA
"""

LOG = """
------------------------ arguments ------------------------
  add_bias_linear ................................. False
  bf16 ............................................ True
  global_batch_size ............................... 64
  group_query_attention ........................... True
  hidden_size ..................................... 4096
  micro_batch_size ................................ 2
  num_attention_heads ............................. 32
  num_layers ...................................... 32
  num_query_groups ................................ 8
  recompute_granularity ........................... None
  seq_length ...................................... 8192
  swiglu .......................................... True
  tensor_model_parallel_size ...................... 4
  vocab_size ...................................... 128256
  world_size ...................................... 16
-------------------- end of arguments ---------------------
"""


def read(text: str, **settings: Any) -> MegatronJob:
    return read_megatron_arguments(text, "h100_sxm", **settings)


def model_of(result: MegatronJob) -> ModelSpec:
    assert isinstance(result.job.model, ModelSpec)
    return result.job.model


def test_gpt3_is_gpt3() -> None:
    job = read(GPT3).job
    model = model_of(read(GPT3))
    # 175 billion parameters without positions; the vocabulary is padded to 128 x tp.
    assert count_parameters(model).total == pytest.approx(174.6e9, rel=0.002)
    assert model.vocab_size == 51200
    assert (model.norm_bias, model.tie_word_embeddings) == (True, True)
    assert (job.num_devices, job.global_batch, job.parallelism.pp) == (128, 1536, 8)
    assert (job.sharding.zero, job.precision.gradients, job.dropout, job.learned_positions) == (0, "fp32", True, True)
    assert job.parallelism.sequence_parallel is False
    assert job.total_tokens == 500_000 * 1536 * 2048
    assert resolve(job).degrees.dp == 2


def test_a_script_with_variables_and_arrays() -> None:
    result = read(SCRIPT)
    job, model = result.job, model_of(result)
    assert count_parameters(model).total == pytest.approx(46.7e9, rel=0.002)
    assert (job.num_devices, job.parallelism.tp, job.parallelism.ep, job.parallelism.experts_tp) == (16, 2, 8, 1)
    assert job.parallelism.sequence_parallel
    assert (job.sharding.zero, job.overlap.gradient_reduce, job.overlap.parameter_gather) == (1, True, False)
    assert (job.dropout, job.learned_positions) == (False, False)
    assert job.total_tokens == 1000 * 4096
    assert set(result.unread) == {"--lr", "--data-path"}
    assert resolve(job).degrees.experts_dp == 2


def test_layers_with_experts_in_an_array_count_and_what_is_not_set_is_said() -> None:
    layers = '--num-layers 4 --moe-layer-freq "([0]*1+[1]*3)" --num-experts 8 --moe-router-topk 2'
    shape = "--hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024"
    sizes = "--micro-batch-size 1 --global-batch-size 16 --data-path $A $B --vocab-size 32000"
    script = f"M=({layers} {shape})\nT=({sizes})\ntorchrun --nproc_per_node 8 pretrain_gpt.py ${{M[@]}} ${{T[@]}}"
    result = read(script + " ${OTHER[@]} --bf16 $EXTRA $MORE")
    assert sum(count for count, part in model_of(result).feed_forwards if part.num_experts) == 3
    said = " (the text does not set it)"
    assert result.not_modelled == (f"$MORE{said}", f"${{OTHER[@]}}{said}")


def test_the_arguments_that_a_log_prints() -> None:
    result = read(LOG)
    job = result.job
    attention = model_of(result).layers[0].attention
    assert isinstance(attention, GroupedQueryAttention)
    assert (attention.num_kv_heads, attention.qkv_bias) == (8, False)
    assert (job.num_devices, job.micro_batch, job.recompute.granularity) == (16, 2, "none")


def test_latent_attention_and_layers_without_experts() -> None:
    layers = "--num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-layer-freq ([0]*1+[1]*26) "
    latent = (
        "--multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
        "--moe-shared-expert-intermediate-size 2816 "
    )
    text = (
        "--num-layers 27 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 10944 --seq-length 4096 "
        "--swiglu --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights "
        f"--vocab-size 102400 --micro-batch-size 1 --bf16 '{layers}' {latent}".replace("'", "")
    )
    text = text.replace("([0]*1+[1]*26)", "'([0]*1+[1]*26)'")
    model = model_of(read(text, num_devices=8))
    dense, experts = model.layers
    assert (dense.num_layers, experts.num_layers) == (1, 26)
    assert isinstance(dense.attention, LatentAttention)
    assert isinstance(experts.feed_forward, ExpertsFeedForward)
    assert experts.feed_forward.shared_intermediate_size == 2816
    assert count_parameters(model).total == pytest.approx(15.7e9, rel=0.005)  # DeepSeek-V2-Lite
    assert read(text, num_devices=8).job.global_batch == 8


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [
        (
            "--num-layers-per-virtual-pipeline-stage 3",
            {"parallelism": {"virtual_stages": 4}, "overlap": {"pipeline": True}},
        ),
        (
            "--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 6",
            {"parallelism": {"layers_per_stage": (6, *[14] * 6, 6)}},
        ),
        (
            "--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather",
            {"precision": {"compute": "fp8_block", "parameter_gather": "fp8"}},
        ),
        ("--grad-reduce-in-bf16", {"precision": {"gradients": "bf16", "gradient_reduce": "bf16"}}),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 4",
            {"recompute": {"granularity": "full", "num_layers": 4}},
        ),
        (
            "--recompute-granularity selective --recompute-modules core_attn mla_up_proj",
            {"recompute": {"modules": ("core_attention", "latent_up_projection")}},
        ),
        ("--cp-comm-type a2a", {"parallelism": {"cp_method": "ulysses"}}),
        ("--transformer-impl local", {"kernels": {"attention": "unfused"}}),
        ("--attention-backend local", {"kernels": {"attention": "unfused"}}),
        ("--use-torch-fsdp2", {"framework": "fsdp2", "sharding": {"zero": 3}}),
        ("--optimizer sgd", {"optimizer": "sgd_momentum"}),
        ("--use-distributed-optimizer --optimizer-cpu-offload", {"sharding": {"zero": 1, "offload": "optimizer"}}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", {"sharding": {"zero": 3}}),
        ("--use-custom-fsdp --data-parallel-sharding-strategy optim_grads", {"sharding": {"zero": 2}}),
        ("--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads", {"sharding": {"zero": 1}}),
        (
            "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-grads-dtype bf16",
            {"precision": {"moments": "bf16", "gradients": "bf16", "master_weights": "remainder"}},
        ),
        ("--exp-avg-dtype bf16", {"precision": {"moments": "fp32", "master_weights": None}}),
        ("--deepspeed --deepspeed_config ds.json --zero-stage 0", {"framework": "deepspeed", "sharding": {"zero": 0}}),
        ("--checkpoint-activations", {"recompute": {"granularity": "full"}}),
        ("--mtp-num-layers 1", {"mtp_layers": 1}),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", {"kernels": {"cuda_graphs": "full"}}),
        ("--enable-cuda-graph", {"kernels": {"cuda_graphs": "full"}}),
        (
            "--cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router moe_preprocess",
            {"kernels": {"cuda_graphs": "partial"}},
        ),
        (
            "--cuda-graph-impl transformer_engine --cuda-graph-scope moe_router,moe_preprocess",
            {"kernels": {"cuda_graphs": "routing"}},
        ),
        ("--cuda-graph-impl none --cuda-graph-scope attn", {"kernels": {"cuda_graphs": None}}),
    ],
)
def test_arguments_and_what_they_set(extra: str, wanted: dict[str, Any]) -> None:
    job = read(f"{GPT3} {extra}").job
    for name, value in wanted.items():
        if isinstance(value, dict):
            for inner, expected in value.items():
                assert getattr(getattr(job, name), inner) == expected
        else:
            assert getattr(job, name) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("python train.py --layers 3", "there is no Megatron command here"),
        (GPT3.replace("--hidden-size 12288", ""), "--hidden-size is missing"),
        (
            GPT3.replace("12288", "$HIDDEN"),
            "--hidden-size is '$HIDDEN'; a whole number is needed; the variable is not assigned",
        ),
        (GPT3.replace("12288", "big"), "--hidden-size is 'big'"),
        (GPT3.replace("--num-layers 96", "--num-layers 0"), "--num-layers is 0; at least 1"),
        (GPT3.replace("--nproc_per_node 8", ""), "--nproc_per_node is missing"),
        (GPT3.replace("node 8", "node gpu"), "--nproc_per_node is 'gpu'; a whole number is needed; give --num-devices"),
        (GPT3.replace("GPT2BPETokenizer", "HuggingFaceTokenizer"), "--vocab-size is missing"),
        (GPT3.replace("1536", "1535"), "global_batch"),
        (f"{GPT3} --num-layers-per-virtual-pipeline-stage 5", "96 is not a multiple of"),
        (f"{GPT3} --decoder-first-pipeline-num-layers 6", "do not split evenly over 7 stages"),
        (f"{GPT3} --num-experts 8 --moe-layer-freq [1,2]", "a list of 96 zeros and ones"),
        (f"{GPT3} --num-experts 8 --moe-layer-freq '__import__(1)'", "it is a number, or a list"),
        (f"{GPT3} --cp-comm-type a2a+p2p", "--cp-comm-type is 'a2a+p2p', which is not read"),
        (f"{GPT3} --recompute-granularity some", "it is selective or full"),
        (f"{GPT3} --recompute-granularity selective --recompute-modules core", "--recompute-modules has 'core'"),
        (f"{GPT3} --seq-length", "a value is missing after --seq-length"),
        (f"{GPT3} --optimizer-cpu-offload --optimizer-offload-fraction 0.5", "fraction 0.5 is not modelled"),
        (f"{GPT3} --x 'unfinished", "No closing quotation"),
        (
            f"{GPT3} --hybrid-override-pattern M-M*",
            "the layers 'M-M*' are not 96 letters of M, *, -, E; a letter is a layer",
        ),
        (f"{GPT3} --is-hybrid-model --hybrid-mlp-ratio half", "--hybrid-mlp-ratio is 'half'; a number is needed"),
        (f"{GPT3} --hidden-dropout none", "--hidden-dropout is 'none'; a number is needed"),
        (GPT3.replace("pretrain_gpt", "tools/pretrain_t5"), "layers of pretrain_t5.py are not read"),
        (f"{GPT3} --window-size -1,0", "--window-size is -1; at least 1 is needed"),
        (f"{GPT3} --deepspeed --zero-stage 4", "--zero-stage is '4', which is not read"),
        (f"{GPT3} --window-size all", "--window-size is 'all'; a whole number is needed"),
    ],
)
def test_commands_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve(read(text).job)
    assert message in f"{caught.value.message}; {caught.value.hint}"


SLURM = r"""#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=8
TP=4; PP=2
MODEL=${1:-8b}
if [ "$MODEL" = "8b" ]; then
  LAYERS=32; HIDDEN=4096
else
  LAYERS=80; HIDDEN=8192
fi
EXTRA=(--use-distributed-optimizer)
if [[ $TP -gt 1 ]]; then EXTRA+=(--sequence-parallel); fi
if [[ "$MODEL" == "none" ]] || [[ -n "$MODEL" ]]; then
    EXTRA+=(
        "--fp8-format hybrid"      # as one word
        # "--fp8-recipe blockwise" is for later
        "--recompute-activations"
    )
fi
options=" --num-layers $LAYERS --hidden-size $HIDDEN --num-attention-heads 32 --seq-length 8192 --vocab-size 128256 \
  --micro-batch-size 1 --global-batch-size $((32 / TP / PP * 16)) --bf16"
srun python pretrain_gpt.py $options ${EXTRA[@]} --tensor-model-parallel-size $TP \
  --pipeline-model-parallel-size $PP 2>&1 | tee log.txt
"""


def test_a_script_of_slurm_is_run_as_its_shell_does() -> None:
    job = read_megatron_arguments(SLURM, "h100_sxm").job
    assert isinstance(job.model, ModelSpec)
    assert (job.model.num_layers, job.model.hidden_size, job.num_devices, job.global_batch) == (32, 4096, 32, 64)
    assert (job.parallelism.tp, job.parallelism.pp, job.parallelism.sequence_parallel) == (4, 2, True)
    assert (job.sharding.zero, job.precision.compute, job.recompute.granularity) == (1, "fp8", "selective")
    larger = read_megatron_arguments(SLURM.replace("${1:-8b}", "70b"), "h100_sxm").job
    assert isinstance(larger.model, ModelSpec)
    assert (larger.model.num_layers, larger.model.hidden_size) == (80, 8192)


@pytest.mark.parametrize(
    ("launch", "num_devices"),
    [
        ("mpirun -np 64 -x NCCL_DEBUG=INFO python", 64),
        ("srun -N 4 --ntasks-per-node=8 --container-image=x python", 32),
        ("deepspeed --num_nodes 4 --num_gpus 8", 32),
    ],
)
def test_launchers_say_the_devices(launch: str, num_devices: int) -> None:
    result = read(GPT3.replace("torchrun --nproc_per_node 8 --nnodes 16", launch).replace("size 8", "size 4"))
    assert result.job.num_devices == num_devices
    assert result.unknown == result.unread == ()  # options of launchers are no arguments


@pytest.mark.parametrize(
    "start",
    [
        'srun -l --container-image=x sh -c "$run_cmd"',
        'srun bash -c "$run_cmd --seed \\$SLURM_PROCID"',
        "eval $run_cmd",
        "${run_cmd} 2>&1 | tee log.txt",
    ],
)
def test_a_command_in_a_variable_is_read(start: str) -> None:
    words = GPT3.replace("torchrun --nproc_per_node 8 --nnodes 16", "python -u").replace("1536", "${GBS:=1536}")
    script = f"#SBATCH --nodes=16\n#SBATCH --ntasks-per-node=8\nGBS=$((SLURM_NNODES * 64))\nOPTIONS='{words}'\n"
    result = read(f'{script}run_cmd="cd /opt/megatron && $OPTIONS"\n{start}')
    assert (result.job.num_devices, result.job.global_batch) == (128, 1024)


def test_a_tokenizer_says_the_vocabulary() -> None:
    official = GPT3.replace("--tokenizer-type GPT2BPETokenizer", "--vocab-file $3 --merge-file $4")
    result = read(official)
    assert model_of(result).vocab_size == model_of(read(GPT3)).vocab_size
    assert result.not_modelled == ("--vocab-file (taken as GPT-2's, of 50,257 tokens)",)
    hub = GPT3.replace("GPT2BPETokenizer", "HuggingFaceTokenizer --tokenizer-model /models/Llama-3.1-70B")
    assert model_of(read(hub)).vocab_size == 129024  # 128,256, padded to a multiple of 8 x 128


def test_a_model_may_take_the_place_of_the_arguments(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(GPT3.replace("pretrain_gpt", "pretrain_mamba") + " --hybrid-override-pattern M-M*")
    read_job = read_job_file(path, {"device": "h100_sxm", "model": "nvidia/Nemotron-H-56B-Base-8K"})
    assert read_job.job.model == "nvidia/Nemotron-H-56B-Base-8K"
    assert not read_job.not_modelled
    assert not read_job.unknown


@pytest.mark.parametrize(
    ("said", "windows"),
    [
        ("--window-size 128,0", [128]),
        ("--window-size 128,0 --window-attn-skip-freq 2", [None, 128]),
        ('--window-size "(128,0)" --window-attn-skip-freq "([1]*95+[0])"', [None, 128]),
    ],
)
def test_sliding_windows_are_read(said: str, windows: list[int | None]) -> None:
    layers = model_of(read(f"{GPT3} {said}")).layers
    assert [layer.attention.window_tokens for layer in layers if layer.attention] == windows
    assert sum(layer.num_layers for layer in layers) == 96


CAPACITY = "--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity"
EXPERTS = "--num-experts 8 --expert-model-parallel-size 2 --use-distributed-optimizer"


@pytest.mark.parametrize(
    ("said", "exchange"),
    [
        ("", "all_gather"),
        ("--moe-token-dispatcher-type alltoall", "all_to_all"),
        ("--moe-token-dispatcher-type flex --moe-enable-deepep", "by_node"),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep", "hybrid"),
    ],
)
def test_the_dispatcher_of_tokens_is_read(said: str, exchange: str) -> None:
    result = read(f"{GPT3} {EXPERTS} {said}")
    assert result.job.parallelism.experts_exchange == exchange
    assert result.unread == result.not_modelled == result.unknown == ()


HYBRID = (
    "torchrun --nproc_per_node 8 pretrain_mamba.py --num-layers 56 --hidden-size 4096 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --seq-length 4096 --micro-batch-size 4 --global-batch-size 32 --bf16 "
    "--disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights --vocab-size 256000 "
)


def test_layers_of_one_part_are_read() -> None:
    """The 8B hybrid of arXiv:2406.07887 (examples/mamba/train.sh): 24 of Mamba-2, 4 of attention, 28 feed-forwards."""
    model = model_of(read(f"{HYBRID} --hybrid-attention-ratio 0.08 --hybrid-mlp-ratio 0.5"))
    counts = {type(group.attention or group.feed_forward).__name__: group.num_layers for group in model.layers}
    assert counts == {"Mamba2": 24, "GroupedQueryAttention": 4, "DenseFeedForward": 28}
    assert {group.num_norms for group in model.layers} == {1}
    assert count_parameters(model).total == pytest.approx(8.66e9, rel=0.005)


def test_letters_of_a_hybrid_give_its_layers() -> None:
    """The pattern of Nemotron 3 Nano's config.json."""
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    sizes = (
        "--num-experts 128 --moe-router-topk 6 --moe-ffn-hidden-size 1856 --moe-shared-expert-intermediate-size 3712 "
    )
    sizes += "--hidden-size 2688 --num-query-groups 2 --kv-channels 128 --mamba-num-heads 64 --vocab-size 131072 "
    text = HYBRID.replace("--num-layers 56 --hidden-size 4096", "").replace("--vocab-size 256000", "")
    text = text.replace("--num-query-groups 8", "") + sizes
    read_as = read(f"{text} --hybrid-layer-pattern '{pattern}/*E'")
    published = catalog.model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    assert count_parameters(model_of(read_as)).total == pytest.approx(count_parameters(published).total, rel=1e-4)
    assert read_as.not_modelled == ("--hybrid-layer-pattern after / (multi-token prediction)",)


def test_a_layout_gives_the_layers_of_every_chunk() -> None:
    text = GPT3.replace("--num-layers 96", "--num-layers 61").replace(
        "model-parallel-size 8 --bf16", "model-parallel-size 16 --bf16"
    )
    job = read(f"{text} --pipeline-model-parallel-layout 'Et*3|(tt|)*29m|L' --mtp-num-layers 1").job
    assert job.parallelism.layers_per_stage == (3, *[2] * 29, 0, 0)
    assert (job.parallelism.virtual_stages, job.overlap.pipeline) == (2, True)
    assert resolve(job).job.schedule == "interleaved"
    with pytest.raises(InputError, match="layers_per_stage has 31 entries; pp x virtual_stages = 16 x 1"):
        read(f"{text} --pipeline-model-parallel-layout 'Et*3|(tt|)*29L'")
    with pytest.raises(InputError, match="is 'tx', which is not read"):
        read(f"{text} --pipeline-model-parallel-layout tx")
    with pytest.raises(InputError, match="which is not read"):  # not written out first
        read(f"{text} --pipeline-model-parallel-layout 'Et*3000000000|L'")


def test_what_is_not_modelled_is_apart_from_what_has_no_effect() -> None:
    result = read(f"{GPT3} --lr 1e-4 --delay-wgrad-compute --made-up-option 7 --use-distributed-optimizer")
    assert (result.unread, result.not_modelled) == (("--lr",), ("--delay-wgrad-compute",))
    assert result.unknown == ("--made-up-option",)
    moments = "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"
    result = read(f"{GPT3} {moments}")
    assert result.job.precision.moments == "bf16"
    assert result.not_modelled == ("--exp-avg-dtype unlike --exp-avg-sq-dtype (both are taken as bf16)",)


@pytest.mark.parametrize("said", ["--overlap-param-gather", "--fp8-format hybrid --fp8-param-gather"])
def test_another_stage_of_zero_takes_what_hangs_on_it_along(said: str, tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"{GPT3} --use-distributed-optimizer {said}")
    job = read_job_file(path, {"device": "h100_sxm", "sharding.zero": 0}).job
    assert resolve(job).job.sharding.zero == 0
    typed = {"device": "h100_sxm", "sharding.zero": 0, "precision.parameter_gather": "bf16"}
    with pytest.raises(InputError, match=r"precision\.parameter_gather = bf16 changes nothing here"):
        resolve(read_job_file(path, typed).job)


@pytest.mark.parametrize(
    "said",
    [
        f"{EXPERTS} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
        f"{EXPERTS} --moe-token-dispatcher-type alltoall",
        f"{EXPERTS} --moe-token-dispatcher-type alltoall {CAPACITY}",
        "--pipeline-model-parallel-layout 'Et*3|t*12|t*14|(t*13|)*4t*15L'",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --pipeline-model-parallel-size 1",
        "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    ],
)
def test_what_is_read_is_written_as_the_same_arguments(said: str) -> None:
    job = read(f"{GPT3} {said}").job
    script = megatron_script(resolve(job))
    again = read(script.replace("\\\n", " "))
    assert resolve(again.job).job.parallelism == resolve(job).job.parallelism
    assert again.job.sharding.zero == job.sharding.zero
    written = ("moments", "master_weights", "gradients")
    assert [getattr(again.job.precision, name) for name in written] == [
        getattr(job.precision, name) for name in written
    ]
    assert again.unknown == again.not_modelled == ()
