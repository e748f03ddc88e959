"""`windtunnel search`: the best deployment, or training job, of a declared space."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from windtunnel.cli import INTERRUPTED
from windtunnel.cli.options import PATH, Verb, assignments, options_in, options_of
from windtunnel.cli.output import answer, remark, remark_left_out, write_page
from windtunnel.errors import InputError, WindtunnelError, check_known

if TYPE_CHECKING:
    from windtunnel.report.search.study import SearchEvidence
    from windtunnel.search.executors import Means
    from windtunnel.search.space.space import Space
    from windtunnel.search.store import Store


class SearchOptions(NamedTuple):
    """Options of `windtunnel search`."""

    slo: str | None
    objective: str | None
    strategy: str | None
    load: float | None
    seeds: int | None
    executor: str | None
    workers: int | None
    address: str | None
    store: Path | None
    no_store: bool
    resume: bool
    top: int
    out: Path | None
    html: Path | None
    overwrite: bool
    settings: tuple[str, ...]


@click.command(cls=Verb, epilog="A space is a scenario or job file with a `vary` section: see docs/guides/search.md.")
@click.argument("space", required=False, type=PATH, metavar="[SPACE.yaml]")
@options_of(SearchOptions)
@options_in("json")
def command(options: SearchOptions, space: Path | None, as_json: bool) -> None:
    """Find the cheapest deployment that meets the objective, or the best layout of a training job.

    \b
    windtunnel search space.yaml --slo ttft_p90=2s,tpot_p99=50ms --top 5
    windtunnel search space.yaml --strategy tpe --executor processes --workers 8 --out found
    windtunnel search job.yaml --set vary.layouts=all --out found
    windtunnel search --resume
    """
    from windtunnel.report.serving.files import check_folder

    if options.top < 1:
        raise InputError(f"--top is {options.top}; at least 1 is needed")
    if options.out is not None:
        check_folder(options.out, options.overwrite)
    means = _means(options.executor, options.workers, options.address)
    store = _store(options.store, options.no_store)
    searched = _resumed_space(space, store) if options.resume else _space(space, options)
    if searched.is_training and options.load is not None:
        raise InputError("--load is a load of requests", "vary num_devices to see what more devices give")

    from windtunnel.report.search.files import write_study
    from windtunnel.report.search.study import search_report

    evidence = show_study(searched, store, means, options.top, as_json, options.load)
    write_page(options.html, search_report, evidence)
    if options.out is not None:
        write_study(evidence, options.out)
        remark(f"wrote {options.out}")


def show_study(
    space: "Space", store: "Store", means: "Means", top: int, as_json: bool, load: float | None = None
) -> "SearchEvidence":
    """Search, print the best points and why they win; Ctrl-C leaves the answers so far in the store."""
    from dataclasses import replace

    from windtunnel import catalog
    from windtunnel.cli.progress import counted
    from windtunnel.report.search.study import SearchEvidence, search_report, study_document
    from windtunnel.search.answers import fleets, misconfiguration, why
    from windtunnel.search.study import search

    # A model that cannot be read is refused in the search; one of the points, in its own answer.
    with suppress(InputError):
        remark_left_out(catalog.model(space.model))
    with counted("searching", "points") as callback:
        try:
            study = search(space, store, replace(means, progress=callback))
        except KeyboardInterrupt:
            raise _interruption(store) from None
        are_several = len(study.outcomes) > 1 and all(outcome.ranking for outcome in study.outcomes)
        evidence = SearchEvidence(
            study=study,
            top=top,
            why=[why(study, outcome, min(3, top)) for outcome in study.outcomes],
            misconfiguration=misconfiguration(study, store) if are_several else [],
            fleets=[fleets(outcome, load, 5) for outcome in study.outcomes] if load is not None else [],
            load=load,
        )
    answer(as_json, study_document, search_report, evidence)
    return evidence


def _interruption(store: "Store") -> WindtunnelError:
    """Return the error for Ctrl-C during a search, whose answers so far may be kept."""
    is_kept = store.connection is not None
    error = WindtunnelError(
        f"interrupted; {'what is answered so far is kept' if is_kept else 'nothing is kept'}",
        "go on with windtunnel search --resume" if is_kept else None,
    )
    error.exit_code = INTERRUPTED
    return error


def _resumed_space(file: Path | None, store: "Store") -> "Space":
    """Return the space of the search that was interrupted last."""
    from windtunnel.search.space.space import space_of_text

    if file is not None:
        raise InputError("--resume goes on with the search that was interrupted: leave the file out")
    unfinished = store.unfinished()
    if unfinished is None:
        raise InputError(f"{store.path} has no interrupted search", "name a space: windtunnel search space.yaml")
    space = space_of_text(unfinished)
    remark(f"going on with the search that varies {', '.join(space.vary)}")
    return space


def _space(file: Path | None, options: SearchOptions) -> "Space":
    """Return the space of a file, with the options over it."""
    from windtunnel.search.capacity.limits import named_values
    from windtunnel.search.space.space import load_space

    if file is None:
        raise InputError("there is no space to search", "name a file; see docs/guides/search.md")
    fields = {"objective": options.objective, "strategy": options.strategy, "finalist_seeds": options.seeds}
    overrides = assignments(options.settings) | {name: value for name, value in fields.items() if value is not None}
    if options.slo is not None:
        overrides["limits"] = named_values(options.slo)
    return load_space(file, overrides)


def _means(executor: str | None, workers: int | None, address: str | None) -> "Means":
    import os

    from windtunnel.search.executors import EXECUTORS, Means

    name = executor or ("ray" if address else "processes" if (workers or 1) > 1 else "here")
    check_known(name, EXECUTORS, f"--executor: there is no {name!r}")
    if workers is not None and workers < 1:
        raise InputError(f"--workers is {workers}; at least 1 is needed")
    if address is not None and name != "ray":
        raise InputError("--address is a Ray cluster's", "add --executor ray")
    if workers is not None and workers > 1 and name == "here":
        raise InputError("--executor here is one process", "take threads or processes for several --workers")
    return Means(name, workers or os.cpu_count() or 1, address)  # type: ignore[arg-type]


def _store(path: Path | None, no_store: bool) -> "Store":
    from windtunnel.search.store import Store, default_path

    if no_store and path is not None:
        raise InputError("--store and --no-store exclude each other")
    return Store(None if no_store else path or default_path(), lambda text: remark(f"warning: {text}"))
