"""`windtunnel vidur`: run what a Vidur `config.json` describes on Vidur's own look-up tables."""

from windtunnel.cli.output import answer
from windtunnel.cli.verbs import Options
from windtunnel.files import check_replaceable
from windtunnel.formats.vidur.read import read_config, read_requests, read_tables
from windtunnel.formats.vidur.replay import host_s, replay
from windtunnel.formats.vidur.write import write_request_metrics
from windtunnel.report.serving.vidur import replay_document, replay_metrics, replay_report


def command(options: Options) -> None:
    """Replay a run of Vidur, and write and print its metrics."""
    check_replaceable(options.metrics, options.overwrite, ".csv")
    config = read_config(options.config)
    operators = read_tables(options.tables, config.kv_cache_prediction_granularity)
    keeps_trail = options.metrics is not None and not config.skip_cpu_overhead_modeling
    run = replay(
        config,
        operators,
        read_requests(options.requests, options.first_arrival),
        replicates_bugs=not options.right,
        fuses_steps=not keeps_trail,
        keeps_trail=keeps_trail,
    )
    if options.metrics is not None:
        spent_s = host_s(run, config, operators) if keeps_trail else 0.0
        write_request_metrics(options.metrics, replay_metrics(run, spent_s, replicates_bugs=not options.right))
    recorded = options.requests if options.against else None
    answer(options, lambda: replay_document(run, recorded), lambda: replay_report(config, run, recorded))
