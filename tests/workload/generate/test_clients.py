from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.schema import decode
from windtunnel.workload.generate.requests import RequestArrays, generate
from windtunnel.workload.schema import Workload


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two clients over four windows of 100 s; the second is bursty and changes its lengths at 200 s."""
    (tmp_path / "chunk-0-trace.csv").write_text(
        "0,2.0,1.0,Gamma,1.0,0.5\n100,2.0,1.0,Gamma,1.0,0.5\n200,0,0,,0,0\n300,4.0,1.0,Gamma,1.0,0.25\n"
    )
    (tmp_path / "chunk-0-dataset.json").write_text(
        '{"0": {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{5: 1.0}"}}'
    )
    (tmp_path / "chunk-3-trace.csv").write_text(
        "0,1.0,4.0,Weibull,0.4,0.3\n100,1.0,4.0,Weibull,0.4,0.3\n200,1.0,4.0,Weibull,0.4,0.3\n300,1.0,4.0,Gamma,0.1,9\n"
    )
    (tmp_path / "chunk-3-dataset.json").write_text(
        '{"0": {"input_tokens": "{100: 1}", "output_tokens": "{7: 1}"},'
        ' "200": {"input_tokens": "{300: 1}", "output_tokens": "{9: 1}"}}'
    )
    return tmp_path


def requests_of(path: Path, **raw: Any) -> RequestArrays:
    ends = {name: raw.pop(name) for name in ("num_requests", "duration_s") if name in raw}
    return generate(decode({"clients": {"path": str(path), **raw}, **(ends or {"duration_s": 400})}, Workload), 0)


def test_rates_and_lengths_are_those_of_the_clients(model: Path) -> None:
    requests = requests_of(model)
    # 2/s for 200 s, nothing, 4/s for 100 s; and 1/s for 400 s.
    assert requests.num_requests == 200 * 2 + 400 + 400
    bursty = requests.input_tokens >= 100
    assert bursty.sum() == 400
    assert np.array_equal(requests.input_tokens[bursty], np.where(requests.arrival_s[bursty] < 200, 100, 300))
    even = requests.arrival_s[~bursty]
    assert not np.any((even > 200) & (even < 300))
    assert np.mean(requests.input_tokens[~bursty] == 20) == pytest.approx(0.75, abs=0.06)
    assert set(requests.output_tokens) == {5, 7, 9}


def test_burstiness_is_that_of_the_recorded_gaps(model: Path) -> None:
    requests = requests_of(model, rate_per_s=300)
    bursty = requests.input_tokens >= 100
    for mine, cv in ((~bursty, 1.0), (bursty & (requests.arrival_s < 300), 3.14)):
        gaps = np.diff(requests.arrival_s[mine & (requests.arrival_s < 100)])
        # A Weibull of shape 0.4 has a cv of sqrt(G(6) / G(3.5)^2 - 1) = 3.14.
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.2)


def test_the_mean_rate_may_be_given(model: Path) -> None:
    assert requests_of(model, rate_per_s=30).num_requests == pytest.approx(30 * 400, rel=0.001)
    assert requests_of(model, rate_per_s=30, num_clients=1).input_tokens.max() <= 20
    assert requests_of(model, num_requests=100).num_requests == 100


def test_a_later_start_is_time_zero(model: Path) -> None:
    requests = requests_of(model, start_s=300, duration_s=100)
    assert requests.arrival_s.max() < 100
    assert requests.num_requests == 500
    with pytest.raises(InputError, match="ends at 400 s; start_s is 500 s"):
        requests_of(model, start_s=500)


def test_clients_without_lengths_are_refused_or_left_out(model: Path) -> None:
    (model / "chunk-3-dataset.json").unlink()
    with pytest.raises(InputError, match="1 of 2 clients, who send 33% of the requests, have no file") as refused:
        requests_of(model)
    assert "leave_out" in str(refused.value.hint)
    assert requests_of(model, without_lengths="leave_out").num_requests == 800


BROKEN = {
    "a family": (
        "chunk-0-trace.csv",
        "0,1,1,Pareto,1,1\n100,1,1,Gamma,1,1\n",
        "client 0 has gaps of the family 'Pareto'",
    ),
    "no number": ("chunk-0-trace.csv", "0,1,1,Gamma,x,1\n100,1,1,Gamma,1,1\n", "client 0 is not as ServeGen writes it"),
    "order": ("chunk-0-trace.csv", "100,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n", "windows must be in order"),
    "JSON": ("chunk-0-dataset.json", "{", "client 0 is not as ServeGen writes it"),
}


@pytest.mark.parametrize(("name", "content", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_models_are_refused(model: Path, name: str, content: str, message: str) -> None:
    (model / name).write_text(content)
    with pytest.raises(InputError, match=message):
        requests_of(model)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no clients"):
        requests_of(tmp_path)
    with pytest.raises(InputError, match="there is no file"):
        requests_of(tmp_path / "none.tar.xz")
    (tmp_path / "text.tar").write_text("text")
    with pytest.raises(InputError, match="is not a folder or a tar archive"):
        requests_of(tmp_path / "text.tar")


@pytest.mark.full
def test_the_published_clients(reference: Path) -> None:
    path = reference / "traces/servegen_language_m-small.tar.xz"
    requests = requests_of(path, rate_per_s=10, start_s=86400, duration_s=600, without_lengths="leave_out")
    assert requests.num_requests == pytest.approx(6000, abs=60)
