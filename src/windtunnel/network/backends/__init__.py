"""Network backends, one module each: how flows on a fabric get their times. The name is the module's.

A module defines the first of these functions. An installed one joins by an entry point in the group
`windtunnel.network_backends`.

- `run_flows(fabric, flows, settings) -> FlowTimes`: when every flow begins and completes, and what the links carry.
- `run_collective(call) -> CollectiveRun` (optional): the time of a `CollectiveCall` without flows. Such a backend
  refuses options that are for flows.
- `ring_seconds(fabric, rings, chunk_bytes, num_steps, settings) -> float | None` (optional): when the last step of a
  ring collective is complete, without all flows; None where that is not possible.
- `total_seconds(fabric, flows, settings) -> float` (optional): when all flows are complete, without the times of each.

Errors: `InputError` where the ends of a flow are not connected or the settings do not fit the fabric,
`WindtunnelError` where flows wait for each other.
"""
