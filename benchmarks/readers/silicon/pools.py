"""Measured serving runs with separate pools for prefill and decode: the strings in which their settings were recorded.

A pool is written as `workers=1 tp=4 ep=4 dp_attn=True max_num_seqs=16 max_batched_tokens=16384 mem_fraction=0.4 ...`,
one such string for the servers that prefill and one for those that decode.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from readers.silicon.rows import Row, image_version, is_default
from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.parallelism import Parallelism
from windtunnel.pricing.choices import MOE_BACKENDS
from windtunnel.serving.deployment import EngineSettings, Pool, Transfer
from windtunnel.serving.engines.contract import behaviour_of

PREFILL_POOL, DECODE_POOL = "prefill_pool", "decode_pool"

TRTLLM_OF_DYNAMO: Mapping[str, str] = {
    "0.5.1": "1.1.0rc5",
    "0.7.0": "1.2.0rc2",
    "0.7.0.post1": "1.2.0rc3",
    "0.7.0.post2": "1.2.0rc3",
    "0.8.1": "1.2.0rc6.post1",
    "0.8.1.post1": "1.2.0rc6.post2",
    "0.8.1.post2": "1.2.0rc6.post2",
    "0.8.1.post3": "1.2.0rc6.post3",
    "1.1.0-dev.2": "1.3.0rc9",
}
"""Version of NVIDIA Dynamo in the tag of its image `tensorrtllm-runtime` -> the TensorRT-LLM in it.

Source: ai-dynamo/dynamo, docs/reference/release-artifacts.md (images) and docs/reference/support-matrix.md (backend
dependencies), at commit 00552b2. Two are in neither: 0.5.1 is taken as 0.6.0, the next release, and 0.7.0.post2 as the
releases before and after it, 0.7.0.post1 and 0.7.1, which have the same."""
NOT_LISTED = ("0.5.1", "0.7.0.post2")

SWEEP = "powers of 2 up to 2048 + max batch"
"""Captured batches of the decode servers of Dynamo's `performance_sweeps`, whose script writes them all
(`gen_cuda_graph_batch_sizes`; 768 is one of them). Where a run names the sweeps and no batches, it had these."""

PER_REPLICA = ("sglang",)
"""Engines whose limits of requests and of a chunk's tokens are of all attention data-parallel ranks together.

Source: SGLang `server_args.py` (`chunked_prefill_size // dp_size`) and `model_executor/model_runner.py`
(`max_running_requests // dp_size`), 0.5. TensorRT-LLM's and vLLM's are of each rank."""


@dataclass(frozen=True)
class PoolRecord:
    """One pool's string, split into its settings."""

    name: Literal["prefill", "decode"]
    values: Mapping[str, str]
    where: str

    def text(self, key: str) -> str:
        """Return the value, "" where it was left out or the engine's default was in force."""
        value = self.values.get(key, "")
        return "" if is_default(value) else value

    def count(self, key: str) -> int | None:
        """Return a whole number above zero, None where it was left out."""
        row = Row({key: self.text(key)}, f"{self.where}: {self.name}_pool")
        return row.count_or_none(key)

    def switch(self, key: str) -> bool | None:
        """Read `on`, `off`, `True` or `False`; None where it was left out."""
        switches = {"on": True, "true": True, "off": False, "false": False, "": None}
        value = self.text(key).lower()
        if value not in switches:
            raise InputError(f"{self.where}: {self.name}_pool has {key}={value}; on or off is needed")
        return switches[value]

    @property
    def parallelism(self) -> Parallelism:
        """With attention data parallelism one group of one device for each of the `tp` devices; vLLM's `dp` counts
        groups of `tp` devices.
        """
        tp, groups = self.count("tp"), self.count("dp") or 1
        if tp is None:
            raise InputError(f"the width of the {self.name} servers was not recorded")
        if self.switch("dp_attn"):
            tp, groups = 1, tp
        ep = tp * groups if self.text("ep") == "on" else self.count("ep") or 1
        try:
            return Parallelism(tp=tp, attention_dp=groups, ep=ep, pp=self.count("pp") or 1)
        except ValueError as error:
            raise InputError(f"{self.where}: {self.name}_pool: {error}") from None

    def per_rank(self, key: str, engine: str) -> int | None:
        """Return a limit of each attention data-parallel rank."""
        limit = self.count(key)
        return limit and max(limit // (self.parallelism.attention_dp if engine in PER_REPLICA else 1), 1)

    @property
    def graph_limit(self) -> int | None:
        """Largest batch in `off`, `max_bs 256`, `16`, `19 sizes 1..128` or `powers of 2 up to 2048 + max batch`; None:
        the default.
        """
        value = self.text("cuda_graph")
        if value == "off":
            return 0
        numbers = re.findall(r"\d+", value)
        return int(numbers[-1]) if numbers else None

    @property
    def graph_sizes(self) -> tuple[int, ...] | None:
        """The captured batches, where `19 sizes 1..128` is as many as one of the usual lists has; None: not known."""
        value = self.text("cuda_graph")
        if value == SWEEP:
            return _swept(self.count("max_num_seqs") or 1)
        listed = re.match(r"(\d+) sizes 1\.\.(\d+)$", value)
        if listed is None:
            return None
        count, largest = int(listed[1]), int(listed[2])
        doubled = [1 << power for power in range(largest.bit_length())]
        usual = (
            range(1, largest + 1),
            doubled,
            (1, 2, 4, *range(8, largest + 1, 8)),
            _swept(self.count("max_num_seqs") or 1),
        )
        return next((tuple(sizes) for sizes in usual if len(sizes) == count and sizes[-1] == largest), None)

    @property
    def moe_backend(self) -> str | None:
        """The family of kernels; None: the engine's choice, or one without a name here (`WIDEEP`, `CUTEDSL`)."""
        named = self.text("moe_backend").lower()
        return next((name for name in MOE_BACKENDS if name in named), None)

    @property
    def all2all_backend(self) -> str | None:
        """Kernels that exchange tokens; None: the engine's default."""
        if self.text("a2a") == "deepep":
            return f"deepep_{self.text('deepep') or 'auto'}"
        if "WIDEEP" in self.text("moe_backend"):
            # TensorRT-LLM 1.2 `fused_moe_wide_ep.py`: DeepEP only where TRTLLM_CAN_USE_DEEP_EP is set.
            return None
        return {"flashinfer_nvlink_one_sided": "nvlink_one_sided"}.get(self.text("a2a"))

    @property
    def num_redundant_experts(self) -> int | None:
        """Further copies of experts: SGLang says their number, TensorRT-LLM that of all slots."""
        return self.count("redundant")

    def pool(self, engine: str) -> Pool:
        """Return the pool of a scenario."""
        share = self.text("mem_fraction")
        if not share:
            raise InputError(f"the limits and memory of the {self.name} servers were not recorded")
        return Pool(
            name=self.name,
            role=self.name,
            parallelism=self.parallelism,
            replicas=self.count("workers") or 1,
            engine=EngineSettings(
                name=engine,
                max_num_seqs=self.per_rank("max_num_seqs", engine),
                max_num_batched_tokens=self.per_rank("max_batched_tokens", engine),
                max_prefill_tokens=self.count("max_prefill"),
                max_model_len=self.count("max_model_len"),
                block_size=self.count("block"),
                gpu_memory_utilization=Row({"mem_fraction": share}, self.where).number("mem_fraction"),
                enable_prefix_caching=self.switch("prefix_cache"),
                max_cudagraph_capture_size=self.graph_limit,
                cudagraph_sizes=self.graph_sizes,
                cudagraph_padding=True if engine == "trtllm" and self.graph_limit else None,
                async_scheduling=self.switch("overlap"),
                receive_interval_steps=self.count("sched"),
                moe_backend=self.moe_backend,
                all2all_backend=self.all2all_backend,
                num_redundant_experts=self.num_redundant_experts,
            ),
        )

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """Settings without a counterpart in a scenario."""
        keys = ("eplb", "sbo")
        settings = [f"{key}={self.values[key]}" for key in keys if self.text(key)]
        if self.text("moe_backend") and self.moe_backend is None:
            settings.append(self.text("moe_backend"))
        return tuple(f"{self.name} {setting}" for setting in settings)


def _swept(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batches that the scripts of Dynamo's sweeps capture (`gen_cuda_graph_batch_sizes`)."""
    return tuple(sorted({*(1 << power for power in range(12)), 768, max_num_seqs}))


def pool_records(server: Row) -> tuple[PoolRecord, PoolRecord]:
    """Return the records of the prefill and the decode servers.

    Raises:
        InputError: a record is missing.
    """
    records = []
    for name, column in (("prefill", PREFILL_POOL), ("decode", DECODE_POOL)):
        text = server.text(column)
        if not text:
            raise InputError(f"how many servers {name} and how was not recorded")
        values = dict(re.findall(r"(\w+)=(\[.*?\]|\{.*?\}|.*?)(?=\s\w+=|$)", text))
        if name == "decode" and "performance_sweeps" in server.values.get("source", ""):
            values.setdefault("cuda_graph", SWEEP)
        records.append(PoolRecord(name, values, server.where))  # type: ignore[arg-type]
    return records[0], records[1]


def pools_of(engine: str, server: Row | None) -> tuple[EngineSettings, tuple[Pool, ...], str]:
    """Return the common settings of all servers, the prefill and decode pools, and the assumption made.

    Raises:
        InputError: their width or their limits were not recorded.
    """
    if server is None:
        raise InputError("it was served by separate pools for prefill and decode, and nothing of them was recorded")
    image = server.text("engine_image")
    version, assumed = trtllm_version(image) if engine == "trtllm" else (image_version(image), "")
    pools = tuple(record.pool(engine) for record in pool_records(server))
    return EngineSettings(name=engine, version=version), pools, assumed


def transfer_of(engine: str, system: str, pools: Sequence[Pool]) -> Transfer:
    """Return the KV transfer between two pools: all of these were told to use UCX, or NIXL over it, which stays on
    NVLink where it reaches (TensorRT-LLM `_torch/pyexecutor/kv_cache_transceiver.py`: outside of one domain
    `UCX_CUDA_IPC_ENABLE_MNNVL` has to be turned off).
    """
    node = catalog.default_node(catalog.device(system))
    num_devices = sum(pool.replicas * pool.parallelism.num_devices for pool in pools if pool.parallelism)
    return Transfer(
        first_token="decode" if behaviour_of(engine).decode_samples_first else "prefill",
        link="scale_up" if num_devices <= node.num_devices else "scale_out",
    )


def trtllm_version(image: str) -> tuple[str | None, str]:
    """Return TensorRT-LLM's version in one of Dynamo's images, and the assumption made; None: it cannot be known."""
    tag = re.search(r"tensorrtllm-runtime:(\d+\.\d+\.\d+(?:\.post\d+|-dev\.\d+)?)", image)
    version = TRTLLM_OF_DYNAMO.get(tag[1]) if tag else None
    return version, "" if version and tag and tag[1] not in NOT_LISTED else "the engine's version"
