"""Settings that nobody recorded are found again, also from other configurations; where no run speaks none is taken."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from windtunnel.calibration.fit import Fit, PricedServer, fit_runs, local, predict, priced_servers
from windtunnel.calibration.measured_runs import Measurement
from windtunnel.calibration.profiles import folds, held_out, profiles
from windtunnel.calibration.settings_inference import Learnt, RunSeries, Trials, infer, values_of
from windtunnel.pricing.estimator import Estimator, RooflineEstimator
from windtunnel.pricing.roofline import Roofline
from windtunnel.report.calibration.calibration import write_calibration
from windtunnel.serving.calibration import NONE, load_calibration
from windtunnel.serving.scenario import Scenario, Setup, resolve
from windtunnel.serving.shorthand import scenario
from windtunnel.units import GIB

pytestmark = pytest.mark.compiled

SHORT, LONG = (256, 32), (2000, 400)
UNKNOWN = ("max_num_seqs", "max_num_batched_tokens")
SERIES = RunSeries("vllm", "h100_sxm", "0.19.0", "meta-llama/Llama-3.1-8B")


def of_roofline(setup: Setup) -> Estimator:
    return RooflineEstimator(Roofline(setup.device, setup.node))


def ran(
    concurrencies: tuple[int, ...], lengths: tuple[int, int], unknown: tuple[str, ...] = (), **truth: float
) -> list[PricedServer]:
    """Runs on one and on two devices, measured with the settings `truth`, of which the record says nothing."""
    found = []
    for tp in (1, 2):
        for concurrency in concurrencies:
            made = scenario(
                model="llama-3.1-8b",
                device="h100_sxm",
                engine_version="0.19.0",
                tp=tp,
                input_tokens=lengths[0],
                output_tokens=lengths[1],
                concurrency=concurrency,
                num_requests=2 * concurrency,
                calibration=NONE,
            )
            deployment = msgspec.structs.replace(made.deployment, settings_assumed=bool(unknown))
            labels = {"engine": "vllm", "device": "h100_sxm", "version": "0.19.0", "parallelism": f"tp{tp}"}
            found.append(
                Measurement(
                    f"tp{tp} c{concurrency}",
                    msgspec.structs.replace(made, deployment=deployment),
                    "",
                    {},
                    labels,
                    unknown=unknown,
                )
            )
    runs = [priced for _, priced in priced_servers(found, of_roofline) if isinstance(priced, PricedServer)]
    return [
        replace(one, measurement=replace(one.measurement, measured=predict(one.served_with(truth), Fit({}))))
        for one in runs
    ]


def learnt_from(runs: list[PricedServer], kept: list[bool] | None = None) -> Learnt:
    return infer(Trials(runs), local(runs, Fit({})), Fit({}), np.array(kept or [True] * len(runs)))


@pytest.fixture(scope="module")
def limited() -> list[PricedServer]:
    return ran((4, 32, 64), SHORT, UNKNOWN, max_num_seqs=16)


@pytest.mark.full
def test_a_limit_that_nobody_recorded_is_found_again(limited: list[PricedServer]) -> None:
    learnt = learnt_from(limited)
    assert {series: taken.values for series, taken in learnt.items()} == {SERIES: (("max_num_seqs", 16.0),)}
    assert [values_of(priced, learnt) for priced in limited] == [(("max_num_seqs", 16.0),)] * 6


@pytest.mark.full
def test_runs_that_agree_with_the_defaults_change_no_setting() -> None:
    assert learnt_from(ran((4, 64), SHORT, UNKNOWN)) == {}
    assert learnt_from(ran((4, 64), SHORT)) == {}


@pytest.mark.full
def test_a_setting_is_not_taken_that_other_configurations_speak_against(limited: list[PricedServer]) -> None:
    plain = ran((4, 32, 64), SHORT, UNKNOWN)
    mixed = [*limited[:3], *plain[3:]]
    assert learnt_from(mixed) == {}


@pytest.mark.full
def test_a_setting_that_one_run_of_a_series_recorded_is_chosen_for_none(limited: list[PricedServer]) -> None:
    """Its steps are priced no further than its own limit."""
    one = replace(limited[0], measurement=replace(limited[0].measurement, unknown=("max_num_batched_tokens",)))
    for runs, kept in (
        ([one, *limited[1:]], [True] * 6),
        ([*limited[1:], one], [True] * 6),
        ([*limited[1:], one], [True] * 5 + [False]),
    ):
        names = {name for taken in learnt_from(runs, kept).values() for name, _ in taken.values}
        assert names <= {"max_num_batched_tokens"}


@pytest.mark.full
def test_runs_left_out_are_predicted_with_what_the_others_say(limited: list[PricedServer]) -> None:
    around, fold = fit_runs(limited, num_rounds=1), folds(limited, count=2)
    held = held_out(limited, around, fold)
    assert predict(limited[2], Fit({}))["ttft"] < 0.5 * limited[2].measurement.measured["ttft"]
    assert held[2]["ttft"] == pytest.approx(limited[2].measurement.measured["ttft"], rel=0.1)
    lies = {"tpot": 9.0, "ttft": 9.0}
    lied = [
        replace(one, measurement=replace(one.measurement, measured=lies)) if at == fold[2] else one
        for one, at in zip(limited, fold.tolist(), strict=True)
    ]
    assert held_out(lied, around, fold)[2] == held[2]


@pytest.mark.full
def test_memory_kept_from_the_cache_is_found_again_where_the_cache_is_full() -> None:
    learnt = learnt_from(ran((256, 512, 640), LONG, reserved_bytes=12 * GIB))
    assert dict(learnt[RunSeries("vllm", "h100_sxm")].values) == {"reserved_bytes": 12 * GIB}
    assert learnt[RunSeries("vllm")].values == learnt[RunSeries("vllm", "h100_sxm")].values
    assert learnt_from(ran((4, 8), LONG, reserved_bytes=12 * GIB)) == {}


@pytest.mark.full
def test_a_device_without_runs_keeps_what_the_engine_does_on_others() -> None:
    runs = ran((256, 512, 640), LONG, reserved_bytes=12 * GIB)
    device = msgspec.structs.replace(runs[0].setup.device, name="another")
    other = replace(runs[0], setup=replace(runs[0].setup, device=device))
    learnt = learnt_from([*runs, other], [True] * len(runs) + [False])
    assert values_of(other, learnt) == (("reserved_bytes", 12 * GIB),)


@pytest.mark.full
def test_a_profile_serves_a_deployment_with_what_was_learnt(limited: list[PricedServer], tmp_path) -> None:  # type: ignore[no-untyped-def]
    made = profiles(limited, "runs.csv")["vllm-h100_sxm"]
    assert [one.settings for one in made.inferred] == [{"max_num_seqs": 16}]
    assert made.inferred[0].median_error["ttft"] < 0.05 < made.inferred[0].median_error_before["ttft"]
    path = tmp_path / "profile.yaml"
    write_calibration(made, path)
    assert load_calibration(str(path)) == made
    assumed = limited[0].measurement.scenario
    assert isinstance(assumed, Scenario)
    with_profile = msgspec.structs.replace(assumed.deployment, calibration=str(path))
    recorded = msgspec.structs.replace(with_profile, settings_assumed=False)
    given = msgspec.structs.replace(with_profile.engine, max_num_seqs=128)

    def seqs(deployment) -> int | None:  # type: ignore[no-untyped-def]
        return resolve(msgspec.structs.replace(assumed, deployment=deployment)).engine.max_num_seqs

    assert seqs(with_profile) == 16
    assert seqs(recorded) == 1024
    assert seqs(msgspec.structs.replace(with_profile, engine=given)) == 128
    tight = msgspec.structs.replace(with_profile.engine, max_num_batched_tokens=8)
    lowered = resolve(msgspec.structs.replace(assumed, deployment=msgspec.structs.replace(with_profile, engine=tight)))
    assert (lowered.engine.max_num_seqs, lowered.learnt) == (8, {})
