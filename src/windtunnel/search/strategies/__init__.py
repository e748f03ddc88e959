"""Search strategies, a module each: which points of a space are evaluated, in which order.

A strategy defines `evaluate(asker, workload)`, which returns the evaluations by point, and `IS_EXHAUSTIVE`: whether
these are of all points, each with all requests. `asker.ask(workload, points, Question())` evaluates the points of these
numbers, below `asker.space.num_points`, as `exhaustive.py` does. An installed package adds its own with an entry point
in the group `windtunnel.strategies`.
"""
