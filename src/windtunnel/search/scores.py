"""Objectives of a search, the score of a point in one of them, and the points that deserve a closer look."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from windtunnel.schema import read_yaml
from windtunnel.search.confidence import lower_bound
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.space.space import Space, point_at

_NAMES: Mapping[str, Sequence[str]] = read_yaml(Path(__file__).with_suffix(".yaml"))
OBJECTIVES = (*_NAMES["more_is_better"], *_NAMES["less_is_better"])


def objectives_of(space: Space) -> tuple[str, ...]:
    """Return the names of the objectives that a space can be searched for."""
    return (*_NAMES["more_of_jobs"], *_NAMES["less_of_jobs"]) if space.is_training else OBJECTIVES


def is_more_better(objective: str) -> bool:
    """Whether a greater value of an objective is better."""
    return objective in _NAMES["more_is_better"] or objective in _NAMES["more_of_jobs"]


def score(evaluation: Evaluation, objective: str) -> float:
    """Return the score that a search maximises; -inf for a point that does not hold the limits or lacks the figure."""
    value = evaluation.figures.get(objective)
    if value is None or not evaluation.holds:
        return -math.inf
    return value if is_more_better(objective) else -value


def ranked(evaluations: Mapping[int, Evaluation], objective: str) -> list[int]:
    """Return the points that hold the limits, best first; of equal ones the first."""
    scores = {index: score(evaluation, objective) for index, evaluation in evaluations.items()}
    return sorted((index for index in scores if scores[index] > -math.inf), key=lambda index: (-scores[index], index))


def sure_score(evaluations: Sequence[Evaluation], objective: str) -> float:
    """Return the lower bound of a score over streams of requests; for a single stream the score itself."""
    scores = [score(evaluation, objective) for evaluation in evaluations]
    if not all(map(math.isfinite, scores)):
        return -math.inf
    bound = lower_bound(scores)
    return scores[0] if bound is None else bound


FRONTIER = ("requests_per_usd", "output_tokens_per_s_per_user")
FRONTIER_WITHOUT_PRICES = ("output_tokens_per_s_per_device", "output_tokens_per_s_per_user")
FRONTIER_OF_JOBS = ("tokens_per_s_per_device", "memory_fraction")
FRONTIER_OVER_DEVICES = ("tokens_per_s_per_device", "step_s")
"""Frontier of jobs with different numbers of devices: more of them make a step shorter and each of them worth less."""


def frontier_names(space: Space, holding: Sequence[Evaluation]) -> tuple[str, str]:
    """Return the two objectives of a space's frontier; `holding` are answers of its points that hold the limits."""
    if space.is_training:
        counts = {answer.figures["devices"] for answer in holding}
        return FRONTIER_OVER_DEVICES if len(counts) > 1 else FRONTIER_OF_JOBS
    priced = any("requests_per_usd" in answer.figures for answer in holding)
    return FRONTIER if priced else FRONTIER_WITHOUT_PRICES


def undominated(scores: Mapping[int, Sequence[float]]) -> list[int]:
    """Return the points that no other beats in all scores, best in the first score first; of equals the first.

    A point without one of the figures, whose score is infinite, is not on it.
    """
    known = {index: values for index, values in scores.items() if all(map(math.isfinite, values))}
    kept: list[int] = []
    for index in sorted(known, key=lambda index: (*(-value for value in known[index]), index)):
        if not any(all(a >= b for a, b in zip(known[other], known[index], strict=True)) for other in kept):
            kept.append(index)
    return kept


def best_by_value(space: Space, scores: Mapping[int, float]) -> dict[str, dict[str, int]]:
    """Name in `vary` -> value -> its best point, of equal points the first; for names with several values, and values
    that some point has.
    """
    by_name: dict[str, dict[str, int]] = {name: {} for name, values in space.vary.items() if len(values) > 1}
    for index in sorted(scores):
        choice = point_at(space, index).choice
        for name, best in by_name.items():
            other = best.setdefault(label_of(choice[name]), index)
            if scores[index] > scores[other]:
                best[label_of(choice[name])] = index
    return by_name


def most_promising(space: Space, evaluations: Mapping[int, Evaluation]) -> list[int]:
    """Return the points that hold the limits and are on the frontier, or are the best with some value of a setting."""
    holding = {index: answer for index, answer in evaluations.items() if answer.holds}
    names = frontier_names(space, list(holding.values()))
    scores = {index: tuple(score(answer, name) for name in names) for index, answer in holding.items()}
    sought = {index: score(answer, space.objective) for index, answer in holding.items()}
    by_value = [index for best in best_by_value(space, sought).values() for index in best.values()]
    return list(dict.fromkeys([*undominated(scores), *by_value]))


def label_of(value: object) -> str:
    """Format a value of `vary` as a label."""
    if isinstance(value, str):
        return value
    return "default" if value is None else msgspec.json.encode(value).decode()
