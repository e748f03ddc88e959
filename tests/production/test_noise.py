import math

import pytest

from windtunnel.production.gate import PRIOR, centre, least_change


def test_a_single_run_is_judged_by_the_noise_of_other_servers() -> None:
    # Student's t of 4 degrees of freedom has 0.1% above 7.173; both runs have the prior's deviation.
    assert least_change("tpot", [1.0], [1.0]) == pytest.approx(
        math.expm1(7.173 * PRIOR["tpot"] * math.sqrt(2)), rel=0.01
    )


def test_quiet_repeats_show_smaller_changes_and_noisy_ones_only_larger() -> None:
    single = least_change("tpot", [1.0], [1.0])
    quiet = least_change("tpot", [1.0, 1.001, 0.999], [1.0, 1.001, 0.999])
    noisy = least_change("tpot", [1.0, 1.2, 0.8], [1.0, 1.2, 0.8])
    one_outlier = least_change("tpot", [1.0, 1.001, 1.2], [1.0, 1.001, 0.999])
    assert quiet < 0.03 < single < noisy
    assert one_outlier < 1.1 * quiet


def test_an_outlier_among_three_does_not_move_the_value_that_stands_for_them() -> None:
    assert centre([1.0, 1.01, 9.0]) == 1.01
    assert centre([1.0, 3.0]) == 2.0
