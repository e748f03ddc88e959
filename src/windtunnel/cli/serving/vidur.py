"""`windtunnel vidur`: run what a Vidur `config.json` describes on Vidur's own look-up tables."""

from windtunnel.cli.output import answer
from windtunnel.cli.verbs import Options
from windtunnel.files import check_replaceable
from windtunnel.formats.timeline.file import SUFFIXES
from windtunnel.formats.vidur.read import OperatorTables, VidurConfig, read_config, read_requests, read_tables
from windtunnel.formats.vidur.replay import host_s, replay
from windtunnel.formats.vidur.write import chrome_events, write_chrome_trace, write_request_metrics
from windtunnel.report.serving.vidur import replay_document, replay_metrics, replay_report
from windtunnel.serving.run import LoopRun


def command(options: Options) -> None:
    """Replay a run of Vidur, and write and print its metrics."""
    check_replaceable(options.metrics, options.overwrite, ".csv")
    check_replaceable(options.chrome_trace, options.overwrite, *SUFFIXES)
    config = read_config(options.config)
    operators = read_tables(options.tables, config.kv_cache_prediction_granularity)
    needs_host = options.metrics is not None and not config.skip_cpu_overhead_modeling
    keeps_trail = options.chrome_trace is not None or needs_host
    run = replay(
        config,
        operators,
        read_requests(options.requests, options.first_arrival),
        replicates_bugs=not options.right,
        fuses_steps=not keeps_trail,
        keeps_trail=keeps_trail,
    )
    _write(run, config, operators, options)
    recorded = options.requests if options.against else None
    answer(options.as_json, lambda: replay_document(run, recorded), lambda: replay_report(config, run, recorded))


def _write(run: LoopRun, config: VidurConfig, operators: OperatorTables, options: Options) -> None:
    """Write the requested metrics and trace."""
    if options.metrics is not None:
        has_host = not config.skip_cpu_overhead_modeling
        spent_s = host_s(run, config, operators) if has_host else 0.0
        write_request_metrics(options.metrics, replay_metrics(run, spent_s, replicates_bugs=not options.right))
    if options.chrome_trace is not None:
        write_chrome_trace(options.chrome_trace, chrome_events(run))
