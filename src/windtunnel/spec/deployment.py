"""Where and how a model is served: devices, parallelism, replicas, and the engine with its settings."""

from typing import Literal

from windtunnel.spec.noun import Noun

MOE_BACKENDS = ("cutlass", "trtllm", "deepgemm", "triton", "marlin", "flashinfer")
"""Families of kernels that compute experts, by the names that engines' flags use; `flashinfer` is any that it wraps."""


def _check_at_least(least: int, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}; at least {least} is needed")


class Parallelism(Noun):
    """How one replica spreads over `tp * pp * attention_dp` devices.

    `tp` shards attention and dense layers. With `attention_dp` > 1 every group of `tp` devices serves requests of its
    own and all groups share the experts. `ep` groups hold different experts; inside an expert-parallel group each
    expert is sharded `tp * attention_dp / ep` ways.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    attention_dp: int = 1

    def __post_init__(self) -> None:
        _check_at_least(1, tp=self.tp, pp=self.pp, ep=self.ep, attention_dp=self.attention_dp)
        if (self.tp * self.attention_dp) % self.ep:
            raise ValueError(f"ep = {self.ep} does not divide tp x attention_dp = {self.tp * self.attention_dp}")

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.attention_dp

    @property
    def experts_tp(self) -> int:
        """Ways that one expert is sharded."""
        return self.tp * self.attention_dp // self.ep


class HostOverheads(Noun):
    """What the host adds to the device's work. Named, so that a measurement or a calibration can replace each."""

    step_s: float | None = None
    """Per step: scheduling, input preparation, sampling, output processing."""
    request_s: float | None = None
    """Per step and running request."""
    first_token_s: float | None = None
    """Per request, outside the steps: HTTP, detokenisation of the first token, the client's own; part of TTFT."""
    prompt_token_s: float | None = None
    """Per prompt token, outside the steps: tokenisation and validation; part of TTFT."""
    launch_s: float | None = None
    """Per operator of a step with prefill, which no CUDA graph covers whole: the host launches them one by one, and the
    device waits where it is faster."""
    unhidden_step_s: float | None = None
    """Per step, which asynchronous scheduling cannot hide: copying tokens out and updated inputs in."""
    unhidden_request_s: float | None = None
    """The same per sampled request."""

    def __post_init__(self) -> None:
        _check_at_least(0, **{name: getattr(self, name) for name in self.__struct_fields__})


class EngineSettings(Noun):
    """A serving engine. `None` takes the default of that engine and version on that device, from the catalog.

    Names follow vLLM; SGLang's and TensorRT-LLM's names are in brackets.
    """

    name: str = "vllm"
    version: str | None = None
    scheduler: str | None = None
    """`vllm_v1`, `sglang` or `trtllm`; `vllm_v0`, `sarathi`, `orca`, `faster_transformer` or `lightllm`; or a policy of
    one's own, `module:function`."""
    max_num_seqs: int | None = None
    """[max_running_requests, max_batch_size]"""
    max_num_batched_tokens: int | None = None
    """[chunked_prefill_size, max_num_tokens]"""
    max_prefill_tokens: int | None = None
    """Prompt tokens of one prefill batch (SGLang)."""
    long_prefill_token_threshold: int | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    """Prompts that begin alike are computed once, as long as their KV blocks are kept [radix cache, block reuse]."""
    scheduling_policy: str | None = None
    """`fcfs` or `priority`."""
    max_model_len: int | None = None
    """Longest prompt and output together; None takes the model's."""
    block_size: int | None = None
    """Tokens of one KV block [page_size, tokens_per_block]."""
    num_gpu_blocks: int | None = None
    """KV blocks of one rank; None plans them from memory."""
    gpu_memory_utilization: float | None = None
    """Share of the device's memory that the engine may use [mem_fraction_static, kv_cache_free_gpu_mem_fraction]."""
    memory_fraction_of_free: bool | None = None
    """True: the share is of what is free after loading the weights (TensorRT-LLM)."""
    reserved_bytes: int | None = None
    """Memory outside the planner's terms: context, NCCL buffers, kernels' workspaces."""
    max_cudagraph_capture_size: int | None = None
    """Largest decode batch with a CUDA graph; 0: eager."""
    cudagraph_sizes: tuple[int, ...] | None = None
    """Captured sizes; None takes the engine's own list up to `max_cudagraph_capture_size`."""
    async_scheduling: bool | None = None
    """Host work runs beside the device's step [overlap scheduler]."""
    schedule_conservativeness: float | None = None
    receive_interval_steps: int | None = None
    """Decode steps between looks at new requests [scheduler-recv-interval]."""
    batch_wait_timeout_iters: int | None = None
    """TensorRT-LLM: decode steps for which prompts may be held back; 0 or None: never."""
    batch_wait_max_tokens_ratio: float | None = None
    """TensorRT-LLM: share of `max_num_batched_tokens` at which they are not."""
    watermark_fraction: float | None = None
    """vLLM V0 and Sarathi: share of the KV blocks that admission leaves free."""
    max_waiting_steps: int | None = None
    """LightLLM: decode steps between looks at waiting requests."""
    moe_backend: str | None = None
    """One of `MOE_BACKENDS`; None takes the fastest that was measured, as an autotuned engine does
    [moe_config.backend, moe_runner_backend]."""
    host: HostOverheads = HostOverheads()

    def __post_init__(self) -> None:
        _check_at_least(
            1,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_tokens=self.max_prefill_tokens,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_gpu_blocks=self.num_gpu_blocks,
            receive_interval_steps=self.receive_interval_steps,
            cudagraph_sizes=min(self.cudagraph_sizes or (1,)),
        )
        _check_at_least(
            0,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            reserved_bytes=self.reserved_bytes,
            max_cudagraph_capture_size=self.max_cudagraph_capture_size,
            batch_wait_timeout_iters=self.batch_wait_timeout_iters,
            watermark_fraction=self.watermark_fraction,
            max_waiting_steps=self.max_waiting_steps,
            batch_wait_max_tokens_ratio=self.batch_wait_max_tokens_ratio,
            schedule_conservativeness=self.schedule_conservativeness,
        )
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; more than 0 and at most 1 is needed"
            )
        if self.scheduling_policy not in (None, "fcfs", "priority"):
            raise ValueError(f"scheduling_policy is {self.scheduling_policy!r}; known: fcfs, priority")
        if self.moe_backend not in (None, *MOE_BACKENDS):
            raise ValueError(f"moe_backend is {self.moe_backend!r}; known: {', '.join(MOE_BACKENDS)}")


class Deployment(Noun):
    """`replicas` equal copies of an engine, each over `parallelism.num_devices` devices."""

    device: str
    """A catalog name or a YAML file."""
    node: str | None = None
    """A catalog name or a YAML file; None takes the usual node of the device."""
    parallelism: Parallelism = Parallelism()
    replicas: int = 1
    router: Literal[
        "round_robin",
        "random",
        "power_of_two",
        "least_outstanding",
        "least_kv",
        "session_affinity",
        "prefix_affinity",
        "least_waiting",
    ] = "round_robin"
    """Which replica a request goes to: the next in turn, one drawn, the less busy of two drawn, that with the fewest
    requests, that with the fewest KV blocks in use, that of the session's former turns, or that with most of the prompt
    in its cache (what these two cannot decide goes to the replica with the fewest requests), or that with the fewest
    requests waiting, which is what Vidur calls lor."""
    engine: EngineSettings = EngineSettings()
    calibration: str | None = None
    """A calibration of the catalog or a YAML file, or `none`; None takes the shipped one of engine and device."""
    price_usd_per_hour: float | None = None
    """Of one device; None takes the catalog's list price."""
    busy_w: float | None = None
    """Power of one device that runs steps; None takes the catalog's thermal design power."""
    idle_fraction: float = 0.15
    """Of `busy_w`, what an idle device draws. Measured on an A100 SXM: 62 W of 400 W."""

    def __post_init__(self) -> None:
        _check_at_least(1, replicas=self.replicas)
        _check_at_least(0, price_usd_per_hour=self.price_usd_per_hour, busy_w=self.busy_w)
        if not 0 <= self.idle_fraction <= 1:
            raise ValueError(f"idle_fraction is {self.idle_fraction}; from 0 to 1 is needed")

    @property
    def num_devices(self) -> int:
        return self.replicas * self.parallelism.num_devices
