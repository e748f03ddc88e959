"""`windtunnel vidur`: run what a Vidur `config.json` describes on Vidur's own look-up tables."""

from pathlib import Path

import click

from windtunnel.cli.options import Verb, option

_FILES, _OUTPUT = "Vidur's files", "Result"


@click.command(cls=Verb, epilog="Guide: docs/guides/from-vidur.md")
@click.argument("config", type=click.Path(path_type=Path), metavar="CONFIG.json")
@option(
    "--tables",
    section=_FILES,
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE.npz",
    help="Prediction tables, in milliseconds, or a folder of them.",
)
@option(
    "--requests",
    section=_FILES,
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="Requests: request_metrics.csv, or the same columns as Parquet.",
)
@option("--first-arrival", section=_FILES, type=float, default=0.0, metavar="S", help="Which that file lacks.  [0]")
@option("--against", section=_OUTPUT, is_flag=True, help="Compare with the times in that file, request by request.")
@option("--right", section=_OUTPUT, is_flag=True, help="Leave out the bugs of Vidur that change times.")
@option(
    "--metrics",
    section=_OUTPUT,
    type=click.Path(path_type=Path),
    metavar="FILE.csv",
    help="Write request_metrics.csv.",
)
@option(
    "--chrome-trace",
    section=_OUTPUT,
    type=click.Path(path_type=Path),
    metavar="FILE.json",
    help="Write chrome_trace.json: a bar for each batch and stage.",
)
@option(
    "--event-trace",
    section=_OUTPUT,
    type=click.Path(path_type=Path),
    metavar="FILE.json",
    help="Write event_trace.json: every event.",
)
@option("--overwrite", section=_OUTPUT, is_flag=True, help="Replace the files of a former run.")
@option("--json", "as_json", section="General", is_flag=True, help="Print JSON.")
def command(
    config: Path,
    tables: Path,
    requests: Path,
    first_arrival: float,
    against: bool,
    right: bool,
    metrics: Path | None,
    chrome_trace: Path | None,
    event_trace: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Run what a Vidur config.json describes, event for event, on Vidur's own look-up tables."""
    from windtunnel.formats.timeline.file import check_file
    from windtunnel.formats.vidur import traces as vidur_traces
    from windtunnel.formats.vidur.read import find_tables, read_config, read_requests, read_tables
    from windtunnel.formats.vidur.replay import batch_times, host_s, replay
    from windtunnel.formats.vidur.write import check_metrics_file, write_request_metrics
    from windtunnel.report.documents import as_text
    from windtunnel.report.render.tables import show
    from windtunnel.report.serving.vidur import replay_document, replay_metrics, replay_report

    if metrics is not None:
        check_metrics_file(metrics, overwrite)
    traces = [path for path in (chrome_trace, event_trace) if path is not None]
    for path in traces:
        check_file(path, overwrite)
    run_config = read_config(config)
    granularity = run_config.execution_time_predictor_config.kv_cache_prediction_granularity
    operators = read_tables(find_tables(tables, run_config) if tables.is_dir() else tables, granularity)
    has_host = not run_config.execution_time_predictor_config.skip_cpu_overhead_modeling
    keeps_trail = bool(traces) or (has_host and metrics is not None)
    run = replay(
        run_config,
        operators,
        read_requests(requests, first_arrival),
        replicates_bugs=not right,
        fuses_steps=not keeps_trail,
        keeps_trail=keeps_trail,
    )
    if metrics is not None:
        spent_s = host_s(run, run_config, operators) if has_host else 0.0
        write_request_metrics(metrics, replay_metrics(run, spent_s, replicates_bugs=not right))
    if chrome_trace is not None:
        vidur_traces.write_chrome_trace(chrome_trace, vidur_traces.chrome_events(batch_times(run)))
    if event_trace is not None:
        events = vidur_traces.event_trace(run.requests["arrival_s"], run.requests["rank"], batch_times(run))
        vidur_traces.write_event_trace(event_trace, events)
    recorded_times = requests if against else None
    if as_json:
        click.echo(as_text(replay_document(run, recorded_times)))
    else:
        show(*replay_report(run_config, run, recorded_times))
