"""A search: its best points, how sure they are, what each setting is worth, what cannot run; its folder of files."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from windtunnel.formats.launch.scripts import launch_script, shown_script
from windtunnel.metrics.limits import METRICS, limits_from
from windtunnel.notebook import Shown, Tabular
from windtunnel.report import report as all_blocks
from windtunnel.report.layout import cards_of, facts_of, filled, layouts_beside, table_of
from windtunnel.report.numbers import number, percent, words
from windtunnel.report.report import Block, Card, Cards, Cell, Facts, OnPage, OnTerminal, Report, Section, Table, Text
from windtunnel.report.search import figures as naming
from windtunnel.report.search.figures import LEAST_MARGIN, all_points, streams_text
from windtunnel.report.search.recommendation import against_api, certainty, gain_text, nothing_text, recommendation
from windtunnel.report.serving.run import limit_card
from windtunnel.report.training import option_text
from windtunnel.schema import fields_of, short_path
from windtunnel.search import answers
from windtunnel.search.confidence import CONFIDENCE
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.evaluation.training import MEMORY
from windtunnel.search.fleets import FleetSimulator, FleetSize, cheapest, copied, deployment_of, lengthened, ways
from windtunnel.search.prices import ApiPrice, Price
from windtunnel.search.recommend import AS_IT_IS, DEPLOYMENT
from windtunnel.search.space.space import CHANGE, Space, value_text
from windtunnel.search.store import Store
from windtunnel.search.study import SearchOutcome, Study
from windtunnel.serving.engines.command_line import NO_COMMAND, Reading
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Scenario
from windtunnel.serving.shorthand import PATHS
from windtunnel.training.job import TrainingJob
from windtunnel.training.step import TrainingResult
from windtunnel.units import format_count, format_seconds

if TYPE_CHECKING:
    import pyarrow as pa

LAYOUT = layouts_beside(__file__)
SHOWN_REFUSALS, SHOWN_FLEETS, WHY_OF = 6, 5, 3
RANK_WIDTH = 3

Why = list[tuple[int, Result | TrainingResult]]
"""Points with their runs in full."""


@dataclass(frozen=True, eq=False, repr=False)
class SearchEvidence(Tabular, Shown):
    """A study with the explanations to show."""

    REPORT = "search.study:search_report"

    study: Study
    top: int
    why: list[Why] = field(default_factory=list)
    """For each workload: points with their runs in full; empty while a search runs."""
    misconfiguration: list[list[float]] = field(default_factory=list)
    """Empty for a single workload."""
    fleets: list[list[FleetSize]] = field(default_factory=list)
    """For each workload; empty without `--load`."""
    sure_fleet: FleetSize | None = None
    """Of a recommendation: the cheapest replicas that surely take the load, where the cheapest of all may not."""
    load: float | None = None
    recommends: bool = False
    """The search is a recommendation's: `recommendation` leads."""
    launch: Reading = NO_COMMAND
    """The server's command line; empty without one."""
    prices: Sequence[Price] = ()
    """Of the devices, where they are not the catalog's."""
    api: ApiPrice | None = None
    """What an API asks, to be compared with."""

    def winner(self, place: int = 0) -> Scenario | TrainingJob | None:
        """Return the best deployment as a scenario, or the best layout as a job; None where nothing holds the limits.

        Args:
            place: position of the workload, where the space has several.
        """
        outcome = self.study.outcomes[place]
        if not outcome.ranking:
            return None
        if self.study.space.is_training:
            return answers.job_of(self.study, outcome.ranking[0])
        fleet = self.fleets[place][0] if self.recommends and self.fleets else None
        scenario = answers.scenario_of(self.study, outcome, outcome.ranking[winner_rank(self, place)])
        return copied(scenario, fleet, self.load)

    def to_arrow(self) -> "pa.Table":
        """Return all points as a pyarrow table: a row for each workload and each stream of requests that one met."""
        return answers.points_table(self.study)


def evidence_of(study: Study, store: Store, top: int, load: float | None = None, **shown: Any) -> SearchEvidence:
    """Explain the `top` points of a study, and size fleets for a `load` in requests/s; `shown` are other fields."""
    are_several = len(study.outcomes) > 1 and all(outcome.ranking for outcome in study.outcomes)
    if load is not None:
        study = replace(study, outcomes=[lengthened(study, each, load, SHOWN_FLEETS) for each in study.outcomes])
    simulators = [] if load is None else [FleetSimulator(study, outcome, load) for outcome in study.outcomes]
    fleets = [
        cheapest([each.fewest(way) for way in ways(study, each.outcome, each.load, SHOWN_FLEETS)])
        for each in simulators
    ]
    evidence = SearchEvidence(
        study=study,
        top=top,
        misconfiguration=answers.misconfiguration(study, store) if are_several else [],
        fleets=fleets,
        sure_fleet=simulators[0].surely(fleets[0][0]) if fleets and fleets[0] else None,
        load=load,
        **shown,
    )
    listed = [_listed(evidence, place)[:WHY_OF] for place in range(len(study.outcomes))]
    why = [answers.why(study, outcome, points) for outcome, points in zip(study.outcomes, listed, strict=True)]
    return replace(evidence, why=why)


def _listed(evidence: SearchEvidence, place: int) -> list[int]:
    """Return the best points to show, best first: one for each deployment, and at least one for each device that a
    recommendation tries.
    """
    study, outcome = evidence.study, evidence.study.outcomes[place]
    if DEPLOYMENT not in study.space.vary or not outcome.ranking:
        idle = answers.idle_changes(study, outcome)
        return [index for index in outcome.ranking if index not in idle][: evidence.top]
    ranking, winner = outcome.ranking, outcome.ranking[winner_rank(evidence, place)]
    points = {deployment_of(study, index): index for index in [*reversed(ranking), winner]}.values()
    shown = sorted(points, key=ranking.index)
    devices = {study.point(index).settings[PATHS["device"]]: index for index in reversed(shown)}
    return sorted({*shown[: evidence.top], *devices.values()}, key=ranking.index)


def search_report(evidence: SearchEvidence) -> Report:
    """Return the report of a search, finished or under way: the answer first, then its evidence."""
    space, count = evidence.study.space, evidence.study.count
    asked = [("limits", naming.limits_text(space)), ("objective", naming.objective_text(space.objective))]
    if space.is_training:
        asked += [("varied", naming.varied_text(space)), ("held", naming.shared_text(space))]
    else:
        asked += naming.assumed_rows(space)
        is_list = not evidence.prices and "price_usd_per_hour" not in space.scenario.get("deployment", {})
        asked += [("prices", "list prices of the catalog")] if is_list and evidence.recommends else []
    lead: list[Block] = [
        Facts(asked),
        *(price.text for price in evidence.prices if price.text),
        *evidence.launch.not_starting,
        *evidence.launch.remarks,
    ]
    sections = []
    for place, outcome in enumerate(evidence.study.outcomes):
        sections += _workload_sections(evidence, place, outcome)
    if evidence.misconfiguration:
        names = [str(outcome.workload) for outcome in evidence.study.outcomes]
        rows = [[name, *map(percent, shares)] for name, shares in zip(names, evidence.misconfiguration, strict=True)]
        table = Table(["best for", *(f"under {name}" for name in names)], rows)
        sections.append(Section("What the best point of one workload is worth under another", [table]))
    if count.num_runs or count.num_known:
        counters = LAYOUT["count_of_jobs" if space.is_training else "count"]
        sections.append(Section("", [facts_of(count, counters)], "Work of the search"))
    title = f"{format_count(space.num_points, 'point')} of {space.model or 'the space'}"
    text = recommendation_text(evidence) if evidence.recommends else _verdict(evidence)
    is_good = any(outcome.ranking for outcome in evidence.study.outcomes) or (False if evidence.why else None)
    if evidence.recommends:
        for place, each in enumerate(sections):
            if each.heading in _ON_PAGE:
                sections[place] = replace(each, blocks=[OnPage(partial(list, each.blocks))])
    if evidence.recommends and CHANGE in space.vary:
        # The first line is what to type.
        return Report("", [title, *lead], sections, verdict=text, is_good=is_good)
    return Report(title, lead, sections, verdict=text, is_good=is_good)


def recommendation_text(evidence: SearchEvidence) -> str:
    """Say what to serve the model on, and from which load that costs less than an API."""
    outcome, ways = evidence.study.outcomes[0], evidence.fleets[0] if evidence.fleets else []
    text = recommendation(evidence.study, evidence.load, ways, evidence.sure_fleet)
    if evidence.api is None or not outcome.ranking:
        return text
    return f"{text} {against_api(evidence.study, evidence.api, evidence.load, ways)}"


_EVERY_POINT = "Every point that meets the limits"
_ON_PAGE = ("What each setting is worth", _EVERY_POINT)
"""Headings of sections that a recommendation shows on its page alone."""


def _verdict(evidence: SearchEvidence) -> str:
    """Name the best point of each workload, with its objective."""
    study, objective = evidence.study, evidence.study.space.objective
    texts = []
    for outcome in study.outcomes:
        under = "" if outcome.workload is None else f" under {outcome.workload}"
        best = _nothing_text(evidence, outcome)
        if outcome.ranking:
            mean = outcome.mean(outcome.ranking[0])
            figure = f"{naming.figure_text(mean, objective)} {naming.figure_title(objective)}"
            best = f"{study.point(outcome.ranking[0]).title} ({figure})."
            best += _job_text(mean) if study.space.is_training else _load_text(study, outcome)
        texts.append(f"Best{under}: {best}" if outcome.ranking else f"{best.removesuffix('.')}{under}.")
    return " ".join(texts)


def _load_text(study: Study, outcome: SearchOutcome) -> str:
    """Say what load the best point holds, for how much, and which limit a higher one breaks."""
    best, burst = outcome.mean(outcome.ranking[0]), outcome.burst(outcome.ranking[0])
    held = naming.held_text(best.load, burst, naming.unit_of(study.space))
    if burst is not None:
        return f" Holds {held}."
    cost = f" for ${best.figures['usd_per_hour']:,.2f}/h" if "usd_per_hour" in best.figures else ""
    is_found = study.space.load == "capacity"
    limit = naming.limit_text(best.limited_by, limits_from(study.space.limits)) if is_found else ""
    return f" Holds {held}{cost}{f'; above it, {limit}' if limit else ''}."


def _job_text(job: Evaluation) -> str:
    """Return the step time of a job, and the time and price of its run where they are known."""
    run = "".join(
        f"{word} {naming.figure_text(job, name)}"
        for name, word in (("run_s", ", the run"), ("run_usd", " and $"))
        if name in job.figures
    )
    return f" A step takes {naming.figure_text(job, 'step_s')}{run.replace('$ ', '$')}."


def _workload_sections(evidence: SearchEvidence, place: int, outcome: SearchOutcome) -> list[Section]:
    """Return what one workload's search came to: its answers, the best points, all points, settings, refusals."""
    study, space = evidence.study, evidence.study.space

    def heading(text: str) -> str:
        return text if outcome.workload is None else f"{outcome.workload}: {text[:1].lower()}{text[1:]}"

    title, counts = "" if outcome.workload is None else f"Workload {outcome.workload}", _count_lines(outcome)
    if not outcome.ranking:
        return [Section(title, [Text(counts)]), *_refusals(outcome, heading("What cannot run"))]
    why = evidence.why[place] if evidence.why else []
    winner = winner_rank(evidence, place)
    fleets = _fleet_sections(evidence, evidence.fleets[place]) if evidence.fleets else []
    # The gains of the table of changes say the same.
    effects = {} if CHANGE in space.vary else answers.worths(space, outcome)
    return [
        Section(title, [Text(counts)]),
        *(fleets if evidence.recommends else []),  # they are its answer
        Section("", _best(evidence, place, why), heading("The best points"), is_open=True),
        *([_why_section(why)] if why else []),
        *([_worth_section(space, outcome, effects, heading("What each setting is worth"))] if effects else []),
        Section("", all_points(study, outcome, winner) if len(outcome.ranking) > 1 else [], heading(_EVERY_POINT)),
        *([] if evidence.recommends else fleets),
        *_refusals(outcome, heading("What cannot run")),
    ]


def winner_rank(evidence: SearchEvidence, place: int) -> int:
    """Return the place in the ranking of what a workload's answer names: for a load the cheapest replicas, of changes
    to a deployment one that gains, else 0."""
    study, outcome = evidence.study, evidence.study.outcomes[place]
    if CHANGE in study.space.vary and (present := answers.present_unless_gain(study, outcome)) is not None:
        return outcome.ranking.index(present)
    if not evidence.recommends or not evidence.fleets:
        return 0
    return outcome.ranking.index(evidence.fleets[place][0].index)


def _count_lines(outcome: SearchOutcome) -> list[str]:
    refused = sum(len(points) for points in outcome.refusals.values())
    evaluated = f"{format_count(len(outcome.evaluations), 'point')} evaluated"
    lines = [f"{evaluated}: {refused:,} cannot run, {len(outcome.ranking):,} meet the limits"]
    num_beyond = sum(evaluation.limited_by == MEMORY for evaluation in outcome.evaluations.values())
    return [*lines, f"{num_beyond:,} do not fit the devices' memory"] if num_beyond else lines


def _nothing_text(evidence: SearchEvidence, outcome: SearchOutcome) -> str:
    """Return the sentence for an empty ranking."""
    if not evidence.why:
        return "No point meets the limits so far."
    if evidence.study.space.is_training:
        return (
            "No layout fits and meets the limits: use more devices, a smaller batch or shorter sequences, or --offload."
        )
    return nothing_text(evidence.study, outcome)


def _best(evidence: SearchEvidence, place: int, why: Why) -> list[Block]:
    """Return the best points with their figures, and how sure their order is."""
    study, outcome, listed = evidence.study, evidence.study.outcomes[place], _listed(evidence, place)
    winner, idle = outcome.ranking[winner_rank(evidence, place)], answers.idle_changes(study, outcome)
    same = [study.point(index).title for index in idle]
    points = [(str(rank), study.point(index).title) for rank, index in enumerate(listed, start=1)]
    sureness = sureness_texts(study, outcome) if why else []
    space_finds_loads = bool(why) and not study.space.is_training and study.space.load == "capacity"
    bursts = [burst for index in outcome.ranking[: evidence.top] if (burst := outcome.burst(index)) is not None]
    text = "which are over too soon to tell what is sustained; give --num-requests"
    return [
        *([OnPage(lambda: _winner(evidence, outcome, winner))] if why else []),
        OnTerminal(lambda: [Facts(points, RANK_WIDTH), best_table(study, outcome, listed)]),
        OnPage(lambda: [best_table(study, outcome, listed, is_on_page=True, winner=winner)]),
        *([f"{format_count(len(idle), 'change')} made no difference: {'; '.join(same)}."] if idle else []),
        *([f"{len(bursts)} of these loads are held in bursts, {text} {max(bursts)[1]}"] if bursts else []),
        *([rest_text(outcome, listed)] if space_finds_loads else []),
        *([Text(sureness)] if sureness else []),
        *([Text([_job_options(study.point(winner).settings)])] if why and study.space.is_training else []),
        *([OnTerminal(lambda: _command(evidence, outcome, winner))] if why and evidence.launch.taken else []),
    ]


def _job_options(settings: Mapping[str, Any]) -> str:
    """Return what makes a training job the best point: the label of its recomputation does not say the modules."""
    given = [(path, value) for path, value in settings.items() if value is not None and value is not False]
    texts = (option_text(path, value_text(value).replace("'", "")) for path, value in reversed(given))
    return f"The best as options of `windtunnel train`: {' '.join(texts)}"


def _command(evidence: SearchEvidence, outcome: SearchOutcome, index: int) -> list[Block]:
    """Return what starts a changed server, with the options of its command that change no time."""
    study = evidence.study
    if study.point(index).choice.get(CHANGE, AS_IT_IS) == AS_IT_IS:
        return []
    scenario = answers.scenario_of(study, outcome, index)
    script = launch_script(scenario, naming.engine_versions(scenario), evidence.launch.others)
    return [Text([f"Changed command: {study.point(index).title}", *shown_script(script)])]


def _winner(evidence: SearchEvidence, outcome: SearchOutcome, index: int) -> list[Block]:
    """Return the headline figures of the point that the answer names, or of one copy, and what launches it."""
    study, best = evidence.study, outcome.mean(index)
    if study.space.is_training:
        return [
            Cards([Card(naming.figure_text(best, name), naming.figure_title(name)) for name in LAYOUT["job_cards"]])
        ]
    limits = [limit for limit in limits_from(study.space.limits) if limit.name in best.figures]
    of_limits = [
        limit_card(best.figures[limit.name], limit.most_s, naming.figure_title(limit.name)) for limit in limits
    ]
    scenario = answers.scenario_of(study, outcome, index)
    script = launch_script(scenario, naming.engine_versions(scenario), evidence.launch.others)
    launch = all_blocks.Code(script, "Launch the best point")
    cards = {
        filled(label, {"copy": "one replica" if evidence.fleets else None, "unit": naming.unit_of(study.space)}): card
        for label, card in LAYOUT["cards"].items()
    }
    return [Cards([*of_limits, *cards_of({**best.figures, "load": best.load}, cards).facts]), launch]


def best_table(
    study: Study, outcome: SearchOutcome, points: Sequence[int], is_on_page: bool = False, winner: int | None = None
) -> Table:
    """Return the table of the best points by rank.

    A terminal lists their settings apart and breaks headings, to fit its width; a page has more columns.
    """
    names, is_training = _table_figures(study, outcome), study.space.is_training
    gains = answers.gains_of(study, outcome)
    if is_on_page and not is_training and not gains:  # changes have long names
        # Another percentile of a limited latency says little.
        known = {*names, *(limit.metric for limit in limits_from(study.space.limits))}
        names += [name for name in LAYOUT["page_figures"] if not known & {name, name.partition("_")[0]}]
    elif is_training and not is_on_page:
        are_alike = len({outcome.mean(index).figures["devices"] for index in points}) == 1
        left_out = {"devices" if are_alike else "", "tokens_per_usd" if "run_usd" in names else ""}
        names = [name for name in names if name not in left_out or name == study.space.objective]
    rows: list[list[str | Cell]] = []
    for rank, index in enumerate(points, start=1):
        mean, bound = outcome.mean(index), outcome.at_least(index)
        figures = [naming.figure_cell(mean, name) for name in names]
        point = Cell(study.point(index).title) if is_on_page else Cell(str(rank))
        if is_training:
            rows.append([point, *figures])
            continue
        limit = naming.limit_name(outcome.evaluations[index].limited_by)
        gain = [gain_text(gains[index])] if gains else []
        rows.append(
            [point, *gain, number(mean.load), "" if bound is None else number(max(bound, 0.0)), *figures, limit]
        )
    titles = [naming.limit_name(name) or naming.figure_title(name) for name in names]
    first = "point" if is_on_page else ""
    marked = points.index(winner) if winner is not None else 0
    if is_training:
        return Table([first, *(titles if is_on_page else map(naming.two_lines, titles))], rows, winner=marked)
    gain_title = ["gain"] if gains else []
    titles = [first, *gain_title, naming.unit_of(study.space), "at least", *titles, "limit"]
    return Table(titles if is_on_page else [*map(naming.two_lines, titles)], rows, winner=marked)


def _table_figures(study: Study, outcome: SearchOutcome) -> list[str]:
    """Return the figures of the best points that a terminal shows: devices, price, objective, limited latencies."""
    objective = study.space.objective
    if study.space.is_training:
        known = outcome.evaluations[outcome.ranking[0]].figures
        return list(dict.fromkeys([*(name for name in LAYOUT["job_figures"] if name in known), objective]))
    is_latency = objective.partition("_")[0] in METRICS
    shown = objective if objective in naming.FIGURE_TITLES else "requests_per_usd"
    limited = [limit.name for limit in limits_from(study.space.limits)]
    return list(dict.fromkeys(["devices", "usd_per_hour", shown, *limited, *([objective] if is_latency else [])]))


def rest_text(outcome: SearchOutcome, points: Sequence[int]) -> str:
    """Say how many requests the loads of points rest on, and which of them are not steady yet."""
    answers_of = [outcome.evaluations[index] for index in points]
    sizes = sorted({answer.stream_requests for answer in answers_of})
    each = " to ".join(f"{size:,}" for size in dict.fromkeys([sizes[0], sizes[-1]]))
    if not any(answer.is_lengthened for answer in answers_of):
        return f"These loads rest on {each} requests as given: only drawn requests are made more."
    drifts = [answer.drift for answer in answers_of if answer.drift]
    text = f"These loads rest on {each} requests in each stream"
    if not drifts:
        return f"{text}, enough for them to be steady."
    moved = " to ".join(dict.fromkeys(f"{drift:+z.1%}" for drift in (min(drifts), max(drifts))))
    return f"{text}. {len(drifts)} of them moved by {moved} when last lengthened, and may move a little further."


def sureness_texts(study: Study, outcome: SearchOutcome) -> list[str]:
    """Return how sure the ranking of the best points is."""
    if study.space.is_training:
        best = outcome.evaluations[outcome.ranking[0]].figures
        low, high = format_seconds(best["step_low_s"]), format_seconds(best["step_high_s"])
        return [f"Of the first, 80% of measured steps are expected from {low} to {high}."]
    sure = answers.confidence(outcome, study.space.objective)
    runs = outcome.num_streams
    if sure is None:
        is_replay = study.space.finalist_seeds > 1
        why = "every seed gives the same ones" if is_replay else "finalist_seeds: 5 gives one"
        return [f"One stream of requests, so no confidence bound ({why})."] if runs < 2 else []
    first, second = (study.point(index).title for index in outcome.ranking[:2])
    text = (
        f"In {naming.figure_title(study.space.objective)}, {first} beats {second} with {certainty(sure)} confidence"
        if sure > 0.5
        else f"{second} may be as good"
    )
    order = f"the first {outcome.num_finalists} are in the order of their lower bounds ({CONFIDENCE:.0%})"
    return [f"Of {runs} streams of requests, the same for all; {order}. {text}."]


def _why_section(why: Why) -> Section:
    """Return what bounds the best points, and where their time goes."""
    are_jobs = isinstance(why[0][1], TrainingResult)
    title = "Why: where the best steps go" if are_jobs else "Why: the best points at their load"
    rows = [{"rank": str(rank), **_why_row(result)} for rank, (_, result) in enumerate(why, start=1)]
    return Section(title, [table_of(rows, LAYOUT["why_of_jobs" if are_jobs else "why"], left=3)])


def _why_row(result: Result | TrainingResult) -> dict[str, Any]:
    if isinstance(result, TrainingResult):
        shares = {name: seconds / result.step_s for name, seconds in result.breakdown_s.items()}
        return {"bound_by": bound_text(result), "shares": _shares_text(shares)}
    use = fields_of(result.summary.utilisation, "busy_fraction", "mean_running", "kv_peak_fraction")
    return {"bound_by": bound_text(result), "shares": _shares_text(result.summary.time_fractions), **use}


def _shares_text(shares: Mapping[str, float]) -> str:
    """Return the parts of a time that take 1% or more, the longest first."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {percent(share)}" for name, share in ordered if share >= 0.01)


def bound_text(result: Result | TrainingResult) -> str:
    """Name what bounds a deployment, or takes most of a training step."""
    if isinstance(result, TrainingResult):
        return max(result.breakdown_s, key=lambda name: result.breakdown_s[name])
    return words(result.summary.bound_by)


def _worth_section(
    space: Space, outcome: SearchOutcome, effects: Mapping[str, Mapping[str, answers.Worth]], head: str
) -> Section:
    """Return the worth of each value of each setting."""
    basis = "the best point with it, of the best of all"
    basis = basis if space.is_training else f"{basis} ({streams_text(outcome)})"
    title = f"What each setting is worth: {basis}"
    short = {short_path(name): shares for name, shares in effects.items()}
    texts = [
        (name, ", ".join(f"{value}: {worth_text(worth)}" for value, worth in shares.items()))
        for name, shares in short.items()
    ]
    rows = [
        (name, value, Cell(worth_text(worth, "none meets the limits"), worth.share, bar=worth.share))
        for name, shares in short.items()
        for value, worth in shares.items()
    ]
    on_page: list[Block] = [f"{basis[:1].upper()}{basis[1:]}.", Table(("setting", "value", "worth"), rows, 2)]
    on_terminal = Facts(texts, max(len(name) for name, _ in texts))
    return Section(title, [OnTerminal(lambda: [on_terminal]), OnPage(lambda: on_page)], head)


def worth_text(worth: answers.Worth, nothing: str = "no point") -> str:
    """Return a share of the best, with its margin; `nothing` where no point holds the limits."""
    if not worth.share:
        return nothing
    is_sure = worth.margin is None or worth.margin < LEAST_MARGIN
    return percent(worth.share) if is_sure else f"{percent(worth.share)} ± {percent(worth.margin or 0.0)}"


def _fleet_sections(evidence: SearchEvidence, fleets: Sequence[FleetSize]) -> list[Section]:
    """Return the replicas that serve the requested load."""
    heads = {"load": evidence.load, "unit": naming.unit_of(evidence.study.space)}
    columns = {filled(header, heads): column for header, column in LAYOUT["fleets"].items()}
    rows = [{"title": evidence.study.point(fleet.index).title, **msgspec.to_builtins(fleet)} for fleet in fleets]
    return [Section("", [table_of(rows, columns)], "Replicas for the load", is_open=True)] if rows else []


def _refusals(outcome: SearchOutcome, heading: str) -> list[Section]:
    """Return how many points cannot run, by kind of reason."""
    of_kind: dict[str, Counter[str]] = {}
    for reason, points in outcome.refusals.items():
        short = reason.partition(": weights")[0]
        of_kind.setdefault(_kind_of(short), Counter())[short] += len(points)
    shown = {(next(iter(some)) if len(some) == 1 else kind): some.total() for kind, some in of_kind.items()}
    ordered = Counter(shown).most_common()
    rows = [(reason, f"{count:,}") for reason, count in ordered[:SHOWN_REFUSALS]]
    more = [f"and {len(ordered) - SHOWN_REFUSALS} more reasons"] if len(ordered) > SHOWN_REFUSALS else []
    return [Section("", [Table(("cannot run", "points"), rows, notes=more)], heading)] if rows else []


def _kind_of(reason: str) -> str:
    """Return a reason without the numbers that differ from point to point."""
    return re.sub(r"(?<=[ $])\d[\d,.]*(?: [KMGT]iB)?(?!\w)", "…", reason)
