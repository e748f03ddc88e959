"""Processes of this machine, or of a cluster, that communicate through torch.distributed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

TIMEOUT_S = 120.0
FUNCTIONS = {
    "all_reduce": ("all_reduce",),
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_to_all": ("all_to_all_single",),
}
"""Collective -> its name in torch.distributed, the name since torch 2.13 before the former one."""


def spawn(work: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int) -> str | None:
    """Run `work(rank, *arguments)` in a process per rank, and wait for all; return the reason where one died."""
    import torch.multiprocessing as processes

    try:
        processes.spawn(work, arguments, nprocs=num_ranks)
    except (processes.ProcessRaisedException, processes.ProcessExitedException) as error:
        return str(error)
    return None


@contextmanager
def process_group(backend: str, meeting: str, rank: int, num_ranks: int, device: Any = None) -> Iterator[None]:
    """Join the ranks that meet at a URL, and leave them in the end.

    NCCL would guess `device` from the rank, which is wrong where a rank sees one device alone.
    """
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    distributed.init_process_group(backend, meeting, timeout, num_ranks, rank, device_id=device)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def execute(op: str, received: Any, sent: Any, group: Any = None) -> None:
    """Execute a collective of `FUNCTIONS`; an all-reduce sends what `received` holds."""
    from torch import distributed

    function = next(getattr(distributed, name) for name in FUNCTIONS[op] if hasattr(distributed, name))
    function(*((received,) if op == "all_reduce" else (received, sent)), group=group)
