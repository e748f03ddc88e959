"""`windtunnel vidur`: run what a Vidur `config.json` describes on Vidur's own look-up tables."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from windtunnel.cli.options import PATH, Verb, options_in, options_of
from windtunnel.cli.output import answer

if TYPE_CHECKING:
    from windtunnel.formats.vidur.read import OperatorTables, VidurConfig
    from windtunnel.serving.run import LoopRun


class ReplayOptions(NamedTuple):
    """Options of `windtunnel vidur`."""

    tables: Path
    requests: Path
    first_arrival: float
    against: bool
    right: bool
    metrics: Path | None
    chrome_trace: Path | None
    event_trace: Path | None
    overwrite: bool


@click.command(cls=Verb, epilog="Guide: docs/guides/from-vidur.md")
@click.argument("config", type=PATH, metavar="CONFIG.json")
@options_of(ReplayOptions)
@options_in("json")
def command(options: ReplayOptions, config: Path, as_json: bool) -> None:
    """Run what a Vidur config.json describes, event for event, on Vidur's own look-up tables."""
    from windtunnel.formats.timeline.file import check_file
    from windtunnel.formats.vidur.read import find_tables, read_config, read_requests, read_tables
    from windtunnel.formats.vidur.replay import replay
    from windtunnel.formats.vidur.write import check_metrics_file
    from windtunnel.report.serving.vidur import replay_document, replay_report

    if options.metrics is not None:
        check_metrics_file(options.metrics, options.overwrite)
    traces = [path for path in (options.chrome_trace, options.event_trace) if path is not None]
    for path in traces:
        check_file(path, options.overwrite)
    run_config = read_config(config)
    predictor, tables = run_config.execution_time_predictor_config, options.tables
    if tables.is_dir():
        tables = find_tables(tables, run_config)
    operators = read_tables(tables, predictor.kv_cache_prediction_granularity)
    keeps_trail = bool(traces) or (options.metrics is not None and not predictor.skip_cpu_overhead_modeling)
    run = replay(
        run_config,
        operators,
        read_requests(options.requests, options.first_arrival),
        replicates_bugs=not options.right,
        fuses_steps=not keeps_trail,
        keeps_trail=keeps_trail,
    )
    _write(run, run_config, operators, options)
    recorded = options.requests if options.against else None
    answer(as_json, lambda: replay_document(run, recorded), lambda: replay_report(run_config, run, recorded))


def _write(run: "LoopRun", config: "VidurConfig", operators: "OperatorTables", options: ReplayOptions) -> None:
    """Write the requested metrics and traces."""
    from windtunnel.formats.vidur import traces
    from windtunnel.formats.vidur.replay import host_s
    from windtunnel.formats.vidur.write import write_request_metrics
    from windtunnel.report.serving.vidur import replay_metrics

    if options.metrics is not None:
        has_host = not config.execution_time_predictor_config.skip_cpu_overhead_modeling
        spent_s = host_s(run, config, operators) if has_host else 0.0
        write_request_metrics(options.metrics, replay_metrics(run, spent_s, replicates_bugs=not options.right))
    if options.chrome_trace is not None:
        traces.write_chrome_trace(options.chrome_trace, traces.chrome_events(run))
    if options.event_trace is not None:
        traces.write_event_trace(options.event_trace, traces.event_trace(run))
