"""`windtunnel simulate`: a scenario from a file and options, one run, its summary."""

from typing import TYPE_CHECKING

from windtunnel.cli.diffusion import diffusion_file, simulate_file
from windtunnel.cli.options import launched, scenario_of, with_read_load
from windtunnel.cli.output import answer, counted, remark
from windtunnel.cli.verbs import Options
from windtunnel.files import check_replaceable
from windtunnel.formats.timeline.file import SUFFIXES
from windtunnel.formats.timeline.write import MAX_EVENTS, write_timeline
from windtunnel.formats.vidur.write import request_metrics, write_request_metrics
from windtunnel.report.render.json import version
from windtunnel.units import format_count

if TYPE_CHECKING:
    from windtunnel.serving.results import Result


def command(options: Options) -> None:
    """Simulate a scenario, write the requested files and print the summary."""
    if (raw := diffusion_file(options.scenario)) is not None:
        simulate_file(options, raw, "server_command", "deployment", "load", "requests", "sampling", "slo", "run_files")
        return
    launch = launched(options)
    described = scenario_of(options, options.slo, with_read_load(options, launch))

    from windtunnel.report.serving.run import check_folder, run_document, run_report, write_run
    from windtunnel.serving.simulate import simulate

    check_folder(options.out, options.overwrite)
    check_replaceable(options.timeline, options.overwrite, *SUFFIXES)
    check_replaceable(options.vidur_metrics, options.overwrite, ".csv")
    with counted("simulating", "requests") as callback:
        result = simulate(described, progress=callback, allow_download=options.hub)
    if options.timeline is not None:
        _write_timeline(result, options)
    if options.out is not None:
        write_run(result, options.out, launch.document)
        remark(f"wrote {options.out}")
    if options.vidur_metrics is not None:
        num_replicas = result.scenario.deployment.most_replicas
        columns = request_metrics(result.requests, result.steps, result.setup, num_replicas)
        write_request_metrics(options.vidur_metrics, columns)
        remark(f"wrote {options.vidur_metrics}")
    answer(options, run_document, run_report, result, launch=launch)


def _write_timeline(result: "Result", options: Options) -> None:
    """Write the timeline, and say on stderr how much of the run it shows."""
    setup, file = result.setup, options.timeline
    about = {
        "producer": f"windtunnel {version()}",
        "model": setup.model.name,
        "device": setup.device.name,
        "engine": f"{setup.engine.name} {setup.engine.version}",
    }
    phases = None if result.fleet is None else result.fleet.phases
    limit = MAX_EVENTS if options.timeline_events is None else options.timeline_events
    detail = write_timeline(file, result.requests, result.steps, limit, about, phases)
    remark(f"wrote {file}: {format_count(detail.num_events, 'event')}")
    if not detail.is_complete:
        remark(f"in it {detail.sampling}; --timeline-events {2 * limit} shows more")
