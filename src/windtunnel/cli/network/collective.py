"""`windtunnel collective`: one collective on a fabric."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from windtunnel.cli.network.options import Failures, NetworkOptions
from windtunnel.cli.options import Verb, options_in, options_of
from windtunnel.cli.output import answer, remark
from windtunnel.errors import InputError
from windtunnel.units import format_count

if TYPE_CHECKING:
    from windtunnel.network.collectives.call import CollectiveRun
    from windtunnel.network.fabric import Fabric
    from windtunnel.network.flows import Flows
    from windtunnel.network.settings import NetworkSettings


class FlowFiles(NamedTuple):
    """Files that describe a collective flow by flow."""

    flows: Path | None
    times: Path | None
    links: Path | None
    queues: Path | None

    def check(self, settings: "NetworkSettings") -> None:
        """Refuse files that the backend has nothing for.

        Raises:
            InputError: there are no flows, or no packets that queue.
        """
        from windtunnel.network.settings import BACKENDS

        backend = BACKENDS.get(settings.backend)
        simulated = {"--times": self.times, "--links": self.links, "--queues": self.queues}
        name = next((name for name, file in simulated.items() if file), None)
        if hasattr(backend, "run_collective") and name is not None:
            raise InputError(f"{name} is for flows; the {settings.backend} backend has none", "give --backend flow")
        if not hasattr(backend, "trace_queues") and self.queues is not None:
            raise InputError("--queues is for packets; flows do not queue", "give --backend packet")


class CollectiveOptions(NamedTuple):
    """Options of `windtunnel collective`."""

    op: str | None
    size: str | None
    traffic: Path | None
    topology: str | None
    ranks: str | None
    network: NetworkOptions
    algorithm: str | None
    protocol: str | None
    pxn: bool
    cuda_graph: bool
    failures: Failures
    files: FlowFiles


@click.command(cls=Verb)
@options_of(CollectiveOptions)
@options_in("json")
def command(options: CollectiveOptions, as_json: bool) -> None:
    """Predict the time and bandwidth of one collective.

    \b
    windtunnel collective --op all_reduce --size 1GiB --topology dgx_h100
    windtunnel collective --op all_to_all --size 64MiB --topology nvl:num_gpus=144 --backend flow
    windtunnel collective --op all_reduce --size 4MiB --topology spectrum_x:num_gpus=16 \\
        --compat simai --backend flow --flows flows.csv
    """
    if options.op is None or options.topology is None or (options.size is None and options.traffic is None):
        required = (("op", options.op), ("topology", options.topology), ("size", None))
        missing = next(name for name, value in required if value is None)
        raise InputError(f"--{missing} is missing", "see `windtunnel collective --help`")
    fabric = options.failures.fabric(options.topology)
    settings = options.network.settings()
    options.files.check(settings)
    ranks = chosen_ranks(options.ranks, fabric.num_gpus)
    run = (_run if options.traffic is None else _run_traffic)(options, fabric, ranks, settings)
    if any(options.files):
        _write_flow_files(options, fabric, ranks, run, settings)

    from windtunnel.report.network.network import collective_document, collective_report

    answer(as_json, lambda: collective_document(run), lambda: collective_report(run, fabric))


def _run(
    options: CollectiveOptions, fabric: "Fabric", ranks: int | list[int], settings: "NetworkSettings"
) -> "CollectiveRun":
    """Run a collective whose ranks all have the same share of `--size`."""
    from windtunnel.network.collectives.call import CollectiveChoices
    from windtunnel.network.collectives.closed_forms import LAUNCH_S
    from windtunnel.network.collectives.run import run_collective
    from windtunnel.network.settings import BACKENDS

    assert options.op is not None
    assert options.size is not None
    has_launch = hasattr(BACKENDS.get(settings.backend), "run_collective")
    if options.cuda_graph and not has_launch:
        raise InputError("--cuda-graph leaves out the host's launch, which only the analytic backend has")
    choices = CollectiveChoices(
        algorithm=options.algorithm or "auto",
        protocol=options.protocol or "auto",
        pxn=options.pxn,
        launch_s=LAUNCH_S if has_launch and not options.cuda_graph else 0.0,
    )
    op, size_bytes = options.op.lower(), _whole_bytes(options.size)
    return run_collective(fabric, op, size_bytes, ranks, settings.backend, settings, choices)


def _run_traffic(
    options: CollectiveOptions, fabric: "Fabric", ranks: int | list[int], settings: "NetworkSettings"
) -> "CollectiveRun":
    """Run an all-to-all in which every pair of ranks has its own share, from the file of `--traffic`."""
    from windtunnel.network.collectives.placement import chosen_gpus
    from windtunnel.network.collectives.run import read_traffic, run_traffic

    assert options.op is not None
    assert options.traffic is not None
    excluded = ("size", "pxn", "protocol", "cuda_graph")
    given = [name for name in excluded if getattr(options, name)]
    given += [name for name, file in options.files._asdict().items() if file]
    odd = [f"--{name.replace('_', '-')}" for name in given] + [f"--op {options.op}"] * (
        options.op.lower() != "all_to_all"
    )
    if odd:
        raise InputError(f"--traffic is an all-to-all's; it does not go with {odd[0]}")
    matrix = read_traffic(options.traffic, len(chosen_gpus(fabric, ranks)))
    return run_traffic(fabric, matrix, ranks, settings.backend, settings, options.algorithm or "auto")


def _whole_bytes(size: str) -> int:
    from windtunnel.units import parse_quantity

    num_bytes = parse_quantity("size_bytes", size)
    if num_bytes != int(num_bytes):
        raise InputError(f"--size: {size!r} is not a whole number of bytes")
    return int(num_bytes)


def _write_flow_files(
    options: CollectiveOptions,
    fabric: "Fabric",
    ranks: int | list[int],
    run: "CollectiveRun",
    settings: "NetworkSettings",
) -> None:
    """Write the flows of the run; their times, links and queues need one more simulation."""
    from windtunnel.formats.simai.report import write_flow_table
    from windtunnel.network.collectives.call import ALGORITHMS
    from windtunnel.network.collectives.run import flows_like

    files = options.files
    table, algorithm = flows_like(fabric, run, ranks, settings, options.pxn)
    if not ALGORITHMS.get(run.algorithm).OPERATIONS:
        remark(f"note: {run.algorithm} has only a closed form; the flows are those of {algorithm}")
    if files.flows is not None:
        write_flow_table(table, run.op, run.size_bytes, algorithm, files.flows)
        remark(f"wrote {files.flows}: {format_count(len(table), 'flow')}")
    if any((files.times, files.links, files.queues)):
        _write_simulated_flows(fabric, table, settings, files)


def _write_simulated_flows(fabric: "Fabric", table: "Flows", settings: "NetworkSettings", files: FlowFiles) -> None:
    """Run every flow of `table`, and write their times, the use of links, and queues."""
    from windtunnel.network.paths import run_flows
    from windtunnel.network.settings import BACKENDS
    from windtunnel.report.network.files import write_flow_times, write_link_use, write_queues

    flow_times = run_flows(fabric, table, settings)
    if files.times is not None:
        write_flow_times(table, flow_times, files.times)
    if files.links is not None:
        write_link_use(fabric, flow_times, files.links)
    if files.queues is not None:
        queues = BACKENDS.get(settings.backend).trace_queues(fabric, table, settings, flow_times)
        write_queues(fabric, queues, files.queues)
    remark(f"wrote {', '.join(str(file) for file in (files.times, files.links, files.queues) if file is not None)}")


def chosen_ranks(text: str | None, num_gpus: int) -> int | list[int]:
    """Read `8` as a number of ranks, `0,8,16` as their ids."""
    if text is None:
        return num_gpus
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--ranks: {text!r} is neither a number of GPUs nor their ids", "as 16, or 0,8,16,24")
    return int(text) if len(parts) == 1 else [int(part) for part in parts]
