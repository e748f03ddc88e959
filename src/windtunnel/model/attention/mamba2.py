"""Mamba-2 (arXiv:2405.21060, state space duality) as in Nemotron-H: a recurrence with a fixed state per request.

A layer projects its input to a gate, x, B, C and the step sizes of its heads; x, B and C pass a short causal
convolution; the scan follows, a gated norm and the output's projection (`modeling_nemotron_h.py` of
nvidia/Nemotron-H-56B-Base-8K, `NemotronHMamba2Mixer`; vLLM 0.18 `mamba_mixer2.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from windtunnel.model.config_reader import ConfigReader
from windtunnel.model.operators import BF16_BYTES, FP32_BYTES, Launch, Op, PrefillBatch, Size
from windtunnel.model.precision import Format
from windtunnel.model.quantization import Names
from windtunnel.model.shape import Recurrence, Shard
from windtunnel.schema import Schema, fields_of


@dataclass(frozen=True)
class CausalConvolution(PrefillBatch):
    """The short convolution over each channel's last tokens, with its activation; in decode `num_tokens` is 1.

    The measured kernels are `causal_conv1d_fn` and `causal_conv1d_update`; their time depends on the channels alone.
    """

    kind: ClassVar[str] = "causal_convolution"
    shares_batch: ClassVar[str | None] = "num_channels"
    shown: ClassVar[str] = "{batch_text}, {num_channels} channels"
    num_channels: int
    kernel_size: int
    decode: bool = False

    @property
    def flops(self) -> Size:
        return 2.0 * self.batch * self.num_tokens * self.num_channels * self.kernel_size

    @property
    def num_bytes(self) -> Size:
        looked_back_on = 2 * (self.kernel_size - 1)
        return self.batch * (2 * self.num_tokens + looked_back_on) * self.num_channels * BF16_BYTES


@dataclass(frozen=True)
class StateSpaceScan(PrefillBatch):
    """The scan: h = a h + dt B x, y = C h + D x, for each head; in decode `num_tokens` is 1.

    Prefill computes chunks of `chunk_size` tokens as matrix products (arXiv:2405.21060, section 6) in five kernels
    (`ssd_combined.py` of state-spaces/mamba 2.2, `_mamba_chunk_scan_combined_fwd`).
    """

    kind: ClassVar[str] = "state_space_scan"
    shares_batch: ClassVar[str | None] = "num_heads"
    shown: ClassVar[str] = "{batch_text}, {num_heads} x {head_dim} x {state_size}"
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    chunk_size: int
    """Tokens of a chunk; 0: one kernel computes token after token (Mamba-1)."""
    state_bytes: float
    """Bytes of one request's state."""
    decode: bool = False

    @property
    def flops(self) -> Size:
        """Of a token alone, the decay, the outer product and the product with C. In a chunk of Q tokens each meets
        the Q / 2 before it, and the state at the chunk's ends."""
        state = self.num_heads * self.head_dim * self.state_size
        if self.is_sequential:
            return 5.0 * self.batch * self.num_tokens * state
        within = self.chunk_size * (self.num_groups * self.state_size + self.num_heads * self.head_dim)
        return self.batch * self.num_tokens * (within + 4.0 * state)

    @property
    def num_bytes(self) -> Size:
        """x, y, B, C and the steps; every request's state, read and written; in prefill the states of chunks, which
        one kernel writes and the next reads, in fp32 and again in 16 bits."""
        inner = self.num_heads * self.head_dim
        per_token = (2 * inner + 2 * self.num_groups * self.state_size + self.num_heads) * BF16_BYTES
        if not self.is_sequential:
            per_token += 2 * (FP32_BYTES + BF16_BYTES) * inner * self.state_size / self.chunk_size
        return self.batch * (2 * self.state_bytes + self.num_tokens * per_token)

    @property
    def num_kernels(self) -> int:
        return 1 if self.is_sequential else 5

    @property
    def is_sequential(self) -> bool:
        """Whether tokens come one after the other and not in chunks."""
        return self.decode or not self.chunk_size


class Mamba2(Schema, Recurrence, tag="mamba2", tag_field="type"):
    """A Mamba-2 layer: `num_heads` heads of `head_dim`, each with a state of `head_dim` x `state_size`."""

    operators: ClassVar[tuple[type[Op], ...]] = (CausalConvolution, StateSpaceScan)
    layer_types: ClassVar[tuple[str, ...]] = ("mamba",)
    modules: ClassVar[tuple[Names, ...]] = (("mixer.in_proj",), ("mixer.out_proj",))
    text = "Mamba-2"
    num_heads: int
    head_dim: int
    num_groups: int
    """Groups of heads that share B and C."""
    state_size: int
    conv_kernel_size: int
    chunk_size: int
    conv_bias: bool = False
    bias: bool = False
    """Whether the input's projection has one."""
    output_bias: bool = False
    """Whether the output's projection has one (Falcon-H1 says so apart)."""
    norm: bool = True
    """Whether outputs are normed beside their gate, or gated alone (Falcon-H1)."""
    fp32_state: bool = False
    """Engines keep the state in fp32 (`mamba_ssm_cache_dtype`), not as the model's activations."""

    @classmethod
    def reads(cls, reader: ConfigReader, index: int) -> bool:
        """Whether it is none of the layers that a config names as attention (Bamba)."""
        is_listed = "attn_layer_indices" in reader.raw and not reader.layer_type(index)
        return is_listed and index not in reader.numbers("attn_layer_indices")

    @classmethod
    def read(cls, reader: ConfigReader, index: int, layer_type: str) -> "Mamba2":
        # Models of Mamba-2 alone have no other heads.
        heads, width = ("num_heads", "head_dim") if reader.architecture.only else ("mamba_num_heads", "mamba_head_dim")
        num_heads, num_groups = reader.count(heads), reader.count("n_groups")
        reader.check_multiple(heads, num_heads, "n_groups", num_groups)
        return cls(
            num_heads=num_heads,
            head_dim=_head_dim(reader, width, num_heads),
            num_groups=num_groups,
            state_size=reader.count("ssm_state_size"),
            conv_kernel_size=reader.count("conv_kernel"),
            chunk_size=reader.count("chunk_size"),
            conv_bias=reader.flag("use_conv_bias", default=True),
            bias=reader.flag("mamba_proj_bias"),
            output_bias=reader.flag("projectors_bias", "mamba_proj_bias"),
            norm=reader.flag("mamba_rms_norm", default=True),
            fp32_state=reader.raw.get("mamba_ssm_cache_dtype") == "float32",
        )

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    def num_parameters(self, hidden_size: int) -> int:
        """Both projections, the convolution; decay, skip and step bias of every head."""
        channels = self.inner_size + 2 * self.num_groups * self.state_size
        projected = self.inner_size + channels + self.num_heads
        biases = projected * self.bias + hidden_size * self.output_bias + channels * self.conv_bias
        matrices = hidden_size * (projected + self.inner_size)
        return matrices + channels * self.conv_kernel_size + biases + 3 * self.num_heads

    def norm_parameters(self) -> int:
        return self.inner_size if self.norm else 0

    def repeated_parameters(self, hidden_size: int, tp: int) -> tuple[int, float]:
        """Every rank keeps B and C of at least one group (vLLM 0.18 `extra_groups_for_head_shards`)."""
        return 2 * self.num_groups * self.state_size * hidden_size, max(tp / self.num_groups, 1.0)

    def _rank_groups(self, tp: int) -> int:
        return max(self.num_groups // tp, 1)

    def rank_channels(self, tp: int) -> int:
        """Return the channels of x, B and C on one of `tp` ranks."""
        return self.inner_size // tp + 2 * self._rank_groups(tp) * self.state_size

    def projections(self, shard: Shard, num_tokens: Size) -> Iterator[Launch]:
        width, inner = shard.model.hidden_size, self.inner_size // shard.tp
        projected = inner + self.rank_channels(shard.tp) + self.num_heads // shard.tp
        yield shard.attention_gemm("mamba_in_proj", num_tokens, projected, width)
        yield shard.elementwise("gated_norm", num_tokens, 3 * inner * BF16_BYTES)
        yield shard.attention_gemm("mamba_out_proj", num_tokens, width, inner)

    def core_launches(self, shard: Shard, batch: Size, num_tokens: Size, phase: str) -> Iterator[Launch]:
        convolution, scan = self.cores(shard.tp, batch, num_tokens, phase == "decode", shard.precision.recurrent_state)
        yield Launch(f"mamba_convolution_{phase}", convolution)
        yield Launch(f"mamba_scan_{phase}", scan)

    def cores(
        self, tp: int, batch: Size, num_tokens: Size, decode: bool = False, state: Format | None = None
    ) -> tuple[CausalConvolution, StateSpaceScan]:
        """Return the convolution and the scan on one of `tp` ranks; `state` as `Precision.recurrent_state`."""
        convolution = CausalConvolution(batch, num_tokens, self.rank_channels(tp), self.conv_kernel_size, decode)
        scan = StateSpaceScan(
            batch=batch,
            num_tokens=num_tokens,
            num_heads=self.num_heads // tp,
            **fields_of(self, "head_dim", "state_size", "chunk_size"),
            num_groups=self._rank_groups(tp),
            state_bytes=self._recurrent_bytes(state) / tp,
            decode=decode,
        )
        return convolution, scan

    def _recurrent_bytes(self, state: Format | None) -> float:
        in_fp32 = self.fp32_state if state is None else state is Format.FP32
        return self.inner_size * self.state_size * (FP32_BYTES if in_fp32 else BF16_BYTES)

    def state_bytes(self, shard: Shard) -> float:
        """The recurrent state, and the inputs that the convolution looks back on (vLLM 0.18 `mamba_utils.py`,
        `MambaStateShapeCalculator.mamba2_state_shape`)."""
        looked_back_on = self.rank_channels(shard.tp) * (self.conv_kernel_size - 1) * BF16_BYTES
        return self._recurrent_bytes(shard.precision.recurrent_state) / shard.tp + looked_back_on


def _head_dim(reader: ConfigReader, key: str, num_heads: int) -> int:
    """Return the width of a head; "auto" shares the inner width among heads (`configuration_falcon_h1.py`)."""
    if reader.first(key)[1] != "auto":
        return reader.count(key)
    inner = reader.count("mamba_expand", default=2) * reader.count("hidden_size")
    inner = reader.count("mamba_d_ssm", default=inner)
    reader.check_multiple("the inner width", inner, key, num_heads)
    return inner // num_heads


KIND = Mamba2
