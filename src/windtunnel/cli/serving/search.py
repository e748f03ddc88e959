"""`windtunnel search`: the best deployment, or training job, of a declared space."""

import math
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
from msgspec.structs import replace as replace_fields

from windtunnel import catalog
from windtunnel.cli.diffusion import diffusion_file, search_file
from windtunnel.cli.naming import name_settings
from windtunnel.cli.options import assignments, launched, with_read_load
from windtunnel.cli.output import answer, counted, interrupted, remark, remark_left_out
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError, WindtunnelError, check_known
from windtunnel.formats.launch.scripts import start_remark
from windtunnel.metrics.limits import limit_values, limits_from
from windtunnel.report.render.terminal import show
from windtunnel.report.search.study import SearchEvidence, evidence_of, search_report
from windtunnel.report.search.study_files import study_document, write_study
from windtunnel.report.search.whatif import reasons
from windtunnel.report.serving.run import check_folder
from windtunnel.schema import dotted
from windtunnel.search.evaluation.evaluate import Evaluator
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.executors import EXECUTORS, Means, usual_means
from windtunnel.search.space.space import Space, load_space, point_at
from windtunnel.search.store import Store, default_path
from windtunnel.search.study import InterruptedSearchError, Study, search
from windtunnel.serving.engines.command_line import NO_COMMAND, Reading
from windtunnel.units import format_count, format_seconds


def command(options: Options) -> None:
    """Search a space, print the best points and write the requested files."""
    if (raw := diffusion_file(options.space)) is not None:
        search_file(options, raw)
        return
    check_folder(options.out, options.overwrite)
    if options.load == math.inf:
        raise InputError("--load inf has no number of replicas that serves it", "give requests a second")
    launch, store = launched(options), store_of(options)
    server = launch.for_any_split(with_read_load(options, launch, is_sized=True))
    space = _resumed_space(store) if options.resume else _space(options, server)
    if space.is_training and (options.load is not None or launch.raw):
        given = "--load is a load" if options.load is not None else "--from-command is a server"
        raise InputError(f"{given} of requests", "vary num_devices to see what more devices give")
    if options.load is not None and space.comes_and_goes:
        raise InputError(
            "--load counts copies of a deployment whose replicas are there all the time",
            "with autoscaling or faults give the load as workload.arrivals, load: given, and vary the replicas",
        )
    means = means_of(options, space)
    evidence = show_study(options, space, store, means, options.top, options.load, launch)
    if options.resume:
        remark(f"the search is done; {_time_text(store, msgspec.json.encode(space).decode())}")
    write_evidence(options, evidence)


def write_evidence(options: Options, evidence: SearchEvidence) -> None:
    """Write the folder that the options ask for."""
    if options.out is not None:
        write_study(evidence, options.out)
        remark(f"wrote {options.out}")
        limits = () if evidence.study.space.is_training else limits_from(evidence.study.space.limits)
        if lost := [limit.title for limit in limits if not limit.is_of_requests]:
            remark(f"note: a scenario's SLO is of requests: the winner's leaves out {', '.join(lost)}")


def show_study(
    options: Options,
    space: Space,
    store: Store,
    means: Means,
    top: int = 10,
    load: float | None = None,
    launch: Reading = NO_COMMAND,
    **shown: Any,
) -> SearchEvidence:
    """Search, print the best points and why they win; Ctrl-C prints the best so far.

    The answers so far stay in the store. `shown` are other fields of the evidence.
    """
    # A model that cannot be read is refused in the search; one of the points, in its own answer.
    with suppress(InputError):
        if not shown.get("recommends"):  # its scenario was remarked on
            given = space.scenario.get("workload")
            requests = given if isinstance(given, dict) else {}
            remark_left_out(catalog.model(space.model), "images" in requests or "videos" in requests)
    study: Study | None = None
    evidence: SearchEvidence | None = None
    with counted("searching", "points") as callback:
        try:
            study = search(space, store, replace(means, progress=callback))
            _name_settings(study, options)
            _note_stops(study, launch, top)
            evidence = evidence_of(study, store, top, load, launch=launch, **shown)
        except KeyboardInterrupt as interruption:
            if isinstance(interruption, InterruptedSearchError):
                study = interruption.study
                _name_settings(study, options)
    if evidence is None:
        if study is None:
            raise KeyboardInterrupt
        raise _interruption(options, store, SearchEvidence(study=study, top=top, load=load, launch=launch, **shown))
    answer(options, study_document, search_report, evidence)
    return evidence


def _name_settings(study: Study, options: Options) -> None:
    for outcome in study.outcomes:
        outcome.evaluations.update(in_options(outcome.evaluations, options))


def stops_of(
    space: Space, points: Iterable[int], workload: str | None, launch: Reading, is_written: bool = False
) -> dict[int, str]:
    """Return the points whose server would not start, with the reason: as read, or as its command `is_written`.

    Without a command, those that set the greatest length.
    """
    evaluator = Evaluator(space)
    may_stop = launch.taken or (not space.is_training and "max_model_len" in str((space.scenario, space.vary)))
    scenarios = ((at, evaluator.deployed(point_at(space, at), workload).scenario) for at in points if may_stop)
    reasons: dict[int, str] = {}
    for at, scenario in scenarios:
        with suppress(InputError):  # of an engine whose command is not known
            reasons |= {at: reason} if (reason := start_remark(scenario, launch, is_written)) else {}
    return reasons


def _note_stops(study: Study, launch: Reading, top: int) -> None:
    """Note the best points whose server would not start as it was read; refuse those that no written command starts."""
    launch.not_starting.clear()
    for place, outcome in enumerate(study.outcomes):
        best = outcome.ranking[:100]  # each takes some 25 ms
        stops = stops_of(study.space, best, outcome.workload, launch)
        listed = {index: stops[index] for index in outcome.ranking[:top] if index in stops and launch.taken}
        launch.not_starting += [text for text in reasons(study.space, listed) if text not in launch.not_starting]
        refused = stops_of(study.space, stops, outcome.workload, launch, is_written=True)
        left = sum(index not in refused for index in outcome.ranking[: outcome.num_finalists])
        study.outcomes[place] = replace(outcome, num_finalists=left)
        for index, reason in refused.items():
            outcome.ranking.remove(index)
            outcome.evaluations[index] = replace_fields(outcome.evaluations[index], refused=reason, holds=False)


def in_options(answers: dict[int, Evaluation], options: Options) -> dict[int, Evaluation]:
    """Return answers whose refusals name settings by the options that decide them."""
    reasons = {answer.refused: InputError(answer.refused) for answer in answers.values() if answer.refused}
    for error in reasons.values():
        name_settings(error, vars(options))
    return {
        index: replace_fields(answer, refused=reasons[answer.refused].message) if answer.refused in reasons else answer
        for index, answer in answers.items()
    }


def _interruption(options: Options, store: Store, partial: SearchEvidence) -> WindtunnelError:
    """Print the best points so far, where a reader asked for text; return the error for Ctrl-C."""
    best_is_shown = any(outcome.ranking for outcome in partial.study.outcomes) and not options.json
    if best_is_shown:
        show(search_report(partial))
    is_kept = store.connection is not None
    done = max((len(outcome.evaluations) for outcome in partial.study.outcomes), default=0)
    return interrupted(
        f"interrupted: {done:,} of {format_count(partial.study.space.num_points, 'point')} are evaluated"
        + ("; the best so far is above" if best_is_shown else "")
        + ("" if is_kept else "; nothing is kept"),
        "go on with windtunnel search --resume" if is_kept else None,
    )


def _resumed_space(store: Store) -> Space:
    """Return the space of the search that was interrupted last."""
    unfinished = store.unfinished()
    if unfinished is None:
        raise InputError(f"{store.path} has no interrupted search", "name a space: windtunnel search space.yaml")
    space = msgspec.json.decode(unfinished, type=Space)
    remark(f"going on with the search that varies {', '.join(space.vary)}; {_time_text(store, unfinished)}")
    return space


def _time_text(store: Store, space: str) -> str:
    """Say how long the runs of a space's search took until now."""
    runs = store.runs_of(space)
    if not runs:
        return "its store does not say how long it took until now"
    took = format_seconds(sum(seconds for _, seconds in runs))
    return f"until now it took {took} in {format_count(len(runs), 'run')}, the first from {runs[0][0][:16]} UTC"


def _space(options: Options, server: dict[str, Any]) -> Space:
    """Return the space of a file, with the server of a command line and then the options over it."""
    fields = {"objective": options.objective, "strategy": options.strategy, "finalist_seeds": options.seeds}
    overrides = assignments(options.settings) | {name: value for name, value in fields.items() if value is not None}
    if options.slo is not None:
        overrides["limits"] = limit_values(options.slo)
    return load_space(options.space, dotted(server) | overrides)


def means_of(options: Options, space: Space | None = None) -> Means:
    """Return the workers that the options of a search name, or else the usual ones of its space."""
    workers, address = options.workers, options.address
    if space is not None and (options.executor, workers, address) == (None, None, None):
        return usual_means(space)
    name = options.executor or ("ray" if address else "processes" if (workers or 1) > 1 else "here")
    check_known(name, EXECUTORS, f"--executor: there is no {name!r}")

    if address is not None and name != "ray":
        raise InputError("--address is a Ray cluster's", "add --executor ray")
    if workers is not None and workers > 1 and name == "here":
        raise InputError("--executor here is one process", "take threads or processes for several --workers")
    return Means(name, workers or os.cpu_count() or 1, address)  # type: ignore[arg-type]


def store_of(options: Options) -> Store:
    """Return the store of answers that the options of a search name."""
    path = None if options.no_store else options.store or default_path()
    return Store(path, lambda text: remark(f"warning: {text}"))
