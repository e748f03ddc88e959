"""`windtunnel recommend`: say what to serve a model on."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windtunnel.cli.options import launched, scenario_of, with_read_load
from windtunnel.cli.serving.search import means_of, show_study, store_of, write_evidence
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.metrics.limits import parse_limits
from windtunnel.report.serving.run import check_folder
from windtunnel.schema import encode
from windtunnel.search.prices import Price, asked_prices, names_in, parse_api_price
from windtunnel.search.recommend import changes_space, deployments_space
from windtunnel.search.space.space import Space
from windtunnel.serving.engines.command_line import Reading
from windtunnel.serving.scenario import Scenario, read_raw
from windtunnel.serving.shorthand import lay_over


def command(options: Options) -> None:
    """Search the usual deployments of a model on some devices, and say which one to take."""
    check_folder(options.out, options.overwrite)
    if options.rate == math.inf:
        raise InputError(
            "--rate inf sends all at once, and a batch has no load to size for",
            "give requests a second; for a batch, windtunnel whatif --rate inf --vary device=... compares devices",
        )
    if str(options.model).endswith((".yaml", ".yml")) and "workload" in read_raw(Path(options.model)):
        hint = f"windtunnel whatif {options.model} --vary device=A,B compares devices under its load"
        raise InputError(f"{options.model} is a scenario, and recommend takes a model", hint)
    launch = launched(options)
    named = options.devices or _device_in(launch)
    devices = names_in(named) or [named]
    api = None if options.api_price is None else parse_api_price(options.api_price)
    prices = asked_prices(options.prices, options.provider, options.price_term, devices)
    options.scenario = None
    server = with_read_load(options, launch, is_sized=True)
    space, store = _space(options, server, devices, prices), store_of(options)
    means = means_of(options, space)
    shown = {"recommends": True, "prices": tuple(prices.values()), "api": api}
    evidence = show_study(options, space, store, means, options.top, options.rate, launch, **shown)
    write_evidence(options, evidence)


def _device_in(launch: Reading) -> str:
    """Return the device that a server's manifest names; InputError where it names none, or another for each pool."""
    deployment = launch.raw["deployment"]
    if "device" not in deployment:
        raise InputError("--devices is missing", "for instance --devices h100_sxm; all: windtunnel catalog devices")
    return str(deployment["device"])


def _space(options: Options, server: dict[str, Any], devices: list[str], prices: Mapping[str, Price]) -> Space:
    limits, usd = parse_limits(options.slo), {name: price.usd_per_hour for name, price in prices.items()}
    budget = {"devices": options.max_devices, "usd_per_hour": options.max_usd_per_hour}
    if not server:
        shared = encode(_scenario(options, {}, devices[0]))
        if shared["workload"].get("arrivals", {}).get("type") == "poisson":
            shared["workload"]["arrivals"]["rate_per_s"] = 1.0  # a capacity depends on no rate: answers serve all
        return deployments_space(shared, devices, limits, budget, usd, options.split)
    model = server["model"]
    if options.model is not None:
        raise InputError(
            f"--from-command serves {model}, and MODEL is {options.model}",
            "leave MODEL out; to choose a deployment anew, leave --from-command out",
        )
    if len(devices) > 1:
        servers = "pools of --from-command are" if "pools" in server["deployment"] else "server of --from-command is"
        raise InputError(
            f"the {servers} on one device, and --devices names {len(devices)}: {', '.join(devices)}",
            f"for changes to the command: --devices {devices[0]}; to compare devices, without --from-command: "
            f"windtunnel recommend {model} --devices {','.join(devices)}",
        )
    if devices[0] in usd:
        lay_over(server, {"deployment": {"price_usd_per_hour": usd[devices[0]]}})
    return changes_space(_scenario(options, server, devices[0]), limits, budget=budget)


def _scenario(options: Options, base: dict[str, Any], device: str) -> Scenario:
    """Return the scenario of the options on a device, at the rate of 1 where they give no load."""
    model = None if options.model is None else str(options.model)
    options.model = model
    engine = {"name": options.engine, "version": options.engine_version}
    lay_over(base, {"deployment": {"device": device, "engine": {k: v for k, v in engine.items() if v is not None}}})
    if not any((options.rate, options.concurrency, options.trace)):
        base["workload"] = {"arrivals": {"type": "poisson", "rate_per_s": 1.0}} | base.get("workload", {})
    return scenario_of(options, base=base)
