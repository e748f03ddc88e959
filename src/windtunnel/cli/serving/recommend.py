"""`windtunnel recommend`: say what to serve a model on."""

from pathlib import Path
from typing import Any

from windtunnel.cli.options import assignments, launched, scenario_of
from windtunnel.cli.serving.search import means_of, show_study, store_of, write_evidence
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.report.serving.run import check_folder
from windtunnel.schema import Positive, decode, encode, read_yaml
from windtunnel.search.capacity.limits import parse_limits
from windtunnel.search.recommend import changes_space, deployments_space
from windtunnel.search.space.space import Space
from windtunnel.serving.scenario import Scenario
from windtunnel.serving.shorthand import lay_over


def command(options: Options) -> None:
    """Search the usual deployments of a model on some devices, and say which one to take."""
    if options.out is not None:
        check_folder(options.out, options.overwrite)
    launch = launched(options)
    space, store, means = _space(options, launch.raw), store_of(options), means_of(options)
    evidence = show_study(space, store, means, options.top, options.as_json, options.rate, launch, recommends=True)
    write_evidence(options, evidence)


def _space(options: Options, server: dict[str, Any]) -> Space:
    devices = [name.strip() for name in (options.devices or "").split(",") if name.strip()]
    if not devices:
        hint = "for instance --devices h100_sxm,b200_sxm; all: windtunnel catalog devices"
        raise InputError("--devices is missing", hint)
    if options.slo is None:
        raise InputError("--slo is missing", "for instance --slo ttft_p90=2s,tpot_p99=50ms")
    limits = parse_limits(options.slo)
    if not server:
        shared = encode(_scenario(options, {}, devices[0]))
        shared.pop("slo", None)
        shared.pop("precision", None)
        budget = {"devices": options.max_devices, "usd_per_hour": options.max_usd_per_hour}
        return deployments_space(shared, devices, limits, budget, _prices(options.prices), options.split)
    if len(devices) > 1 or options.model is not None:
        raise InputError("--from-command is one server on one device: give no MODEL and one of --devices")
    return changes_space(_scenario(options, server, devices[0]), limits)


def _scenario(options: Options, base: dict[str, Any], device: str) -> Scenario:
    """Return the scenario of the options on a device, at the rate of 1 where they give no load."""
    if options.model is None and "model" not in base:
        raise InputError("MODEL is missing", "or describe a server by --from-command")
    model = None if options.model is None else str(options.model)
    vars(options).update(scenario=None, model=model)
    engine = {"name": options.engine, "version": options.engine_version}
    lay_over(base, {"deployment": {"device": device, "engine": {k: v for k, v in engine.items() if v is not None}}})
    if not any((options.rate, options.concurrency, options.trace)):
        base["workload"] = {"arrivals": {"type": "poisson", "rate_per_s": 1.0}}
    return scenario_of(options, base=base)


def _prices(text: str | None) -> dict[str, float]:
    """Parse `gb200=10.50,mi300x=2.50`, or read a YAML file of such pairs: device -> USD an hour for one device."""
    if text is None:
        return {}
    if "=" not in text:
        return decode(read_yaml(Path(text)), dict[str, Positive], f"--prices: {text}")
    return decode(assignments(tuple(text.split(","))), dict[str, Positive], "--prices")
