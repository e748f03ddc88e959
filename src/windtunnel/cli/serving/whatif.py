"""`windtunnel whatif`: run every combination of a few settings, and compare."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windtunnel.cli.options import Verb, options_in, scenario_file, scenario_of
from windtunnel.cli.output import answer, write_page
from windtunnel.errors import InputError

if TYPE_CHECKING:
    from windtunnel.search.space.space import Space

NEEDED = ("model", "device", "rate", "concurrency", "input_tokens", "output_tokens")
"""Options that a scenario needs; one that varies need not be given too."""


@click.command(cls=Verb, epilog="Options override the file. Short names are those of the options: tp, rate, ...")
@scenario_file
@options_in("whatif", "deployment", "load", "requests", "sampling", "general", "hub", "json")
def command(
    scenario: Path | None,
    vary: tuple[str, ...],
    slo: str | None,
    show: str | None,
    html: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Vary a few settings of a scenario and compare.

    \b
    windtunnel whatif scenario.yaml --vary tp=1,2,4 --vary rate=1:20:2
    windtunnel whatif scenario.yaml --vary deployment.engine.max_num_seqs=64,256 --slo tpot_p99=50ms
    windtunnel whatif --model llama-3.1-8b --input-tokens 1024 --output-tokens 256 \\
        --vary device=h100_sxm,l40s --vary rate=2,4,8
    """
    space = _space(scenario, vary, slo, options)

    from windtunnel.cli.progress import counted
    from windtunnel.report.search.whatif import grid_document, grid_report, shown_figures
    from windtunnel.search.asker import Asker
    from windtunnel.search.evaluation.schema import Question
    from windtunnel.search.executors import start_workers
    from windtunnel.search.store import Store

    names = shown_figures(show)
    with counted("simulating", "points") as callback, start_workers(space) as run_chunks:
        asker = Asker(space, Store(None, lambda _: None), run_chunks, callback)
        answers = asker.ask(None, range(space.num_points), Question())
    asker.check_some(None, answers)
    write_page(html, grid_report, space, answers, names)
    answer(as_json, lambda: grid_document(space, answers), lambda: grid_report(space, answers, names))


def _first(axes: dict[str, list[Any]], name: str) -> Any:
    """Return the first value of a setting that varies, for a scenario that needs it."""
    if name not in NEEDED or not axes.get(name):
        return None
    value = axes[name][0]
    return str(value) if name.endswith("_tokens") else value


def _space(scenario: Path | None, vary: tuple[str, ...], slo: str | None, options: dict[str, Any]) -> "Space":
    """Return the grid of settings around a scenario, with its limits."""
    from windtunnel.schema import encode
    from windtunnel.search.capacity.limits import limits_of, parse_limits
    from windtunnel.search.whatif import axes_of, grid_of

    if not vary:
        raise InputError("--vary is missing", "name a setting and its values: --vary tp=1,2,4")
    if scenario is None:
        axes = axes_of(vary)
        options = {name: value if value is not None else _first(axes, name) for name, value in options.items()}
    base = scenario_of(scenario, options)
    limits = parse_limits(slo) if slo is not None else limits_of(base.slo)
    raw = {**encode(base), "limits": {limit.name: limit.most_s for limit in limits}}
    raw.pop("slo", None)
    return grid_of(raw, vary)
