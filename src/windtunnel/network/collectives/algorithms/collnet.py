"""All-reduce in the switches between servers (SHARP, NCCL's CollNet), in closed form."""

from windtunnel.network.collectives.call import bus_factor
from windtunnel.network.collectives.closed_forms import ClosedForm, Latency

OPERATIONS = ()
CLOSED_FORM = ClosedForm(
    latencies={"simple": Latency(0.0, 3.7, 31.0)},
    applies=lambda op, ranks: op == "all_reduce" and ranks.num_servers > 1,
    steps_us=lambda _op, _ranks, near, far: 2 * near + far,
    # The switches add: a byte leaves a server once, not 2 (n - 1) / n times.
    network_gain=lambda ranks: bus_factor("all_reduce", ranks.num_ranks),
    on_request=True,
)
