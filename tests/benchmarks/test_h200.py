"""What was measured on an H200 beside its predictions."""

import pytest

import h200


def test_the_kv_cache_is_as_vllm_said() -> None:
    printed, predicted = h200.kv_cache_tokens()
    assert predicted == pytest.approx(printed, rel=0.02)


def test_a_profile_meets_whole_steps(capsys: pytest.CaptureFixture[str]) -> None:
    h200.print_profile()
    assert capsys.readouterr().out.startswith("\nprofile: 19 whole steps, median 0.6%")


@pytest.mark.full
def test_loads_are_read_with_their_servers() -> None:
    found = dict(h200.loads("none"))
    assert len(found) == 15
    assert set(h200.FIRST_USE) < set(found)
    errors = sorted(
        abs(pair[1] / pair[0] - 1)
        for name, means in found.items()
        for pair in [means["e2e_s"]]
        if name not in h200.FIRST_USE
    )
    assert errors[len(errors) // 2] < 0.05  # 2.8% in the median
