"""`windtunnel collective`: one collective on a fabric."""

from windtunnel.cli.network.options import fabric_with_failures, network_settings
from windtunnel.cli.output import answer, remark
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.files import write_text
from windtunnel.formats.simai.report import flow_table_csv
from windtunnel.network.collectives.call import ALGORITHMS, CollectiveChoices, CollectiveRun
from windtunnel.network.collectives.closed_forms import LAUNCH_S
from windtunnel.network.collectives.placement import chosen_gpus
from windtunnel.network.collectives.run import flows_like, read_traffic, run_collective
from windtunnel.network.fabric import Fabric
from windtunnel.network.flows import Flows
from windtunnel.network.paths import run_flows
from windtunnel.network.settings import BACKENDS, NetworkSettings
from windtunnel.report.network.network import (
    collective_document,
    collective_report,
    write_flow_times,
    write_link_use,
    write_queues,
)
from windtunnel.units import format_count, parse_quantity


def command(options: Options) -> None:
    """Run a collective, write its flows and print its time."""
    if options.op is None or options.topology is None or (options.size is None and options.traffic is None):
        required = (("op", options.op), ("topology", options.topology), ("size", None))
        missing = next(name for name, value in required if value is None)
        raise InputError(f"--{missing} is missing", "see `windtunnel collective --help`")
    fabric = fabric_with_failures(options, options.topology)
    settings = network_settings(options)
    _check_files(options, settings)
    ranks = chosen_ranks(options.ranks, fabric.num_gpus)
    run = (_run if options.traffic is None else _run_traffic)(options, fabric, ranks, settings)
    if any(options.of("flow_files").values()):
        _write_flow_files(options, fabric, ranks, run, settings)
    answer(options.as_json, lambda: collective_document(run), lambda: collective_report(run, fabric))


def _check_files(options: Options, settings: NetworkSettings) -> None:
    """Refuse files that the backend has nothing for.

    Raises:
        InputError: there are no flows, or no packets that queue.
    """
    backend = BACKENDS.get(settings.backend)
    name = next((name for name in ("times", "links", "queues") if getattr(options, name)), None)
    if hasattr(backend, "run_collective") and name is not None:
        raise InputError(f"--{name} is for flows; the {settings.backend} backend has none", "give --backend flow")
    if not hasattr(backend, "trace_queues") and options.queues is not None:
        raise InputError("--queues is for packets; flows do not queue", "give --backend packet")


def _run(options: Options, fabric: Fabric, ranks: int | list[int], settings: NetworkSettings) -> CollectiveRun:
    """Run a collective whose ranks all have the same share of `--size`."""
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


def _run_traffic(options: Options, fabric: Fabric, ranks: int | list[int], settings: NetworkSettings) -> CollectiveRun:
    """Run an all-to-all in which every pair of ranks has its own share, from the file of `--traffic`."""
    excluded = ("size", "pxn", "protocol", "cuda_graph", "flows", "times", "links", "queues")
    odd = [f"--{name.replace('_', '-')}" for name in excluded if getattr(options, name)]
    odd += [f"--op {options.op}"] if options.op.lower() != "all_to_all" else []
    if odd:
        raise InputError(f"--traffic is an all-to-all's; it does not go with {odd[0]}")
    matrix = read_traffic(options.traffic, len(chosen_gpus(fabric, ranks)))
    most_bytes = int((matrix.sum(axis=1) - matrix.diagonal()).max())
    choices = CollectiveChoices(options.algorithm or "auto")
    return run_collective(fabric, "all_to_all", most_bytes, ranks, settings.backend, settings, choices, matrix)


def _whole_bytes(size: str) -> int:
    num_bytes = parse_quantity("size_bytes", size)
    if num_bytes != int(num_bytes):
        raise InputError(f"--size: {size!r} is not a whole number of bytes")
    return int(num_bytes)


def _write_flow_files(
    options: Options, fabric: Fabric, ranks: int | list[int], run: CollectiveRun, settings: NetworkSettings
) -> None:
    """Write the flows of the run; their times, links and queues need one more simulation."""
    table, algorithm = flows_like(fabric, run, ranks, settings, options.pxn)
    if not ALGORITHMS.get(run.algorithm).OPERATIONS:
        remark(f"note: {run.algorithm} has only a closed form; the flows are those of {algorithm}")
    if options.flows is not None:
        lines = flow_table_csv(table, run.op, run.size_bytes, algorithm)
        write_text(options.flows, "".join(f"{line}\n" for line in lines))
        remark(f"wrote {options.flows}: {format_count(len(table), 'flow')}")
    if any((options.times, options.links, options.queues)):
        _write_simulated_flows(options, fabric, table, settings)


def _write_simulated_flows(options: Options, fabric: Fabric, table: Flows, settings: NetworkSettings) -> None:
    """Run every flow of `table`, and write their times, the use of links, and queues."""
    flow_times = run_flows(fabric, table, settings)
    files = [file for file in (options.times, options.links, options.queues) if file is not None]
    if options.times is not None:
        write_flow_times(table, flow_times, options.times)
    if options.links is not None:
        write_link_use(fabric, flow_times, options.links)
    if options.queues is not None:
        queues = BACKENDS.get(settings.backend).trace_queues(fabric, table, settings, flow_times)
        write_queues(fabric, queues, options.queues)
    remark(f"wrote {', '.join(map(str, files))}")


def chosen_ranks(text: str | None, num_gpus: int) -> int | list[int]:
    """Read `8` as a number of ranks, `0,8,16` as their ids."""
    if text is None:
        return num_gpus
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--ranks: {text!r} is neither a number of GPUs nor their ids", "as 16, or 0,8,16,24")
    return int(text) if len(parts) == 1 else [int(part) for part in parts]
