"""Infer the share of draft tokens that an engine accepted, where it was not recorded: one share per model, from the
measured TPOT.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.calibration.fit import PricedServer, priced_servers
from windtunnel.calibration.measured_runs import Measurement
from windtunnel.pricing.calibrated import CalibratedEstimator
from windtunnel.pricing.estimator import Estimator
from windtunnel.serving.calibration import Calibration
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.scenario import Setup

SHARES = tuple(round(0.2 + 0.05 * step, 2) for step in range(16))
"""Shares of accepted draft tokens to choose from."""


@dataclass(frozen=True)
class Drafting:
    """A measured run with speculative decoding, simulated at every share of `SHARES`."""

    priced: PricedServer
    predicted: tuple[Mapping[str, float], ...]

    @property
    def model(self) -> str:
        return self.priced.setup.model.name

    @property
    def error(self) -> NDArray[np.float64]:
        """|log(predicted / measured)| of TPOT at every share."""
        measured = self.priced.measurement.measured["tpot"]
        return np.abs(np.log([metrics["tpot"] / measured for metrics in self.predicted]))


def drafting(
    measurements: Iterable[Measurement], calibrations: Mapping[str, Calibration]
) -> Iterator[tuple[Measurement, Drafting | str]]:
    """Every run with its predictions, or with the reason why there are none.

    Args:
        measurements: runs with speculative decoding whose acceptance was not recorded.
        calibrations: by engine and device (`vllm-h100_sxm`) or engine; what is fitted here corrects what they leave.
    """

    plain_estimator = PricedDeployments().estimator

    def fitted(setup: Setup) -> Calibration | None:
        engine, device = setup.engine.name, setup.device.name
        return calibrations.get(f"{engine}-{device}") or calibrations.get(engine)

    def calibrated_estimator(setup: Setup) -> Estimator:
        calibration, plain = fitted(setup), plain_estimator(setup)
        return plain if calibration is None else CalibratedEstimator(plain, setup.device, calibration.factors)

    runs = (run.accepting(0.0) for run in measurements if run.scenario and "tpot" in run.measured)
    for measurement, priced in priced_servers(runs, calibrated_estimator):
        if isinstance(priced, str):
            yield measurement, priced
        else:
            calibration, host, client = fitted(priced.setup), priced.setup.engine.host, priced.setup.client
            if calibration is not None:
                host = calibration.host_of(str(priced.setup.engine.version)).over(host)
                client = calibration.clients.get(priced.client_name, client).over(client)
            predicted = tuple(_accepting(priced, share).predict({}, host, client) for share in SHARES)
            yield measurement, Drafting(priced, predicted)


def _accepting(priced: PricedServer, share: float) -> PricedServer:
    speculative = priced.setup.engine.speculative
    assert speculative is not None
    assert priced.speculation is not None
    changed = msgspec.structs.replace(speculative, acceptance_fraction=share)
    return replace(priced, speculation=priced.speculation._replace(tokens_per_step=changed.tokens_per_step))


def best_share(runs: Sequence[Drafting]) -> int:
    """The position in `SHARES` of the least median error of TPOT."""
    return int(np.median([run.error for run in runs], axis=0).argmin())


def acceptances(runs: Sequence[Drafting]) -> dict[str, float]:
    """Model -> the share of its draft tokens that explains its runs best."""
    models = sorted({run.model for run in runs})
    return {model: SHARES[best_share([run for run in runs if run.model == model])] for model in models}


def with_acceptances(made: Mapping[str, Calibration], measurements: Iterable[Measurement]) -> dict[str, Calibration]:
    """The calibrations with the acceptance of every model of which runs with speculative decoding were measured."""
    runs = [run for _, run in drafting(measurements, made) if isinstance(run, Drafting)]
    shares = acceptances(runs)
    return {name: msgspec.structs.replace(calibration, acceptance=shares) for name, calibration in made.items()}
