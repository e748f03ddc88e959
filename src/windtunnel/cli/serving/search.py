"""`windtunnel search`: the best deployment, or training job, of a declared space."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windtunnel.cli import INTERRUPTED
from windtunnel.cli.options import WRITTEN_FILE, Verb, all_of, assignments, option
from windtunnel.errors import InputError, WindtunnelError, did_you_mean

if TYPE_CHECKING:
    from windtunnel.report.search.study import SearchReport
    from windtunnel.search.space.space import Space
    from windtunnel.search.store import Store
    from windtunnel.search.study import Means

_WHAT, _WHERE, _RESULT = "What is sought", "Where it runs", "Result"

search_options = all_of(
    option(
        "--slo",
        section=_WHAT,
        metavar="LIMITS",
        help="ttft_p90=2s,tpot_p99=50ms; of a job run=30d.  [the file's]",
    ),
    option("--objective", section=_WHAT, metavar="NAME", help="requests_per_usd, output_tokens_per_s_per_device, ..."),
    option("--strategy", section=_WHAT, metavar="NAME", help="exhaustive, halving or tpe.  [the file's]"),
    option("--load", section=_WHAT, type=float, metavar="X", help="Show how many copies take X requests a second."),
    option("--seeds", section=_WHAT, type=int, metavar="N", help="Most streams of requests for the finalists.  [5]"),
    option("--executor", section=_WHERE, metavar="NAME", help="here, threads, processes or ray.  [here]"),
    option("--workers", section=_WHERE, type=int, metavar="N", help="Threads or processes.  [one a processor]"),
    option("--address", section=_WHERE, metavar="ADDRESS", help="Of a Ray cluster: auto, or host:port.  [starts one]"),
    option(
        "--store",
        section=_WHERE,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Where answers are kept, and found again.  [in the user's cache folder]",
    ),
    option("--no-store", section=_WHERE, is_flag=True, help="Keep no answers, and use none."),
    option("--resume", section=_WHERE, is_flag=True, help="Go on with the search that was interrupted last."),
    option("--top", section=_RESULT, type=int, default=10, metavar="N", help="Points to show.  [10]"),
    option(
        "--out",
        section=_RESULT,
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="Write every point, the page, and the winner to run: scenario.yaml or job.yaml, launch.sh, a Helm chart.",
    ),
    option("--html", section=_RESULT, type=WRITTEN_FILE, metavar="FILE", help="Write the page alone."),
    option("--overwrite", section=_RESULT, is_flag=True, help="Replace the files of a former search."),
    option(
        "--set",
        "settings",
        section="General",
        multiple=True,
        metavar="PATH=VALUE",
        help="Set any field of the file, as budget.devices=8. May be repeated.",
    ),
    option("--json", "as_json", section="General", is_flag=True, help="Print JSON."),
)


@click.command(cls=Verb, epilog="A space is a scenario or job file with a `vary` section: see docs/guides/search.md.")
@click.argument("space", required=False, type=click.Path(path_type=Path), metavar="[SPACE.yaml]")
@search_options
def command(
    space: Path | None,
    out: Path | None,
    html: Path | None,
    overwrite: bool,
    top: int,
    load: float | None,
    as_json: bool,
    resume: bool,
    store: Path | None,
    no_store: bool,
    executor: str | None,
    workers: int | None,
    address: str | None,
    **options: Any,
) -> None:
    """Find the cheapest deployment that meets the objective, or the best layout of a training job.

    \b
    windtunnel search space.yaml --slo ttft_p90=2s,tpot_p99=50ms --top 5
    windtunnel search space.yaml --strategy tpe --executor processes --workers 8 --out found
    windtunnel search job.yaml --set vary.layouts=all --out found
    windtunnel search --resume
    """
    from windtunnel.report.serving.files import check_folder

    if top < 1:
        raise InputError(f"--top is {top}; at least 1 is needed")
    if out is not None:
        check_folder(out, overwrite)
    means = _means(executor, workers, address)
    kept = _store(store, no_store)
    wanted = _space(space, resume, kept, options)
    if resume:
        click.echo(f"going on with the search that varies {', '.join(wanted.vary)}", err=True)
    if load is not None and wanted.is_training:
        raise InputError("--load is a load of requests", "vary num_devices to see what more devices give")

    from windtunnel.report.search.page import search_page, write_study

    report = show_study(wanted, kept, means, top, as_json, load)
    if html is not None:
        from windtunnel.files import write_text

        write_text(html, search_page(report))
        click.echo(f"wrote {html}", err=True)
    if out is not None:
        write_study(report, out)
        click.echo(f"wrote {out}", err=True)


def show_study(
    space: "Space", store: "Store", means: "Means", top: int, as_json: bool, load: float | None = None
) -> "SearchReport":
    """Search, and print what was found."""
    from windtunnel.report.documents import as_text
    from windtunnel.report.render.tables import show
    from windtunnel.report.search.study import search_report, study_document

    report = _searched(space, store, means, top, load)
    if as_json:
        click.echo(as_text(study_document(report)))
    else:
        show(*search_report(report))
    return report


class InterruptedSearchError(WindtunnelError):
    """Ctrl-C, with what is answered kept."""

    exit_code = INTERRUPTED

    def __init__(self, store: "Store") -> None:
        kept = store.connection is not None
        said = "what is answered so far is kept" if kept else "nothing is kept"
        super().__init__(f"interrupted; {said}", "go on with windtunnel search --resume" if kept else None)


def _searched(space: "Space", store: "Store", means: "Means", top: int, load: float | None) -> "SearchReport":
    """The study with its explanations; Ctrl-C leaves what is answered in the store."""
    from windtunnel.cli.progress import counted
    from windtunnel.report.search.study import SearchReport
    from windtunnel.search.answers import fleets, misconfiguration, why
    from windtunnel.search.study import search

    with counted("searching", "points") as callback:
        try:
            study = search(space, store, means.reporting(callback))
        except KeyboardInterrupt:
            raise InterruptedSearchError(store) from None
        several = len(study.found) > 1 and all(found.ranking for found in study.found)
        return SearchReport(
            study=study,
            top=top,
            why=[why(study, found, min(3, top)) for found in study.found],
            misconfiguration=misconfiguration(study, store) if several else [],
            fleets=[fleets(found, load, 5) for found in study.found] if load is not None else [],
            load=load,
        )


def _space(file: Path | None, resume: bool, store: "Store", options: dict[str, Any]) -> "Space":
    """The space of the command line: a file's with the options over it, or the one that was interrupted."""
    from windtunnel.search.capacity.limits import named_values
    from windtunnel.search.space.space import load_space, space_of_text

    if resume:
        if file is not None:
            raise InputError("--resume goes on with the search that was interrupted: leave the file out")
        unfinished = store.unfinished()
        if unfinished is None:
            raise InputError(
                f"no search was interrupted, as {store.path} has it", "name a space: windtunnel search space.yaml"
            )
        return space_of_text(unfinished)
    if file is None:
        raise InputError("there is no space to search", "name a file; see docs/guides/search.md")
    overrides = assignments(options["settings"])
    names = {"objective": "objective", "strategy": "strategy", "seeds": "finalist_seeds"}
    overrides |= {names[name]: options[name] for name in names if options[name] is not None}
    if options["slo"] is not None:
        overrides["limits"] = named_values(options["slo"])
    return load_space(file, overrides)


def _means(executor: str | None, workers: int | None, address: str | None) -> "Means":
    import os

    from windtunnel.search.executors import EXECUTORS
    from windtunnel.search.study import Means

    name = executor or ("ray" if address else "processes" if (workers or 1) > 1 else "here")
    if name not in EXECUTORS:
        raise InputError(
            f"--executor: there is no {name!r}", did_you_mean(name, EXECUTORS, f"known: {', '.join(EXECUTORS)}")
        )
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
    return Store(None if no_store else path or default_path(), lambda text: click.echo(f"warning: {text}", err=True))
