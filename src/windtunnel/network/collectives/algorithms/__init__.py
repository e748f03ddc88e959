"""Collective algorithms, one module each; its name is the algorithm's.

A module defines what it can do; an installed one joins by an entry point in the group `windtunnel.collectives`:

- `OPERATIONS`: names of the operations whose flows it lays out; empty where it has only a closed form.
- `flows(call) -> Flows`: the point-to-point flows (`network/flows.py`) of a `CollectiveCall` (`collectives/call.py`).
  Raises InputError where its ranks cannot use the algorithm.
- `CLOSED_FORM` (optional): the `ClosedForm` by which NCCL chooses, and which the analytic backend times.
- `seconds(calls, backend) -> float | None` (optional): when all of some calls that run at once are complete, where the
  backend can tell without all flows; None where it cannot.
- `AT_LINK_RATE` (optional): whether its flows take the whole rate of links inside a server, not what rings reach.
- `NCCL_CODE` (optional): the number in SimCCL's flow tables, `NCCL_ALGO_*` of NCCL.

The flows of `compat: simai` are those of SimAI 1.6's `MockNcclGroup.cc`, which mocks NCCL 2.20; the tables that both
write are equal. Other layouts differ where NCCL does: rings enter and leave a server on the same rail.
"""
