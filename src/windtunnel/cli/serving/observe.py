"""`windtunnel observe`: learn a calibration, and a scenario, from what a server recorded."""

from typing import TYPE_CHECKING

from windtunnel.calibration.steps.read import read_step_runs
from windtunnel.cli.options import launched, with_load
from windtunnel.cli.output import answer, remark
from windtunnel.cli.serving.measured_runs import with_id
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.files import new_files
from windtunnel.production.observed import read_requests
from windtunnel.report.serving.run import check_folder
from windtunnel.schema import save
from windtunnel.serving.scenario import scenario_from

if TYPE_CHECKING:
    from windtunnel.production.observe import Observation

CALIBRATION, SCENARIO, TRACE = "calibration.yaml", "scenario.yaml", "requests.csv"


def command(options: Options) -> None:
    """Learn from recorded steps, and write what was learnt."""
    if not 0 < options.learn < 1:
        raise InputError(f"--learn is {options.learn:g}; a share between 0 and 1 is needed", "for instance 0.2")
    check_folder(options.out, options.overwrite)
    if options.requests is not None and options.out is None:
        raise InputError("--requests is for the scenario that --out writes", "give --out, or leave it out")
    launch = launched(options)
    if options.requests is not None and options.model is None and not launch.raw:
        raise InputError("--requests is for a scenario, whose deployment must be described", "give --from-command")
    every = read_step_runs(options.steps, launch.raw, options.of("deployment"))
    runs = with_id(every, options.only, lambda run: run.name)
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs[:5])
        raise InputError(f"{options.steps} holds {len(runs)} runs; a calibration is of one", f"--only: {names}, ...")

    # Loading the engine takes most of a second; wrong input is answered before.
    from windtunnel.production.observe import observe_steps
    from windtunnel.report.observation import observation_document, observation_report

    observation = observe_steps(runs[0], options.learn)
    if options.out is not None:
        _write(options, observation, launch.raw)
    answer(options, observation_document, observation_report, observation, launch=launch)


def _write(options: Options, observation: "Observation", server: dict[str, object]) -> None:
    """Write the calibration; with the run's requests, also a scenario of them."""
    given = {name: value for name, value in options.of("deployment").items() if value is not None}
    recorded = None if options.requests is None else read_requests(options.requests)
    with new_files(options.out) as draft:
        save(observation.calibration, draft / CALIBRATION)
        if recorded is not None:
            rows = zip(recorded.arrival_s, recorded.input_tokens, recorded.output_tokens, strict=True)
            lines = [f"{arrival_s:.6f},{prompt},{output}" for arrival_s, prompt, output in rows]
            text = "\n".join(["arrival_s,input_tokens,output_tokens", *lines])
            (draft / TRACE).write_text(f"{text}\n", encoding="utf-8")
            given |= {"trace": TRACE, "calibration": str(options.out / CALIBRATION)}
            save(scenario_from(with_load(dict(server), given, None), SCENARIO, None), draft / SCENARIO)
    remark(f"wrote {options.out}")
