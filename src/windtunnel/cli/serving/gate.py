"""`windtunnel gate`: whether a change may go to production; exit status 1 where it may not."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windtunnel.cli.naming import name_settings
from windtunnel.cli.options import launched, scenario_of, with_load, with_read_load
from windtunnel.cli.output import answer, counted, remark
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError, check_known, did_you_mean
from windtunnel.formats.clients.read import ClientResult, read_client_results
from windtunnel.metrics.limits import limit_of, limits_of, named_values, parse_limits, share_of
from windtunnel.schema import read_table
from windtunnel.serving.scenario import SCENARIO_HINT, read_raw
from windtunnel.serving.shorthand import lay_over

if TYPE_CHECKING:
    from windtunnel.calibration.validate import RunPrediction

HINT = "for instance tpot_p90=5%,cost=10%"


def command(options: Options) -> None:
    """Check a change, say why it fails, and exit with 1 where it does."""
    if options.measured:
        _answer(options, _gate_measured(options))
        return
    sides = [options] if options.before is None else [options, _options_before(options)]
    launches = [launched(side) for side in sides]
    load = next((launch.load for launch in launches if launch.load is not None), None)
    described = []
    for side, launch in zip(sides, launches, strict=True):
        if launch.taken:
            launch.load = load
        described.append(scenario_of(side, base=with_read_load(side, launch)))
    before, after = described[1] if len(described) > 1 else None, described[0]

    from windtunnel.production.gate import gate_change, with_servers
    from windtunnel.serving.simulate import simulate

    limits = parse_limits(options.slo) if options.slo is not None else limits_of(after.slo)
    increases = _increases(options.max_increase, is_measured=False)
    if before is None and not limits:
        raise InputError("there is nothing to check", "give limits with --slo, or what was before with --before")
    with counted("simulating", "deployments") as progress:
        results = []
        for number, scenario in enumerate(filter(None, (before, after))):
            results.append(simulate(scenario, allow_download=options.hub))
            if progress is not None:
                progress(number + 1, 1 + (before is not None))
    gate = gate_change(results[0] if before is not None else None, results[-1], limits, increases)
    gate = replace(gate, remarks=[_in_options(line, options) for line in gate.remarks])
    _answer(options, with_servers(gate, *launches))


def _in_options(text: str, options: Options) -> str:
    """Return a sentence on settings with the options of the server's command that decide them."""
    changed, follows, others = text.partition("; what follows")
    error = InputError(changed)
    if options.from_command:
        name_settings(error, vars(options))
    return f"{error.message}{follows}{others}"


def _answer(options: Options, gate: Any) -> None:
    from windtunnel.report.gate import gate_document, gate_report, reason

    answer(options, gate_document, gate_report, gate)
    for sentence in gate.not_starting:
        remark(f"failed: {sentence}")
    for check in gate.checks:
        if not check.holds:
            remark(f"failed: {reason(check)}")
    if not gate.passes:
        click.get_current_context().exit(1)


def _options_before(options: Options) -> Options:
    changed = Options(**vars(options))
    path, raw = Path(options.before), dict[str, Any]()
    with suppress(InputError):
        raw = read_table(path, "a scenario or a manifest", SCENARIO_HINT)
    if "workload" in raw or isinstance(raw.get("deployment"), dict):
        changed.scenario, changed.from_command = path, None
    else:
        changed.from_command = options.before
    return changed


def _increases(text: str | None, is_measured: bool) -> dict[str, float] | None:
    """Parse `tpot_p90=5%,cost=10%`; None: nothing is given."""
    if text is None:
        return None
    from windtunnel.production.gate import COST, USUAL_MEASURED

    shares = {}
    for name, value in named_values(text, HINT, "--max-increase", "share").items():
        if is_measured and name in USUAL_MEASURED:
            pass
        elif is_measured and re.fullmatch(r"(ttft|tpot|e2e)_p[\d.]+", name) is None:
            known = [*USUAL_MEASURED, *(f"{metric}_p{at}" for metric in ("ttft", "tpot", "e2e") for at in (50, 90, 99))]
            check_known(name, known, f"--max-increase: no measured metric is called {name!r}")
        elif name != COST:
            try:
                name = limit_of(name, 1.0).name
            except InputError as error:
                hint = did_you_mean(name, [COST], f"{COST}; or {error.hint}")
                raise InputError(f"--max-increase: {error.message}", hint) from None
        shares[name] = share_of(value)
        if shares[name] >= 1 and not value.endswith("%"):
            raise InputError(f"--max-increase: {name}={value} lets it rise by {shares[name]:.0%}", f"{name}={value}%?")
        if not 0 <= shares[name] < math.inf:
            raise InputError(f"--max-increase: {name} may rise by {value!r}; a share of 0 or more is needed", HINT)
    return shares


def _gate_measured(options: Options) -> Any:
    """Compare measured runs with earlier ones, or with their prediction."""
    from windtunnel.calibration.measured_runs import read_client_files
    from windtunnel.calibration.run_files import check_paths
    from windtunnel.calibration.validate import predict_runs
    from windtunnel.production.gate import gate_measured, gate_predicted, predicted_ratios

    def predicted(paths: Sequence[Path], given: Options) -> list[RunPrediction]:
        base = _deployment(given)
        return predict_runs([run for path in paths for run in read_client_files(path, base)])

    check_paths([*options.measured, *options.baseline])
    increases = _increases(options.max_increase, is_measured=True)
    if options.baseline:
        ratios = None
        if options.before is not None:
            before = predicted(options.baseline, _options_before(options))
            ratios = predicted_ratios(before, predicted(options.measured, options))
        return gate_measured(_results(options.baseline), _results(options.measured), increases, ratios)
    return gate_predicted(predicted(options.measured, options), _results(options.measured))


def _deployment(options: Options) -> dict[str, Any]:
    """Return the deployment behind measured runs: the scenario's or the server's, without its workload."""
    raw = {} if options.scenario is None else read_raw(options.scenario)
    lay_over(raw, launched(options).raw)
    raw = with_load(raw, options.given("deployment"), None)
    raw.pop("workload", None)
    for name, is_given in (("model", "model" in raw), ("device", "device" in raw.get("deployment", {}))):
        if not is_given:
            hint = f"give --{name}, a scenario, or earlier runs with --baseline"
            raise InputError(f"the measured runs do not say what served them: --{name} is missing", hint)
    return raw


def _results(paths: tuple[Path, ...]) -> list[ClientResult]:
    return [result for path in paths for result in read_client_results(path)]
