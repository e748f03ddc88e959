"""How to divide devices between rollouts and training: the fastest way, every division, and what an iteration is."""

from typing import Any

from windtunnel.metrics.summary import SECONDS_PER_HOUR
from windtunnel.report.layout import layouts_beside, table_of
from windtunnel.report.numbers import percent
from windtunnel.report.render.json import version
from windtunnel.report.report import Facts, Report, Section, Table
from windtunnel.schema import encode, fields_of
from windtunnel.search.rollouts import WAYS, Division, Iteration
from windtunnel.serving.scenario import resolve
from windtunnel.units import format_count, format_seconds

NAMES = {"colocated": "in turn", "one_step_off": "one step off-policy", "asynchronous": "asynchronous"}
LAYOUT = layouts_beside(__file__)


def division_report(division: Division) -> Report:
    """Return the report: the fastest way in a sentence, the best division of each way, and all of them."""
    bests = [best for way in WAYS if (best := division.best_of(way)) is not None]
    every = sorted(division.iterations, key=lambda each: each.seconds)
    sections = [
        Section("", [_table(division, bests)], "The best of each way", is_open=True),
        Section("Every division", [_table(division, every)]),
        Section("What an iteration is", [Facts(_facts(division))]),
    ]
    if division.refused:
        refused = [[f"{number}", reason] for number, reason in division.refused.items()]
        sections.append(Section("Cannot train", [Table(["devices", ""], refused, right=1)]))
    notes = ["Without the reward model, rollouts that are cut off, and the exchange of trainers' and servers' memory."]
    setup = resolve(division.scenario)
    title = f"{setup.model.name} on {division.num_devices:,} x {setup.device.title}"
    return Report(title, [], sections, notes, verdict=_verdict(division, bests))


def _verdict(division: Division, bests: list[Iteration]) -> str:
    best, rollouts = division.best, division.best.rollouts
    sentences = [f"Fastest: {_way_text(best)}, {format_seconds(best.seconds)} an iteration"]
    if best.num_versions_behind > 1:
        sentences[0] += f", on answers up to {best.num_versions_behind} updates old"
    others = [f"{_way_text(each)} takes {format_seconds(each.seconds)}" for each in bests if each is not best]
    sentences += ["; ".join(others)] if others else []
    tail = 1.0 - rollouts.p90_s / rollouts.makespan_s
    if best.way != "asynchronous" and tail > 0.3:
        sentences.append(f"The longest tenth of the answers takes {percent(tail)} of the rollouts' time")
    return ". ".join(text[0].upper() + text[1:] for text in sentences) + "."


def _way_text(each: Iteration) -> str:
    if each.way == "colocated":
        return f"in turn on all {each.rollouts.num_devices}"
    first, second = each.rollouts.num_devices, each.training.num_devices
    return f"{NAMES[each.way]} with {first} devices for rollouts and {second} for training"


def _table(division: Division, iterations: list[Iteration]) -> Table:
    price, rows = division.usd_per_hour, []
    for each in iterations:
        rollouts, training, is_endless = each.rollouts, each.training, each.way == "asynchronous"
        row = fields_of(each, "num_versions_behind", "waits") | {"iteration_s": each.seconds}
        row |= {"name": NAMES[each.way].removesuffix("-policy")}
        row |= {"first": rollouts.num_devices, "second": training.num_devices if each.way != "colocated" else None}
        row |= {"rollouts_s": rollouts.endless_s if is_endless else rollouts.makespan_s}
        row |= {"training_s": training.forward_s + training.step_s}
        rows.append(row | {"cost": None if price is None else each.seconds * price / SECONDS_PER_HOUR})
    winner = next((place for place, each in enumerate(iterations) if each is division.best), None)
    return table_of(rows, LAYOUT["columns"], right=1, notes=[LAYOUT["note"]], winner=winner)


def _facts(division: Division) -> list[tuple[str, str]]:
    batch, setup, best = division.batch, resolve(division.scenario), division.best
    job, degrees = best.training.result.setup.job, best.training.result.setup.degrees
    tokens = f"{batch.num_tokens:,} tokens, the longest {batch.longest_tokens:,}"
    trained, is_endless = best.training, best.way == "asynchronous"
    tail = "" if is_endless else f"; 90% of the answers after {format_seconds(best.rollouts.p90_s)}"
    layout = f"tp {degrees.tp}, cp {degrees.cp}, pp {degrees.pp}, dp {degrees.dp}"
    return [
        ("answers", f"{batch.num_sequences:,} with their prompts have {tokens}"),
        ("rollouts", f"{setup.engine.name}, replicas of {format_count(setup.parallelism.num_devices, 'device')}{tail}"),
        ("training", f"{job.global_batch:,} packed sequences of {job.sequence_tokens:,} tokens; {layout}"),
        ("", f"log probabilities take {format_seconds(trained.forward_s)}, the step {format_seconds(trained.step_s)}"),
        ("new weights", f"{format_seconds(best.rollouts.update_s)}, each device its shard at its link's rate"),
    ]


def division_document(division: Division) -> dict[str, Any]:
    """Document every way and division; `best` is the place of the fastest."""
    return {
        "windtunnel": version(),
        "scenario": encode(division.scenario),
        **fields_of(division, "num_devices", "usd_per_hour"),
        "batch": vars(division.batch),
        "iterations": [
            {
                **fields_of(each, "way", "seconds", "num_versions_behind", "waits"),
                "rollouts": vars(each.rollouts),
                "training": {
                    **fields_of(each.training, "num_devices", "forward_s", "step_s"),
                    "job": encode(each.training.result.setup.job),
                },
            }
            for each in division.iterations
        ],
        "best": division.iterations.index(division.best),
        "refused": {str(number): reason for number, reason in division.refused.items()},
    }
