"""Find the deployment of Llama-3.1-8B that serves most requests per dollar with a TTFT below one second.

The search finds the greatest load that each point of a small space sustains, and says why a point is impossible.
"""

from windtunnel.search.answers import worths
from windtunnel.search.fleets import FleetSimulator, fleets
from windtunnel.search.space.space import space_from
from windtunnel.search.store import Store
from windtunnel.search.study import search

space = space_from(
    {
        "model": "meta-llama/Llama-3.1-8B",
        "deployment": {"device": "h100_sxm"},
        "workload": {
            "arrivals": {"type": "poisson", "rate_per_s": 1},
            "input_tokens": {"type": "uniform", "min_tokens": 200, "max_tokens": 1800},
            "output_tokens": {"type": "uniform", "min_tokens": 20, "max_tokens": 200},
            "num_requests": 600,
        },
        "vary": {
            "device": ["h100_sxm", "l40s", "l4"],
            "tp": [1, 2, 3],
            "quant": ["bf16", "fp8"],
            "max_num_batched_tokens": [512, 8192],
        },
        "limits": {"ttft_p90": "1s", "tpot_p99": "50ms"},
        "finalist_seeds": 3,
    }
)
study = search(space, Store(None, print))
found = study.outcomes[0]

print("the best three")
for index in found.ranking[:3]:
    one = found.evaluations[index]
    print(f"  {study.point(index).title}: {one.load:.1f}/s, {one.figures['requests_per_usd']:,.0f} requests/$")

print("best deployment with each value, relative to the best of all")
for name, values in worths(space, found).items():
    print(f"  {name}: {', '.join(f'{value} {worth.share:.0%}' for value, worth in values.items())}")

counted = fleets(found, load=200.0, limit=1)[0]
cheapest = FleetSimulator(study, found, load=200.0).fewest(counted)  # together behind one router
print(f"200 requests/s: {cheapest.copies} x {study.point(cheapest.index).title}, ${cheapest.usd_per_hour:,.2f}/h")

for reason, points in found.refusals.items():
    print(f"{len(points)} points are impossible: {reason}")
