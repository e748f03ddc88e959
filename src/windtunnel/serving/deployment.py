"""Schema of a deployment: devices, parallelism, replicas, and the engine with its settings."""

from functools import partial
from typing import Annotated, Literal

import msgspec

from windtunnel import schema
from windtunnel.metrics.power import PowerTerms
from windtunnel.model.exchange import EXCHANGES
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.sampling import KERNELS
from windtunnel.network.settings import ClusterNetwork
from windtunnel.plugins import Registry
from windtunnel.pricing.choices import ATTENTION_BACKENDS, MOE_BACKENDS, estimators
from windtunnel.serving.codes import LONGEST_PREFIX_MATCH, QUEUE_ORDERS, ROUTERS, Role, Router, ScalingMetric

MAX_REPLICAS, MAX_DRAFT_TOKENS = 100_000, 1_000
"""Bounds of what is simulated."""
NumReplicas = Annotated[int, partial(schema.check_between, 1, MAX_REPLICAS)]
BALANCE_TIMEOUT_ITERS, BALANCE_BATCHING_ITERS = 50, 10
"""Defaults of TensorRT-LLM where it balances attention data-parallel ranks (1.2 `AttentionDpConfig`)."""

MOST_LOOKS = 1_000_000
"""Looks of an autoscaler that may have to agree before it changes anything."""
SCHEDULING_POLICIES = (*QUEUE_ORDERS, LONGEST_PREFIX_MATCH)
"""Built-in values of `EngineSettings.scheduling_policy`."""
OWN_ORDERS = Registry("windtunnel.queue_orders", None, "queue order", taken=SCHEDULING_POLICIES)
"""Orders of waiting requests in Python that installed packages offer by name."""


def is_own_order(name: str) -> bool:
    """Whether `name` is a queue order in Python: `module:function`, or one that an installed package offers."""
    return ":" in name or name in OWN_ORDERS


class HostOverheads(schema.Schema):
    """Host time beside the device's work; a measurement or a calibration can replace each term.

    The client's own time is not among it (`workload.client.Client`).
    """

    step_s: schema.NonNegative | None = None
    """Per step: scheduling, input preparation, sampling, output processing."""
    request_s: schema.NonNegative | None = None
    """Per step and running request."""
    first_token_s: schema.NonNegative | None = None
    """Per request, outside the steps: HTTP, detokenisation of the first token; part of TTFT."""
    stream_s: schema.NonNegative | None = None
    """Per other request whose tokens are being streamed: the API server handles a token of each before a new request;
    part of TTFT."""
    prompt_token_s: schema.NonNegative | None = None
    """Per prompt token, outside the steps: tokenisation and validation; part of TTFT."""
    chat_s: schema.NonNegative | None = None
    """Per request of a client that asks for chats: the API server's one process reads its template; part of TTFT."""
    launch_s: schema.NonNegative | None = None
    """Per kernel, or piece, of a step with prefill, which no single CUDA graph covers: the host launches them one by
    one, and a faster device waits."""
    unhidden_step_s: schema.NonNegative | None = None
    """Per step, not hidden by asynchronous scheduling: copying tokens out and updated inputs in."""
    unhidden_request_s: schema.NonNegative | None = None
    """Per sampled request, not hidden either."""
    kernel_gap_s: schema.NonNegative | None = None
    """Per kernel of a step: from the end of the one before it in the same graph, beyond what it takes alone."""

    def launched(self, ratio: float | None) -> "HostOverheads":
        """Return the overheads of servers that take `ratio` times as long to launch a kernel; None: as long."""
        if ratio is None or self.launch_s is None:
            return self
        return msgspec.structs.replace(self, launch_s=self.launch_s * ratio)


class Speculative(schema.Schema):
    """Speculative decoding: `num_draft_tokens` are guessed for every request and verified in one step."""

    method: Literal["mtp", "eagle", "draft_model", "ngram"]
    """`mtp`: the model's own draft layer, run once a token; `eagle`: a layer trained apart; `draft_model`: a smaller
    model; `ngram`: looked up in the text so far, at no cost."""
    num_draft_tokens: Annotated[int, partial(schema.check_between, 1, MAX_DRAFT_TOKENS)]
    acceptance_fraction: float | tuple[float, ...]
    """Share of draft tokens that are right if those before them are: one for all, or one for each position."""
    draft_model: str | None = None
    """A catalog name, of method `draft_model`."""

    def check(self) -> None:
        for share in self.acceptance_by_position:
            schema.check_fraction(acceptance_fraction=share)
        if len(self.acceptance_by_position) != self.num_draft_tokens:
            raise ValueError(
                f"acceptance_fraction has {len(self.acceptance_by_position)} entries for "
                f"{self.num_draft_tokens} draft tokens"
            )
        if (self.method == "draft_model") != (self.draft_model is not None):
            raise ValueError("draft_model goes with method draft_model, and only with it")

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        if isinstance(self.acceptance_fraction, tuple):
            return self.acceptance_fraction
        return (self.acceptance_fraction,) * self.num_draft_tokens

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a step: 1 + a1 + a1 a2 + ..., with one rate (1 - a^(k + 1)) / (1 - a).

        Source: Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative Decoding (2023),
        equation 1.
        """
        mean, accepted = 1.0, 1.0
        for share in self.acceptance_by_position:
            accepted *= share
            mean += accepted
        return mean


class KvTier(schema.Schema):
    """Memory below the device's that keeps KV blocks: the host's, a disk, a store in the network.

    Computed blocks are written there beside the device's work, and loaded again once the device has evicted them.
    """

    capacity_bytes: schema.AtLeastOne | None = None
    """Of all devices of a replica, or of the deployment where `shared_by` says so [kv_offloading_size]."""
    capacity_ratio: schema.Positive | None = None
    """Multiple of the KV cache on the devices, in place of `capacity_bytes` [hicache-ratio]."""
    bandwidth_bytes_per_s: Annotated[float, partial(schema.check_at_least, 1)] | None = None
    """Loading bandwidth to each device; None takes the node's link to host memory."""
    name: str = "host"
    shared_by: Literal["replica", "deployment"] = "replica"

    def check(self) -> None:
        if self.name == "device":
            raise ValueError("a KV tier cannot be named 'device': that is the pool above all tiers")
        if (self.capacity_bytes is None) == (self.capacity_ratio is None):
            raise ValueError(f"the KV tier {self.name!r} needs either capacity_bytes or capacity_ratio")
        if self.capacity_ratio is not None and self.shared_by == "deployment":
            raise ValueError(f"the KV tier {self.name!r} of the deployment needs capacity_bytes")


class Lora(schema.Schema):
    """LoRA adapters that a server holds beside its model."""

    rank: schema.AtLeastOne = 16
    """Rank of all adapters: slots have room for it, and kernels compute it [max-lora-rank]."""
    target_modules: tuple[str, ...] | None = None
    """Projections with adapters, of `qkv_proj`, `o_proj`, `gate_up_proj`, `up_proj` and `down_proj`; None: all that the
    model has [lora-target-modules]."""
    max_loras: schema.AtLeastOne | None = None
    """Adapters of one batch, and slots for them in the device's memory; None takes the engine's default
    [max-loras-per-batch]."""
    max_cpu_loras: schema.AtLeastOne | None = None
    """Adapters in host memory; None takes the engine's default [max-loaded-loras]."""
    fully_sharded: bool = False
    """Tensor-parallel ranks share both matrices of an adapter, and exchange the products of the first
    [fully-sharded-loras]."""
    host_bytes_per_s: schema.Positive | None = None
    """Rate at which adapters are copied into slots; None takes the node's link to host memory."""
    disk_bytes_per_s: schema.Positive = 2e9
    """Rate at which adapters are read into host memory. The default is assumed: a solid-state disk."""

    def check(self) -> None:
        if self.max_loras and self.max_cpu_loras and self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras is {self.max_cpu_loras}; at least max_loras = {self.max_loras} is needed")


WindowKv = Literal["full", "shared_pool", "own_pool"]

CHOICES = {
    "attention_backend": ATTENTION_BACKENDS,
    "moe_backend": MOE_BACKENDS,
    "sampler": tuple(KERNELS),
    "all2all_backend": EXCHANGES,
    "backend": ("pytorch", "tensorrt"),
}
"""Known values of fields of `EngineSettings`."""


class EngineSettings(schema.Schema):
    """A serving engine. `None` takes the default of that engine and version on that device, from the catalog.

    Names follow vLLM; SGLang's and TensorRT-LLM's names are in brackets.
    """

    name: str = "vllm"
    version: str | None = None
    scheduler: str | None = None
    """`vllm_v1`, `sglang`, `trtllm` or `trtllm_max_utilization`; `vllm_v0`, `sarathi`, `orca`, `faster_transformer` or
    `lightllm`; or a policy of one's own: `module:function`, or the name of one that an installed package offers (entry
    points in `windtunnel.schedulers`)."""
    max_num_seqs: schema.AtLeastOne | None = None
    """[max_running_requests, max_batch_size]"""
    max_num_batched_tokens: schema.AtLeastOne | None = None
    """[chunked_prefill_size, max_num_tokens]"""
    max_prefill_tokens: schema.AtLeastOne | None = None
    """Prompt tokens of one prefill batch (SGLang)."""
    long_prefill_token_threshold: schema.Whole | None = None
    enable_chunked_prefill: bool | None = None
    scheduler_reserve_full_isl: bool | None = None
    """Admit a request only if blocks are free for its whole prompt, not for its first chunk alone (vLLM)."""
    enable_prefix_caching: bool | None = None
    """Compute a beginning that prompts share once, while its KV blocks are kept [radix cache, block reuse]."""
    kv_tiers: tuple[KvTier, ...] | None = None
    """Fastest first; None: evicted KV blocks are lost, and a preempted request is computed again."""
    kv_load_overlaps: bool | None = None
    """True: blocks load layer by layer beside the step that needs them (SGLang's HiCache); False: the step waits for
    them (LMCache)."""
    scheduling_policy: str | None = None
    """First waiting request: the oldest (`fcfs`), of least priority (`priority`), with the shortest prompt
    (`shortest`), with the earliest deadline for its first token (`deadline`: its tenant's SLO), or of the tenant with
    the least service so far (`fair_share`); of equal ones the oldest. SGLang's `lpm` puts requests with more cached
    tokens first. `module:function` or the name of an installed one is an order in Python."""
    max_model_len: schema.AtLeastOne | None = None
    """Longest prompt and output together; None takes the model's."""
    block_size: schema.AtLeastOne | None = None
    """Tokens of one KV block [page_size, tokens_per_block]."""
    kv_cache_memory_bytes: schema.AtLeastOne | None = None
    """Memory of the KV cache on each device; None: what `gpu_memory_utilization` leaves [kv-cache-memory-bytes]."""
    num_gpu_blocks: schema.AtLeastOne | None = None
    """KV blocks of one rank; None plans them from memory."""
    max_kv_tokens: schema.AtLeastOne | None = None
    """Most tokens of one rank's KV cache; None: as many as memory holds [max-total-tokens,
    kv_cache_config.max_tokens]."""
    window_kv: WindowKv | None = None
    """KV of layers with a sliding window: `full`, every token, as in other layers [disable-hybrid-kv-cache-manager,
    disable-hybrid-swa-memory, no max_attention_window]; `shared_pool`, the window alone, in groups of layers that share
    one block pool with the others (vLLM); `own_pool`, the window alone in a block pool of its own (SGLang,
    TensorRT-LLM)."""
    window_pool_ratio: schema.PositiveFraction | None = None
    """Tokens of the windows' own pool for each token of the other layers' pool [swa-full-tokens-ratio]; None: the
    window's length over `max_model_len`."""
    gpu_memory_utilization: schema.PositiveFraction | None = None
    """Share of the device's memory that the engine may use [mem_fraction_static, kv_cache_free_gpu_mem_fraction]."""
    memory_fraction_of_free: bool | None = None
    """True: the share is of the memory that is free after loading the weights (TensorRT-LLM)."""
    reserved_bytes: schema.Whole | None = None
    """Memory outside the planner's terms: context, NCCL buffers, kernels' workspaces."""
    max_cudagraph_capture_size: schema.Whole | None = None
    """Largest decode batch with a CUDA graph; 0: eager."""
    cudagraph_sizes: tuple[int, ...] | None = None
    """Captured sizes; None takes the engine's own list up to `max_cudagraph_capture_size`."""
    cudagraph_padding: bool | None = None
    """A decode batch is padded to the next captured size; False: one of another size runs without a graph
    [cuda_graph_config.enable_padding, disable-cuda-graph-padding]."""
    piecewise_cudagraphs: bool | None = None
    """Steps with prefill run in graphs too, all but attention, up to that many tokens [cudagraph_mode PIECEWISE or
    FULL_AND_PIECEWISE, enable_piecewise_cuda_graph]; SGLang's up to any number, with latent attention up to 2,048."""
    full_cudagraphs: bool | None = None
    """A graph holds a whole decode step; False: with `piecewise_cudagraphs`, decode steps run in pieces, too
    [cudagraph_mode PIECEWISE]."""
    piecewise_sizes: tuple[int, ...] | None = None
    """TensorRT-LLM: tokens for which piecewise graphs are captured [torch_compile_config.capture_num_tokens]; None: the
    sizes of decode."""
    async_scheduling: bool | None = None
    """Host work runs beside the device's step [overlap scheduler]."""
    schedule_conservativeness: schema.NonNegative | None = None
    receive_interval_steps: schema.AtLeastOne | None = None
    """Decode steps between looks at new requests [scheduler-recv-interval]."""
    batch_wait_timeout_iters: schema.Whole | None = None
    """TensorRT-LLM: decode steps for which prompts may wait; 0 or None: never."""
    batch_wait_max_tokens_ratio: schema.NonNegative | None = None
    """TensorRT-LLM: share of `max_num_batched_tokens` at which prompts no longer wait."""
    attention_dp_timeout_iters: schema.Whole | None = None
    """TensorRT-LLM: steps for which prompts may wait until every attention data-parallel rank has one, while all of
    them decode; 0 or None: never [attention_dp_config.timeout_iters where enable_balance is on]."""
    attention_dp_batching_wait_iters: schema.Whole | None = None
    """TensorRT-LLM: further steps for which they then wait [attention_dp_config.batching_wait_iters]."""
    watermark_fraction: schema.NonNegative | None = None
    """vLLM V0 and Sarathi: share of the KV blocks that admission leaves free."""
    max_waiting_steps: schema.Whole | None = None
    """LightLLM: decode steps between looks at waiting requests."""
    backend: str | None = None
    """TensorRT-LLM: `pytorch`, or `tensorrt`, an engine that was built before and is launched by C++ [backend]."""
    attention_backend: str | None = None
    """One of `ATTENTION_BACKENDS`; None takes the engine's own choice in the measurements [attention-backend,
    attention-config.use_trtllm_attention]."""
    moe_backend: str | None = None
    """One of `MOE_BACKENDS`; None takes the fastest measured, as an autotuned engine does [moe_config.backend,
    moe_runner_backend]."""
    all2all_backend: str | None = None
    """Exchange of tokens between ranks that hold whole experts, one of `EXCHANGES`: `all_gather` and a reduce-scatter;
    DeepEP's kernels; DeepGEMM's Mega MoE, which computes the experts too; one- or two-sided NVLink kernels of
    TensorRT-LLM and FlashInfer. Without attention data parallelism only SGLang and Mega MoE exchange tokens
    [moe-a2a-backend, deepep-mode, moe-backend]."""
    num_redundant_experts: schema.Whole | None = None
    """Further copies of the most used experts of each layer, placed so that ranks compute equally many tokens
    [eplb_config.num_redundant_experts, ep-num-redundant-experts, load_balancer.num_slots less the experts]."""
    enable_eplb: bool | None = None
    """Place the experts on ranks by the load that they had, also without further copies [enable-eplb]."""
    two_batch_overlap: bool | None = None
    """Compute a step in two halves, so that one computes while DeepEP exchanges the tokens of the other [enable-dbo,
    enable-two-batch-overlap]."""
    single_batch_overlap: bool | None = None
    """Combine by DeepEP's low-latency kernels beside the experts' second product, and compute shared experts beside the
    exchange of tokens [enable-single-batch-overlap]."""
    overlap_decode_tokens: schema.AtLeastOne | None = None
    """Least tokens of a rank for which a step that only decodes is split in two [dbo-decode-token-threshold]."""
    overlap_prefill_tokens: schema.AtLeastOne | None = None
    """Likewise for a step with prefill [dbo-prefill-token-threshold]."""
    sampler: str | None = None
    """Kernel that filters logits by top-k and top-p: `sort`, PyTorch's; `triton`, vLLM's from 8 rows on;
    `triton_split`, the same with few rows split; `flashinfer` [VLLM_USE_FLASHINFER_SAMPLER, sampling-backend,
    disable_flashinfer_sampling]."""
    fused_all_reduce: bool | None = None
    """FlashInfer's all-reduce, TensorRT-LLM's kernel, may be called in place of the engine's own, and computes the norm
    behind it [fuse_allreduce_rms, flashinfer-allreduce-fusion-backend]."""
    fused_all_reduce_bytes: schema.Whole | None = None
    """Largest message of a fused all-reduce; None: any [fi_allreduce_fusion_max_size_mb]."""
    shared_experts_beside_tokens: schema.Whole | None = None
    """Tokens of a step up to which shared experts run on a stream of their own beside the routed ones, which take
    longer; 0: one after the other [VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD]."""
    tf32: bool | None = None
    """Multiply fp32 operands on tensor cores, not on CUDA cores [VLLM_FLOAT32_MATMUL_PRECISION=high,
    enable-tf32-matmul]."""
    scaled_sparse_kv: bool | None = None
    """Keep an fp8 KV cache of sparse latent attention (DeepSeek-V3.2, GLM-5) as FlashMLA does (`fp8_ds_mla`): with an
    fp32 scale for each 128 values and the rotated key in bf16, 656 bytes a token and layer. False: all in fp8, 576."""
    compresses_in_one_block: bool | None = None
    """Compress 128 tokens of DeepSeek-V4's cache in one block of threads (vLLM to 0.21): a step in which a request
    completes so many waits 0.3 ms in each of these layers."""
    swa_bounded_replay: bool | None = None
    """Compute only the last window of a prompt in layers behind the last that keeps keys of all tokens (DeepSeek-V4.1)
    [swa-bounded-replay, enable-decoder-swa-bounded-replay]."""
    ngram_tables_on_host: bool | None = None
    """Keep tables of n-grams (DeepSeek-V4.1's Engram) in the host's memory, not in the devices'. That each lookup then
    crosses PCIe is not simulated [engram-config.cpu-offload, engram-config.placement]."""
    max_num_encoder_input_tokens: schema.AtLeastOne | None = None
    """vLLM: embeddings of images that a step encodes; a prompt's chunk ends before an image beyond them. None: as many
    as `max_num_batched_tokens`, or as the largest image has."""
    encoder_cache_tokens: schema.AtLeastOne | None = None
    """vLLM: embeddings of images that are kept, so that an image that comes again is not encoded again. None: as
    `max_num_encoder_input_tokens`. Where images never come twice and neither is given, steps encode without limit."""
    encoder_cache_bytes: schema.Whole | None = None
    """SGLang: embeddings of images that are kept, those used last, so that an image that comes again is not encoded
    again [SGLANG_VLM_CACHE_SIZE_MB]. Simulated where images come again, or where it is given."""
    encoder_cache_unit: Literal["image", "request"] | None = None
    """SGLang: whether each image is looked up by itself, or all of a request together, which are then encoded with the
    first chunk of the prompt."""
    speculative: Speculative | None = None
    """None: every step gives one token."""
    lora: Lora | None = None
    """None: the model is served without LoRA adapters [enable-lora]."""
    host: HostOverheads = HostOverheads()

    def check(self) -> None:
        sizes = {name: min(getattr(self, name) or (1,)) for name in ("cudagraph_sizes", "piecewise_sizes")}
        schema.check_at_least(1, **sizes)
        names = [tier.name for tier in self.kv_tiers or ()]
        if len(set(names)) < len(names):
            raise ValueError(f"kv_tiers has two tiers of one name: {', '.join(names)}")
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in (None, *known):
                raise ValueError(f"{name} is {value!r}; known: {', '.join(known)}")
        order = self.scheduling_policy
        if order not in (None, *SCHEDULING_POLICIES) and not is_own_order(str(order)):
            known = (*SCHEDULING_POLICIES, *OWN_ORDERS.names(), "module:function")
            raise ValueError(f"scheduling_policy is {order!r}; known: {', '.join(known)}")


class TargetScaling(schema.Schema, tag="target", tag_field="type"):
    """Replicas that bring a metric to its target, by the rule and defaults of Kubernetes' horizontal autoscaler."""

    metric: ScalingMetric
    """Mean over serving replicas: requests waiting or running, waiting, or running; share of KV blocks in use. Requests
    that no replica has taken yet count as waiting."""
    target: schema.Positive
    max_replicas: NumReplicas
    min_replicas: NumReplicas = 1
    interval_s: schema.Positive = 15.0
    """Time between two looks at the metric."""
    tolerance_fraction: schema.NonNegative = 0.1
    """Distance from the target, as a share, within which nothing changes."""
    scale_up_after_s: schema.NonNegative = 0.0
    """Replicas are started once every look during this time has found too few."""
    scale_down_after_s: schema.NonNegative = 300.0
    """Replicas are stopped once every look during this time has found too many."""

    def check(self) -> None:
        for name in ("scale_up_after_s", "scale_down_after_s"):
            if getattr(self, name) > MOST_LOOKS * self.interval_s:
                raise ValueError(f"{name} is {getattr(self, name):g}; it spans more than {MOST_LOOKS:,} looks")
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}; at least min_replicas = {self.min_replicas}")
        if self.metric == "kv_use" and self.target > 1:
            raise ValueError(f"target is {self.target}; of kv_use it is a share, at most 1")


class ReplicaChange(schema.Schema):
    """Number of replicas from `at_s` on."""

    at_s: schema.NonNegative
    replicas: NumReplicas


class ScheduledScaling(schema.Schema, tag="schedule", tag_field="type"):
    """Replicas by the clock; until the first change the deployment's number."""

    changes: tuple[ReplicaChange, ...]

    def check(self) -> None:
        times = [change.at_s for change in self.changes]
        if not times:
            raise ValueError("changes is empty")
        if sorted(set(times)) != times:
            raise ValueError("changes must be in order of at_s, one at a time")


def bounds_of(replicas: int, autoscaling: TargetScaling | ScheduledScaling | None) -> tuple[int, ...]:
    """Return numbers of replicas whose least and greatest bound the number at any time."""
    match autoscaling:
        case TargetScaling():
            return replicas, autoscaling.min_replicas, autoscaling.max_replicas
        case ScheduledScaling():
            return replicas, *(change.replicas for change in autoscaling.changes)
        case None:
            return (replicas,)


class Pool(schema.Schema):
    """Equal replicas with one role; fields left out are the deployment's."""

    name: str
    role: Role = "both"
    """`prefill` hands requests over after their prefill, `decode` takes them, `both` serves whole requests; `encode`
    holds the vision tower alone and sends the embeddings of images to the others."""
    device: str | None = None
    node: str | None = None
    parallelism: Parallelism | None = None
    replicas: NumReplicas = 1
    engine: EngineSettings = EngineSettings()
    """Settings that differ from the deployment's, one by one. The engine is the deployment's unless another is named;
    `vllm`, the default name, means the deployment's too. Beside pools with the deployment's engine, a pool of another
    engine takes over the settings that both read, and neither version nor calibration."""
    price_usd_per_hour: schema.NonNegative | None = None
    autoscaling: TargetScaling | ScheduledScaling | None = None
    """None: `replicas` all the time."""

    @property
    def fewest_replicas(self) -> int:
        """Smallest number of replicas at any time."""
        return min(bounds_of(self.replicas, self.autoscaling))

    @property
    def most_replicas(self) -> int:
        """Largest number of replicas at any time."""
        return max(bounds_of(self.replicas, self.autoscaling))


class Fault(schema.Schema):
    """Failure of one replica, whose devices are back after `repair_s`."""

    at_s: schema.NonNegative
    replica: schema.Whole
    repair_s: schema.NonNegative


class Faults(schema.Schema):
    """Replicas that fail: drawn, scheduled, or both. A replica fails when one of its devices does."""

    device_mtbf_s: schema.Positive | None = None
    """Mean time between failures of one device; a replica of n devices fails n times as often."""
    mttr_s: schema.Positive | None = None
    """Mean time to repair; then the replica starts again."""
    scheduled: tuple[Fault, ...] = ()
    retry_s: schema.NonNegative = 1.0
    """Time from a failure until the router sends its requests to other replicas."""
    retry: Literal["resume", "start_over"] = "resume"
    """`resume`: the prompt is sent again with the tokens streamed so far and continues (NVIDIA Dynamo's request
    migration); `start_over`: the prompt alone, as a client's retry."""

    def check(self) -> None:
        if (self.device_mtbf_s is None) != (self.mttr_s is None):
            raise ValueError("device_mtbf_s and mttr_s go together")
        if self.device_mtbf_s is None and not self.scheduled:
            raise ValueError("no faults: device_mtbf_s and mttr_s, or scheduled ones, are needed")


LINK_EFFICIENCY = 0.72
"""Share of the links' published bandwidth that large transfers of KV reach. Mooncake measured 0.71 for 4.5 GB between
H800 nodes with eight 200 Gb/s interfaces (docs of the vLLM v1 connector, commit 3b5a594)."""
TRANSFER_LATENCY_S = 4e-4
"""Latency of an empty transfer, extrapolated from the same measurements."""

TransferLink = Literal["scale_out", "scale_up"]


class Transfer(schema.Schema):
    """Transfer of requests and their KV cache from the replica that prefills them to the one that decodes them."""

    bytes_per_s: schema.Positive | None = None
    """Bandwidth between two ranks, one direction; None takes the nodes' links of all devices of a rank, times
    `link_efficiency`."""
    link: TransferLink = "scale_out"
    """Links between nodes, or inside a node that holds both pools."""
    link_efficiency: schema.PositiveFraction | None = None
    """Share of the links' published bandwidth that large transfers reach; None takes that of the calibration of the
    engine that decodes, or `LINK_EFFICIENCY`."""
    latency_s: schema.NonNegative | None = None
    """Latency of an empty transfer; None takes that of the same calibration, or `TRANSFER_LATENCY_S`."""
    overlap: bool = False
    """True: each layer's KV is sent as soon as it is computed, so that only the last layer's follows the prefill."""
    first_token: Literal["prefill", "decode"] = "prefill"
    """Side that samples the first output: the one that computed the prompt (SGLang, TensorRT-LLM), or the one that
    decodes, which computes the last prompt token again (vLLM behind its proxies)."""
    streamed_by: Literal["prefill", "decode"] | None = None
    """Side that sends that output to the client: `prefill`, as soon as the prompt is computed; `decode`, when the
    request enters a batch there, after the transfer and any wait. None: as the engine does."""
    router: Router = "round_robin"
    """Chooses the decode replica of a prefilled request."""
    local_prefill_tokens: schema.Whole = 0
    """Tokens up to which prompts are prefilled where they decode."""

    def check(self) -> None:
        if self.first_token == "decode" and self.streamed_by == "prefill":
            raise ValueError("first_token is decode, so that streamed_by cannot be prefill")


class Profile(schema.Schema):
    """Operators measured with `windtunnel profile`, in place of the shipped tables."""

    folder: str
    estimator: str = "interpolation"
    """Method between measured points: `interpolation` reads the tables as they are; the others fit them first; `auto`
    takes for each table the one with the least error on points left out."""

    def check(self) -> None:
        known = estimators()
        if self.estimator not in known:
            raise ValueError(f"estimator is {self.estimator!r}; known: {', '.join(known)}")


BUILT_IN_ROUTERS = (*ROUTERS, "deferred")
OWN_ROUTERS = Registry("windtunnel.routers", None, "router", taken=BUILT_IN_ROUTERS)
"""Routers in Python that installed packages offer by name."""


def is_own_router(name: str) -> bool:
    """Whether `name` is a router in Python: `module:function`, or one that an installed package offers."""
    return ":" in name or name in OWN_ROUTERS


class Deployment(schema.Schema):
    """Equal copies of an engine, `replicas` of them over `parallelism.num_devices` devices each; or several `pools`."""

    device: str
    """A catalog name or a YAML file."""
    node: str | None = None
    """A catalog name or a YAML file; None takes the usual node of the device."""
    parallelism: Parallelism = Parallelism()
    replicas: NumReplicas = 1
    router: str = "round_robin"
    """Chooses the replica of a request, in the order of `Router`: the next in turn, one drawn at random, the less busy
    of two drawn, the one with the fewest requests, with the fewest KV blocks in use, of the session's former turns,
    with most of the prompt in its cache, with the fewest waiting requests (Vidur's lor), or with the request's LoRA
    adapter in a slot (the three affinities fall back on the fewest requests). `deferred` keeps requests at the router,
    in order, until some replica has fewer than `router_limit`, and takes the one with the fewest. `module:function` is
    the user's router, and so is one that an installed package offers by name (entry points in `windtunnel.routers`)."""
    router_limit: schema.AtLeastOne | None = None
    """`deferred`: limit of requests at a replica; None takes as many as it runs at once."""
    autoscaling: TargetScaling | ScheduledScaling | None = None
    """None: `replicas` all the time."""
    faults: Faults | None = None
    start_s: schema.NonNegative | None = None
    """Time from the launch or repair of a replica until it serves: loading weights, capturing graphs, booting its
    node. The first replicas serve at once."""
    engine: EngineSettings = EngineSettings()
    profile: Profile | None = None
    """Operators measured on the device; None takes the shipped ones, or the device's roofline."""
    calibration: str | None = None
    """A calibration of the catalog or a YAML file, or `none`; None takes the shipped one of engine and device if the
    version lies among those that it was fitted to."""
    settings_assumed: bool = False
    """True: the server's or the client's flags were not recorded; intervals are as wide as errors of such runs."""
    price_usd_per_hour: schema.NonNegative | None = None
    """Price of one device; None takes the catalog's list price."""
    power: PowerTerms = PowerTerms()
    pools: tuple[Pool, ...] = ()
    """Replicas of several kinds, instead of `replicas` of one."""
    transfer: Transfer = Transfer()
    """KV transfer between pools that prefill and pools that decode."""
    network: ClusterNetwork | None = None
    """Network between the nodes of a replica; None takes closed forms over their published links."""

    def check(self) -> None:
        if self.router not in BUILT_IN_ROUTERS and not is_own_router(self.router):
            known = (*BUILT_IN_ROUTERS, *OWN_ROUTERS.names(), "module:function")
            raise ValueError(f"router is {self.router!r}; known: {', '.join(known)}")
        if self.router_limit is not None and self.router != "deferred":
            raise ValueError("router_limit goes with the router deferred, and only with it")
        if self.pools:
            _check_pools(self.pools, self.replicas)
            if self.parallelism != Parallelism() and all(pool.parallelism is not None for pool in self.pools):
                raise ValueError("parallelism is for pools without one of their own, and every pool has one")
            if self.autoscaling:
                raise ValueError("autoscaling and pools exclude each other: every pool has an autoscaling of its own")

    @property
    def groups(self) -> tuple[Pool, ...]:
        """The pools that serve tokens; where none are given, one that is the whole deployment."""
        pools = tuple(pool for pool in self.pools if pool.role != "encode")
        return pools or (Pool(name="", replicas=self.replicas, autoscaling=self.autoscaling),)

    @property
    def encoder(self) -> Pool | None:
        """The pool that encodes images for the others; None where they do it themselves."""
        return next((pool for pool in self.pools if pool.role == "encode"), None)

    @property
    def num_devices(self) -> int:
        """Devices of all replicas, as many as there are at any time."""
        pools = self.pools or self.groups
        return sum(pool.most_replicas * (pool.parallelism or self.parallelism).num_devices for pool in pools)

    @property
    def fewest_replicas(self) -> int:
        """Smallest number of replicas at any time."""
        return sum(pool.fewest_replicas for pool in self.groups)

    @property
    def most_replicas(self) -> int:
        """Largest number of replicas at any time."""
        return sum(pool.most_replicas for pool in self.groups)


def _check_pools(pools: tuple[Pool, ...], replicas: int) -> None:
    """Raise ValueError for pools that do not go together."""
    names = [pool.name for pool in pools]
    roles = {pool.role for pool in pools}
    if len(set(names)) < len(names):
        raise ValueError(f"two pools are called {next(name for name in names if names.count(name) > 1)!r}")
    if roles == {"encode"}:
        raise ValueError("no pool serves tokens: one with role both, or prefill and decode, is needed beside encode")
    if sum(pool.role == "encode" for pool in pools) > 1:
        raise ValueError("two pools have role encode; one with more replicas does the same")
    if replicas != 1:
        raise ValueError("replicas and pools exclude each other: every pool has replicas of its own")
    if "prefill" in roles and not roles & {"decode", "both"}:
        raise ValueError("no pool decodes: one with role decode or both is needed")
    if "decode" in roles and "prefill" not in roles:
        raise ValueError("no pool prefills for those that decode: one with role prefill is needed")
