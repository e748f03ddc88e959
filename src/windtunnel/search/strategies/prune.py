"""The strategy that tries every point, and drops one that another of its family beats: they differ in bounds only."""

from windtunnel.search.asker import Asker
from windtunnel.search.evaluation.schema import Evaluation, Question
from windtunnel.search.scores import ranked

IS_EXHAUSTIVE = True
NUM_WHOLE = 5
"""Best families whose dropped points are evaluated after all, so that they tell what each bound is worth."""


def evaluate(asker: Asker, workload: str | None) -> dict[int, Evaluation]:
    """Evaluate the points of each family in order: after the first, one run at the load that would make a point the
    best of its family drops most of them."""
    families = [asker.evaluator.family(index) for index in range(asker.space.num_points)]
    question = Question(drops=len(set(families)) > NUM_WHOLE)
    answers, best = asker.ask(workload, range(asker.space.num_points), question), dict[bytes, int]()
    for index in ranked(answers, asker.space.objective):
        best.setdefault(families[index], index)
    loads = {family: answers[index].load for family, index in list(best.items())[:NUM_WHOLE]}
    dropped = [index for index, answer in answers.items() if answer.beaten_by]
    near = {index: loads[families[index]] for index in dropped if families[index] in loads}
    return answers | asker.ask(workload, sorted(near), Question(), near)
