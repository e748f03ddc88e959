"""Sampling of output tokens: parameters of requests, and the operators that choose tokens from a step's logits."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
import numpy as np

from windtunnel import schema
from windtunnel.model.operators import Elementwise, Launch, Op, Size
from windtunnel.schema import Fraction, NonNegative, Positive, PositiveFraction, Schema, Whole

Finite = Annotated[float, schema.check_finite]


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


class SamplingCosts(Schema):
    """Everything in `sampling.yaml`, which describes the fields and has their sources."""

    mask_s: float
    logit_bytes: dict[str, float]
    sample_bytes: dict[str, float]
    kernels: dict[str, dict[str, int]]


COSTS = schema.decode(schema.read_yaml(Path(__file__).with_suffix(".yaml")), SamplingCosts, "sampling.yaml")
KERNELS = COSTS.kernels


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


def mask_s(sampler: Sampler) -> float:
    """Return the seconds of the host to find the mask of a request's next token; 0 without structured output."""
    return COSTS.mask_s if sampler.sampling.structured_output else 0.0


def sampling_launches(sampler: Sampler, rows: Size, vocabulary: int) -> Iterator[Launch]:
    """Yield the launches that choose a token in each of `rows` rows of gathered logits.

    Engines gather the logits on every tensor-parallel rank, and every rank samples all rows (vLLM
    `LogitsProcessor._gather_logits` on CUDA; SGLang `logits_processor.py`).
    """

    def over_logits(name: str) -> Launch:
        return Launch(name, Elementwise("sample", rows, vocabulary * COSTS.logit_bytes[name]))

    sampling = sampler.sampling
    if sampling.structured_output:
        yield over_logits("token_mask")
    if sampling.has_penalties:
        yield over_logits("penalties")
    is_filtered = sampling.keeps_top_k or sampling.keeps_top_p
    if is_filtered:
        yield from _filter_launches(sampler, rows, vocabulary)
    if sampling.min_p and not sampling.is_greedy:
        yield over_logits("min_p")
    is_fused = is_filtered and sampler.kernel == "flashinfer"
    way = "greedy" if sampling.is_greedy else "fused" if is_fused else "native"
    yield Launch("sample", Elementwise("sample", rows, vocabulary * COSTS.sample_bytes[way]))
    if sampling.logprobs is not None:
        yield over_logits("logprobs")


SAMPLING_LAUNCHES = ("token_mask", "penalties", "token_filter", "min_p", "sample", "logprobs")
"""Names of the launches above: the family `sampling` of a step's operators."""


def _filter_launches(sampler: Sampler, rows: Size, vocabulary: int) -> Iterator[Launch]:
    """Yield the filter once for each variant of its kernel, which counts for the rows in its range alone."""
    variants = list(KERNELS[sampler.kernel].items())
    if sampler.kernel == "triton_split" and sampler.sampling.keeps_top_k:
        variants = [("triton", 1)]
    for (variant, least), (_, following) in zip(variants, (*variants[1:], ("", np.inf)), strict=True):
        is_chosen = (np.asarray(rows) >= (least if least > 1 else 0)) & (np.asarray(rows) < following)
        if not is_chosen.any():
            continue
        suffix = "_top_k" if sampler.sampling.keeps_top_k and variant in ("triton", "flashinfer") else ""
        op = TokenFilter(f"{variant}{suffix}", rows, vocabulary)
        yield Launch("token_filter", op, adds=1.0 if is_chosen.all() else is_chosen.astype(np.float64))
