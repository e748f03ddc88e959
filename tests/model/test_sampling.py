"""Sampling parameters, and the operators that choose tokens from logits."""

import numpy as np
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.launches.forward import head_launches
from windtunnel.model.operators import Elementwise, Launch
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.sampling import GREEDY, SAMPLING_LAUNCHES, Sampler, Sampling, TokenFilter, sampling_launches
from windtunnel.model.shape import Shard
from windtunnel.schema import decode

NUCLEUS = Sampling(temperature=0.8, top_p=0.95)
TOP_K = Sampling(temperature=0.8, top_p=0.95, top_k=20)
VOCABULARY = 128256


def names(sampling: Sampling, kernel: str = "sort", rows: float = 64.0) -> list[str]:
    return [launch.name for launch in sampling_launches(Sampler(sampling, kernel), rows, VOCABULARY)]


def kernels(sampling: Sampling, kernel: str, rows: float) -> list[str]:
    launches = sampling_launches(Sampler(sampling, kernel), rows, VOCABULARY)
    return [launch.op.kernel for launch in launches if isinstance(launch.op, TokenFilter)]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1; at least 0"),
        ({"top_p": 1.5}, "top_p is 1.5; from 0 to 1"),
        ({"top_p": 0.0}, "top_p is 0; more than 0"),
        ({"top_k": -1}, "top_k is -1; at least 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0; more than 0"),
        ({"temprature": 1.0}, "temprature"),
    ],
)
def test_wrong_parameters_are_refused(raw: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        decode(raw, Sampling)


def test_own_values_win_over_the_default() -> None:
    merged = Sampling(temperature=0.0).over(TOP_K)
    assert (merged.temperature, merged.top_p, merged.top_k) == (0.0, 0.95, 20)
    assert merged.is_greedy
    assert not merged.keeps_top_k
    assert not merged.keeps_top_p


def test_parameters_for_people() -> None:
    assert GREEDY.text == "greedy"
    assert TOP_K.text == "temperature 0.8, top-p 0.95, top-k 20"
    every = Sampling(temperature=1.0, min_p=0.1, presence_penalty=0.5, logprobs=5, structured_output=True)
    assert every.text == "temperature 1, min-p 0.1, penalties, 5 logprobs, structured output"


def test_greedy_sampling_reads_and_writes_ten_bytes_a_logit() -> None:
    (launch,) = sampling_launches(Sampler(), 3, VOCABULARY)
    assert launch == Launch("sample", Elementwise("sample", 3, 10.0 * VOCABULARY))


def test_each_parameter_brings_its_operator() -> None:
    assert names(Sampling(temperature=1.0)) == ["sample"]
    assert names(NUCLEUS) == ["token_filter", "sample"]
    assert names(Sampling(temperature=1.0, min_p=0.1)) == ["min_p", "sample"]
    assert names(Sampling(temperature=0.0, repetition_penalty=1.1)) == ["penalties", "sample"]
    every = Sampling(temperature=1.0, top_k=5, min_p=0.1, frequency_penalty=1.0, logprobs=0, structured_output=True)
    assert names(every) == ["token_mask", "penalties", "token_filter", "min_p", "sample", "logprobs"]
    assert set(names(every)) == set(SAMPLING_LAUNCHES)


@pytest.mark.parametrize(
    ("kernel", "rows", "variant"),
    [
        ("sort", 1, "sort"),
        ("sort", 127, "sort"),
        ("sort", 128, "segmented_sort"),
        ("triton", 7, "sort"),
        ("triton", 8, "triton"),
        ("triton_split", 64, "triton_split"),
        ("triton_split", 65, "triton"),
        ("flashinfer", 1, "flashinfer"),
    ],
)
def test_rows_choose_the_kernel(kernel: str, rows: int, variant: str) -> None:
    assert kernels(NUCLEUS, kernel, float(rows)) == [variant]


def test_a_top_k_has_kernels_of_its_own() -> None:
    assert kernels(TOP_K, "triton_split", 4.0) == ["triton_top_k"]
    assert kernels(TOP_K, "flashinfer", 4.0) == ["flashinfer_top_k"]
    assert kernels(TOP_K, "sort", 4.0) == ["sort"]


def test_an_array_of_rows_meets_each_kernel_in_its_range() -> None:
    rows = np.array([1.0, 7.0, 8.0, 300.0])
    launches = list(sampling_launches(Sampler(NUCLEUS, "triton"), rows, VOCABULARY))
    adds = {launch.op.kernel: launch.adds for launch in launches if isinstance(launch.op, TokenFilter)}
    np.testing.assert_array_equal(adds["sort"], [1, 1, 0, 0])
    np.testing.assert_array_equal(adds["triton"], [0, 0, 1, 1])


def test_every_rank_samples_the_whole_vocabulary() -> None:
    model = catalog.model("meta-llama/Llama-3.1-8B")
    shard = Shard(model, model.precision, Parallelism(tp=4), sampler=Sampler(NUCLEUS, "flashinfer"))
    (op,) = (launch.op for launch in head_launches(shard, 16) if isinstance(launch.op, TokenFilter))
    assert (op.rows, op.vocabulary) == (16, model.vocab_size)
