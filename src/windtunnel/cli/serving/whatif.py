"""`windtunnel whatif`: run every combination of a few settings, and compare."""

from msgspec.structs import replace

from windtunnel.cli.options import launched, scenario_of, setting_name, with_read_load
from windtunnel.cli.output import answer, counted, remark
from windtunnel.cli.verbs import Options
from windtunnel.metrics.limits import limits_of, parse_limits
from windtunnel.schema import encode
from windtunnel.search.space.space import Space, axes_of, grid_of
from windtunnel.serving.engines.command_line import Reading

NEEDED = ("model", "device", "rate", "concurrency", "input_tokens", "output_tokens")
"""Options that a scenario needs; one that varies need not be given too."""


def command(options: Options) -> None:
    """Run every combination of some settings' values, and show them side by side."""
    launch = launched(options)
    if not options.vary:
        server = with_read_load(options, launch, is_sized=True)
        arrives = options.settings or "arrivals" in server.get("workload", {})
        if options.scenario is None and not any((options.rate, options.concurrency, options.trace, arrives)):
            options.rate = 1.0
        scenario = scenario_of(options, base=server)
        limits = parse_limits(options.slo) if options.slo is not None else limits_of(scenario.slo)

        from windtunnel.cli.serving.search import show_study
        from windtunnel.search.executors import HERE
        from windtunnel.search.recommend import ranked_changes
        from windtunnel.search.store import Store

        space = ranked_changes(scenario, limits)
        show_study(options, space, Store(None, remark), HERE, launch=launch, recommends=True)
        return
    space = _space(options, launch)

    from windtunnel.cli.serving.search import in_options, stops_of
    from windtunnel.report.search.whatif import grid_document, grid_report, shown_figures
    from windtunnel.search.asker import Asker
    from windtunnel.search.evaluation.schema import Question
    from windtunnel.search.executors import start_workers
    from windtunnel.search.store import Store

    names = shown_figures(options.show, space)
    with counted("simulating", "points") as callback, start_workers(space) as run_chunks:
        asker = Asker(space, Store(None, lambda _: None), run_chunks, callback)
        answers = asker.ask(None, range(space.num_points), Question())
    asker.check_some(None, answers)
    answers = in_options(answers, options)
    launch.not_starting.clear()
    for index, sentence in stops_of(space, [at for at in answers if not answers[at].refused], None, launch).items():
        answers[index] = replace(answers[index], refused=sentence, holds=False)
    answer(options, lambda *_: grid_document(space, answers), grid_report, space, answers, names, launch=launch)


def _space(options: Options, launch: Reading) -> Space:
    """Return the grid of settings around a scenario, with its limits."""
    parts = [text.partition("=") for text in options.vary]
    options.vary = tuple(f"{setting_name(path.strip())}{equals}{values}" for path, equals, values in parts)
    if options.scenario is None:
        firsts = {name: values[0] for name, values in axes_of(options.vary).items() if name in NEEDED and values}
        if "concurrency" in firsts:  # its number of requests is that of every point
            numbers = [value for value in axes_of(options.vary)["concurrency"] if isinstance(value, int)]
            firsts["concurrency"] = max(numbers, default=firsts["concurrency"])
        for name, value in firsts.items():
            if getattr(options, name) is None:
                setattr(options, name, str(value) if name.endswith("_tokens") else value)
    base = scenario_of(options, base=with_read_load(options, launch))
    limits = parse_limits(options.slo) if options.slo is not None else limits_of(base.slo)
    raw = {**encode(base), "limits": {limit.name: limit.most_s for limit in limits}}
    raw.pop("slo", None)
    return grid_of(launch.for_any_split(raw), options.vary)
