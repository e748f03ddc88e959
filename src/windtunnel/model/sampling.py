"""Sampling of output tokens: parameters of requests, and the operators that choose tokens from a step's logits."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec
import numpy as np

from windtunnel.model.operators import Elementwise, Launch, Op, Size
from windtunnel.schema import Fraction, NonNegative, Positive, PositiveFraction, Schema, Whole, check_finite

Finite = Annotated[float, check_finite]


class Sampling(Schema):
    """Sampling parameters of requests, by vLLM's names (`vllm/sampling_params.py`).

    None takes the value of the model's generation config, or else one that changes nothing.
    """

    temperature: NonNegative | None = None
    """0: greedy, the token with the largest logit."""
    top_p: PositiveFraction | None = None
    """Share of the probability that the likeliest tokens share; 1 keeps all."""
    top_k: Whole | None = None
    """Number of the likeliest tokens that are kept; 0 keeps all."""
    min_p: Fraction | None = None
    """Least probability of a token, relative to the likeliest one."""
    presence_penalty: Finite | None = None
    frequency_penalty: Finite | None = None
    repetition_penalty: Positive | None = None
    logprobs: Whole | None = None
    """Log probabilities that a request returns with every token; None: none."""
    structured_output: bool | None = None
    """Whether a grammar masks the logits (JSON schema, regular expression)."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def keeps_top_k(self) -> bool:
        return not self.is_greedy and bool(self.top_k)

    @property
    def keeps_top_p(self) -> bool:
        return not self.is_greedy and self.top_p is not None and self.top_p < 1

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty not in (None, 1)

    @property
    def text(self) -> str:
        """Parameters for people: `temperature 0.6, top-p 0.9`."""
        if self.is_greedy:
            parts = ["greedy"]
        else:
            parts = [f"temperature {1.0 if self.temperature is None else self.temperature:g}"]
            parts += [f"top-p {self.top_p:g}"] if self.keeps_top_p else []
            parts += [f"top-k {self.top_k}"] if self.keeps_top_k else []
            parts += [f"min-p {self.min_p:g}"] if self.min_p else []
        parts += ["penalties"] if self.has_penalties else []
        parts += [f"{self.logprobs} logprobs"] if self.logprobs is not None else []
        return ", ".join([*parts, *(["structured output"] if self.structured_output else [])])


NEUTRAL = Sampling(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    structured_output=False,
)
"""Values of parameters that neither a request nor the model's generation config gives."""
GREEDY = msgspec.structs.replace(NEUTRAL, temperature=0.0)


@dataclass(frozen=True)
class Sampler:
    """How an engine chooses tokens: the requests' parameters, and the kernel that filters by top-k and top-p."""

    sampling: Sampling = GREEDY
    kernel: str = "sort"
    """One of `KERNELS`."""


GREEDY_SAMPLER = Sampler()


KERNELS: dict[str, tuple[tuple[str, int], ...]] = {
    "sort": (("sort", 1), ("segmented_sort", 128)),
    "triton": (("sort", 1), ("triton", 8)),
    "triton_split": (("triton_split", 1), ("triton", 65)),
    "flashinfer": (("flashinfer", 1),),
}
"""Value of `engine.sampler` -> the variants of the kernel, each with the least rows that it filters.

PyTorch sorts up to 127 rows as one array and more of them row by row (`aten/src/ATen/native/cuda/SortStable.cu`). vLLM
calls its Triton kernel from 8 rows on (pull request 33538), and splits up to 64 rows over programs where no request has
a top-k (pull request 54651).
"""

NATIVE_LOGIT_BYTES = 46.0
"""Bytes that eager PyTorch moves for each logit of a random choice: bf16 to fp32 (6), the temperature (8), softmax
(12), exponential noise (4), their quotient (12) and arg-max (4) (`random_sample` of vLLM 0.8 to 0.33)."""
FUSED_LOGIT_BYTES = 14.0
"""Bytes before FlashInfer's kernels, which hold softmax and choice: bf16 to fp32, and the temperature."""
GREEDY_LOGIT_BYTES = 10.0
"""Bytes of arg-max: bf16 logits are read and written as fp32, which arg-max reads again."""
MIN_P_LOGIT_BYTES = 21.0
"""Bytes of a second softmax (12), its maximum (4) and the mask (5) (vLLM `MinPLogitsProcessor`)."""
PENALTY_LOGIT_BYTES = 68.0
"""Bytes of two counts of tokens, in prompt and output, with their masks, and of three penalties
(`apply_penalties` of vLLM 0.8 to 0.33, `model_executor/layers/utils.py`)."""
LOGPROB_LOGIT_BYTES = 34.0
"""Bytes of the log-softmax (10), of the radix selection of the largest (20) and of the rank of the chosen one (4)."""
MASK_LOGIT_BYTES = 8.125
"""Bytes of a bit mask and of the logits that it is applied to (xgrammar `apply_token_bitmask_inplace`)."""


@dataclass(frozen=True)
class TokenFilter(Op):
    """Top-k and top-p filter over `rows` of `vocabulary` logits, by one kernel.

    Bytes are those of a single reading and writing; what a kernel moves beyond is part of its coefficients.
    """

    kind: ClassVar[str] = "token_filter"
    axes: ClassVar[tuple[str, ...]] = ("rows",)
    shown: ClassVar[str] = "{rows} x {vocabulary:,} {kernel}"
    kernel: str
    rows: Size
    vocabulary: int

    @property
    def flops(self) -> Size:
        return 0.0 * self.rows

    @property
    def num_bytes(self) -> Size:
        return self.rows * self.vocabulary * 8.0

    @property
    def variant(self) -> str:
        return self.kernel


def sampling_launches(sampler: Sampler, rows: Size, vocabulary: int) -> Iterator[Launch]:
    """Yield the launches that choose a token in each of `rows` rows of gathered logits.

    Engines gather the logits on every tensor-parallel rank, and every rank samples all rows (vLLM
    `LogitsProcessor._gather_logits` on CUDA; SGLang `logits_processor.py`).
    """

    def over_logits(name: str, bytes_per_logit: float) -> Launch:
        return Launch(name, Elementwise("sample", rows, vocabulary * bytes_per_logit))

    sampling = sampler.sampling
    if sampling.structured_output:
        yield over_logits("token_mask", MASK_LOGIT_BYTES)
    if sampling.has_penalties:
        yield over_logits("penalties", PENALTY_LOGIT_BYTES)
    is_filtered = sampling.keeps_top_k or sampling.keeps_top_p
    if is_filtered:
        yield from _filter_launches(sampler, rows, vocabulary)
    if sampling.min_p and not sampling.is_greedy:
        yield over_logits("min_p", MIN_P_LOGIT_BYTES)
    if sampling.is_greedy:
        yield over_logits("sample", GREEDY_LOGIT_BYTES)
    else:
        is_fused = is_filtered and sampler.kernel == "flashinfer"
        yield over_logits("sample", FUSED_LOGIT_BYTES if is_fused else NATIVE_LOGIT_BYTES)
    if sampling.logprobs is not None:
        yield over_logits("logprobs", LOGPROB_LOGIT_BYTES)


SAMPLING_LAUNCHES = ("token_mask", "penalties", "token_filter", "min_p", "sample", "logprobs")
"""Names of the launches above: the family `sampling` of a step's operators."""


def _filter_launches(sampler: Sampler, rows: Size, vocabulary: int) -> Iterator[Launch]:
    """Yield the filter once for each variant of its kernel, which counts for the rows in its range alone."""
    variants = KERNELS[sampler.kernel]
    if sampler.kernel == "triton_split" and sampler.sampling.keeps_top_k:
        variants = (("triton", 1),)
    for (variant, least), (_, following) in zip(variants, (*variants[1:], ("", np.inf)), strict=True):
        is_chosen = (np.asarray(rows) >= (least if least > 1 else 0)) & (np.asarray(rows) < following)
        if not is_chosen.any():
            continue
        suffix = "_top_k" if sampler.sampling.keeps_top_k and variant in ("triton", "flashinfer") else ""
        op = TokenFilter(f"{variant}{suffix}", rows, vocabulary)
        yield Launch("token_filter", op, adds=1.0 if is_chosen.all() else is_chosen.astype(np.float64))
