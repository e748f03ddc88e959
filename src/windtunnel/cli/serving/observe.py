"""`windtunnel observe`: learn a calibration, and a scenario, from what a server recorded or emits."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windtunnel.calibration.steps.read import StepRun, read_step_runs, run_without_steps
from windtunnel.cli.options import launched, with_load
from windtunnel.cli.output import answer, counted, remark
from windtunnel.cli.serving.measured_runs import with_id
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.files import new_files
from windtunnel.formats.telemetry.prometheus import poll
from windtunnel.formats.telemetry.record import ServerRecord
from windtunnel.production.observed import read_record, read_requests
from windtunnel.production.workload import load_of, workload_of
from windtunnel.report.serving.run import check_folder
from windtunnel.schema import save
from windtunnel.serving.scenario import Scenario, scenario_from

if TYPE_CHECKING:
    from windtunnel.production.observe import Observation

CALIBRATION, SCENARIO, TRACE = "calibration.yaml", "scenario.yaml", "requests.csv"
LEARN_STEPS, LEARN_INTERVALS = 0.2, 0.5


def command(options: Options) -> None:
    """Learn from what was recorded, and write what was learnt."""
    if options.learn is not None and not 0 < options.learn < 1:
        raise InputError(f"--learn is {options.learn:g}; a share between 0 and 1 is needed", "for instance 0.2")
    if not 0 < options.every <= options.seconds:
        raise InputError(
            f"--every is {options.every:g} s and --for {options.seconds:g} s", "the first is the shorter one"
        )
    check_folder(options.out, options.overwrite)
    launch = launched(options)
    run, record = _recorded(options, launch.raw)
    for note in () if record is None else record.notes:
        remark(f"note: {note}")
    if options.watch is not None:
        _watch(options, run, record)
        return
    from windtunnel.production.observe import observe_record, observe_steps
    from windtunnel.report.observation import observation_document, observation_report

    if record is None:
        observation = observe_steps(run, options.learn or LEARN_STEPS)
    else:
        observation = observe_record(run, record, options.learn or LEARN_INTERVALS)
    if options.out is not None:
        _write(options, observation, launch.raw, record)
    answer(options, observation_document, observation_report, observation, launch=launch)


def _watch(options: Options, run: StepRun, record: ServerRecord | None) -> None:
    """Say whether the server has drifted, and exit with 1 if so."""
    from windtunnel.production.drift import watch_record, watch_steps
    from windtunnel.report.drift import drift_document, drift_report

    watch = watch_steps(run) if record is None else watch_record(run, record)
    answer(options, drift_document, drift_report, watch)
    if watch.has_drifted:
        click.get_current_context().exit(1)


def _recorded(options: Options, server: dict[str, object]) -> tuple[StepRun, ServerRecord | None]:
    """Return the deployment, with its steps if they are what was recorded, or the other record."""
    deployment = options.of("deployment")
    if options.watch is not None:
        deployment["calibration"] = options.watch
    if options.recorded.startswith(("http://", "https://")):
        run = run_without_steps(options.recorded, server, deployment)
        with counted("scraping", "seconds") as progress:
            return run, poll(options.recorded, options.seconds, options.every, progress)
    path = Path(options.recorded)
    if re.match(r"[\w.-]+:\d+\b", options.recorded) and not path.exists():
        raise InputError(f"there is no file {path}", f"as an address it begins with http://: http://{path}")
    record = read_record(path)
    if record is not None:
        return run_without_steps(path.name, server, deployment), record
    runs = with_id(read_step_runs(path, server, deployment), options.only, lambda run: run.name)
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs[:5])
        raise InputError(f"{path} holds {len(runs)} runs; a calibration is of one", f"--only: {names}, ...")
    return runs[0], None


def _write(
    options: Options, observation: "Observation", server: dict[str, object], record: ServerRecord | None
) -> None:
    """Write the calibration; with the run's requests, or what is known of them, also a scenario."""
    given = options.given("deployment")
    given["calibration"] = CALIBRATION
    columns = None if record is None else record.requests
    if options.requests is not None:
        columns = vars(read_requests(options.requests))
    with new_files(options.out) as draft:
        save(observation.calibration, draft / CALIBRATION)
        raw: dict[str, Any] = dict(server)
        if columns is not None:
            given["trace"] = TRACE
            rows = zip(*(columns[name] for name in ("arrival_s", "input_tokens", "output_tokens")), strict=True)
            lines = [f"{arrival_s:.6f},{prompt:.0f},{output:.0f}" for arrival_s, prompt, output in rows]
            text = "\n".join(["arrival_s,input_tokens,output_tokens", *lines])
            (draft / TRACE).write_text(f"{text}\n", encoding="utf-8")
        elif record is not None:
            raw["workload"] = workload_of(record, load_of(record))
        if columns is not None or raw.get("workload"):
            scenario = scenario_from(with_load(raw, given, None), SCENARIO, None)
            save(_with_engines(scenario, record), draft / SCENARIO)
        elif record is not None:
            remark(f"note: the {record.source} does not tell the lengths of requests: no scenario is written")
    remark(f"wrote {options.out}")


def _with_engines(scenario: Scenario, record: ServerRecord | None) -> Scenario:
    """Return a scenario of as many replicas as the record is of, whose load is that of all together."""
    deployment, num_engines = scenario.deployment, 1 if record is None else record.num_engines
    if num_engines == 1 or deployment.pools or deployment.replicas * deployment.parallelism.attention_dp > 1:
        return scenario
    remark(f"note: the record is of {num_engines} engines, and so many replicas are in the scenario")
    return scenario.with_deployment(replicas=num_engines)
