"""`windtunnel rl`: divide devices between rollouts and training."""

from windtunnel.cli.options import scenario_of
from windtunnel.cli.output import answer, counted
from windtunnel.cli.verbs import Options
from windtunnel.schema import read_table


def command(options: Options) -> None:
    """Try every division of the devices, and show which gives the shortest iteration."""
    scenario = scenario_of(options)
    hint = "see docs/guides/first-training-job.md"
    job = {} if options.job is None else read_table(options.job, "a training job", hint)

    from windtunnel.cli.serving.search import means_of, store_of
    from windtunnel.report.search.rollouts import division_document, division_report
    from windtunnel.search.rollouts import divide

    with counted("simulating", "parts") as doing:
        means, store = means_of(options), store_of(options)
        shown = doing or (lambda *_: None)
        division = divide(scenario, options.num_devices, job, options.forward_passes, store, means, shown)
    answer(options, division_document, division_report, division)
