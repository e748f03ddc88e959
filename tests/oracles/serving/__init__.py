"""The serving loop again, in plain Python: one object a request, one pass over all of them a step. The oracle.

It says what the compiled loop must do, in the order in which the engines' sources say it, and is a hundred times
slower. It imports none of the kernels; settings, costs, plans and tiers are those of `serving.state` by shape.
`deployment.py` has the events; the other modules what happens at them.
"""
