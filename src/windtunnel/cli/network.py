"""`windtunnel topology`, `collective` and `network run`: networks of GPUs, one collective, SimAI's job."""

from pathlib import Path
from typing import Any

import click

from windtunnel import catalog
from windtunnel.cli.options import assignments
from windtunnel.cli.output import answer, remark, remark_node
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.files import check_replaceable, write_text
from windtunnel.formats.nccl_tests import NcclLog, read_nccl_log
from windtunnel.formats.simai.analytical import read_layers, run_simai_analytical, simai_options
from windtunnel.formats.simai.conf import read_simai_conf
from windtunnel.formats.simai.report import end_to_end_csv, flow_table_csv
from windtunnel.network import fabric as fabrics
from windtunnel.network.collectives.call import ALGORITHMS, CollectiveChoices, CollectiveRun, operation_named, size_of
from windtunnel.network.collectives.closed_forms import LAUNCH_S, chosen_gpus
from windtunnel.network.collectives.expert_parallel import TokenTraffic, run_expert_all_to_all
from windtunnel.network.collectives.run import flows_like, read_traffic, run_collective
from windtunnel.network.fabric import Fabric, assumed_kind, topology_text, without
from windtunnel.network.paths import run_flows
from windtunnel.network.settings import BACKENDS, NetworkSettings, settings_from
from windtunnel.network.topology import fabric_from, fabric_of, nodes_of
from windtunnel.report.network import network as report
from windtunnel.schema import encode
from windtunnel.training.iteration.layers import LayerWorkload, run_layers
from windtunnel.training.iteration.shared_fabric import place_jobs, run_jobs
from windtunnel.units import format_count


def network_settings(options: Options) -> NetworkSettings:
    """Return the settings of the options, over the fields of a SimAI.conf, over the defaults of `--compat`."""
    given = options.given("network_settings")
    conf, backend = given.pop("conf", None), given.get("backend", "analytic")
    _check_has_flows(backend, [name for name in ("routing", "send_latency", "seed") if name in given])
    if "send_latency" in given:
        given["send_latency_s"] = given.pop("send_latency")
    if conf is not None:
        given = {**encode(read_simai_conf(conf)), **given}
    return settings_from(given)


def _check_has_flows(backend: str, given: list[str]) -> None:
    if given and hasattr(BACKENDS.get(backend), "run_collective"):
        option = f"--{given[0].replace('_', '-')}"
        raise InputError(f"{option} is for flows; the {backend} backend has none", "give --backend flow")


def fabric_with_failures(options: Options, topology: str) -> Fabric:
    """Return the fabric of a file, a type with parameters or a node, without what has failed."""
    return without(fabric_of(topology), tuple(map(_node_pair, options.fail_links)), options.fail_nodes)


def _node_pair(text: str) -> tuple[int, int]:
    first, dash, second = text.partition("-")
    if not (dash and first.isdecimal() and second.isdecimal()):
        raise InputError(f"--fail-link: {text!r} is not two node ids, as 0-128")
    return int(first), int(second)


OF_COMMAND = ("kind", "settings", "num_leaves", "out", "overwrite")
"""Options of `generate` that are no fields of the type."""


def generate(options: Options) -> None:
    """Write a topology file, and show what it consists of."""
    given = _given({name: value for name, value in vars(options).items() if name not in OF_COMMAND})
    fabric = fabric_from({"type": options.kind or "two_tier", **given, **assignments(options.settings)}, "")
    needed = len(fabric.tier[fabric.tier == 1])
    if options.num_leaves is not None and options.num_leaves != needed:
        leaves = format_count(needed, "leaf", "leaves")
        remark(f"note: --num-leaves {options.num_leaves} does not fit; the GPUs need {leaves}")
    path = options.out or Path(fabric.name)
    check_replaceable(path, options.overwrite)
    write_text(path, topology_text(fabric))
    answer(options, report.topology_document, report.topology_report, fabric)
    remark(f"wrote {path}")


def show(options: Options) -> None:
    """Show what a topology consists of."""
    fabric = fabric_with_failures(options, options.topology)
    answer(options, report.topology_document, report.topology_report, fabric)


def check(options: Options) -> None:
    """Check counts, links, units and that every GPU reaches every other, also after failures."""
    fabric = fabric_with_failures(options, options.topology)
    fabrics.check(fabric)
    click.echo(
        f"{fabric.name}: {format_count(fabric.num_gpus, 'GPU')}, {format_count(fabric.num_links, 'link')}, "
        "every GPU reaches every other"
    )


def run(options: Options) -> None:
    """Predict a training iteration from a SimAI workload file, or those of several jobs on one network."""
    if len(options.workloads) == 1 and (options.placement or options.iterations):
        raise InputError("--placement and --iterations are for several jobs", "give --workload once for each")
    check_replaceable(options.out, options.overwrite)
    settings = network_settings(options)
    is_analytical = settings.compat == "simai" and settings.backend == "analytic"
    if (given := list(options.given("simai_analytical"))) and not is_analytical:
        option = f"--{given[0].replace('_', '-')}"
        raise InputError(f"{option} is SimAI-Analytical's", "give --compat simai, and no --backend")
    jobs = [read_layers(workload) for workload in options.workloads]
    if options.topology is not None and len(jobs) > 1:
        _share(options, jobs, settings)
        return
    if not is_analytical:
        if options.topology is None:
            hint = "a topology file, a type such as spectrum_x:num_gpus=128, or a node"
            raise InputError("--topology is missing", hint)
        fabric = fabric_with_failures(options, options.topology)
        _remark_kind(fabric, settings)
        iteration = run_layers(jobs[0], fabric, settings)
    elif options.topology is not None or options.fail_links or options.fail_nodes:
        raise InputError("SimAI-Analytical knows no topology", "leave --topology out, or --compat simai")
    else:
        iteration = run_simai_analytical(jobs[0], simai_options(options.of("simai_analytical")))
    if options.out is not None:
        write_text(options.out, end_to_end_csv(iteration, options.out.stem.removesuffix("EndToEnd")))
        remark(f"wrote {options.out}")
    answer(options, report.iteration_document, report.iteration_report, iteration)


def _remark_kind(fabric: Fabric, settings: NetworkSettings) -> None:
    if fabric.is_kind_assumed and fabric.num_servers > 1 and settings.compat != "simai":
        remark(f"note: {assumed_kind(fabric.name)}", is_noted=True)


def _share(options: Options, jobs: list[LayerWorkload], settings: NetworkSettings) -> None:
    """Run several jobs on one network and print what each loses to the others."""
    if options.out is not None:
        raise InputError("--out writes the report of one job", "leave it out; --json prints all of them")
    fabric, placement = fabric_with_failures(options, options.topology), options.placement or "packed"
    _remark_kind(fabric, settings)
    jobs_run = run_jobs(place_jobs(jobs, fabric, placement), fabric, settings, options.iterations or 10)
    answer(options, report.shared_document, report.shared_report, jobs_run, fabric, placement)


def collective(options: Options) -> None:
    """Run a collective, write its flows and print its time."""
    tokens, log = _given(options.of("token_traffic")), None
    options.op = options.op and operation_named(options.op)
    if options.measured is not None:
        log = read_nccl_log(options.measured, options.op)
        options.op = log.op
        if options.topology is None:
            _take_hosts(options, log)
        options.ranks = options.ranks or str(log.num_ranks)
    topology, chosen = _devices(options) if options.topology is None else (options.topology, options.ranks)
    fabric = fabric_with_failures(options, topology)
    ranks = chosen_ranks(chosen, fabric.num_gpus)
    if tokens:
        made = run_expert_all_to_all(fabric, _token_traffic(options, tokens), ranks)
        answer(options, report.collective_document, report.collective_report, made)
        return
    settings = network_settings(options)
    _check_has_flows(settings.backend, [name for name in ("times", "links") if getattr(options, name)])
    sizes = list(log.seconds) if log else [] if options.traffic is not None else _sizes(options.size)
    if log or len(sizes) > 1:
        if file := next((name for name, file in options.of("flow_files").items() if file), None):
            raise InputError(f"--{file} is for one size", "give one to --size")
        options.cuda_graph |= bool(log and log.is_queued and settings.compat != "simai")
        runs = [_run(options, fabric, ranks, settings, size) for size in sizes]
        answer(options, report.sizes_document, report.sizes_report, runs, log.seconds if log else {})
        return
    made = _run(options, fabric, ranks, settings, sizes[0]) if sizes else _run_traffic(options, fabric, ranks, settings)
    if any(options.of("flow_files").values()):
        _write_flow_files(options, made)
    answer(options, report.collective_document, report.collective_report, made)


MOST_OF_A_HOST = 16
"""GPUs of the largest server (DGX-2); nodes with more are racks, whose trays a log calls hosts."""


def _take_hosts(options: Options, log: NcclLog) -> None:
    """Take as many usual nodes of the log's GPU as it has hosts, and as many GPUs of each as it has ranks there."""
    options.device = options.device or log.gpu
    if not options.device:
        raise InputError(f"{options.measured} does not name its GPUs", "give --device or --topology")
    num_each = catalog.default_node(catalog.device(options.device)).num_devices
    if num_each > MOST_OF_A_HOST:
        options.num_devices = log.num_ranks
        return
    options.num_devices = log.num_hosts * num_each
    used, rest = divmod(log.num_ranks, log.num_hosts)
    if options.ranks is None and not rest and used <= num_each:
        ids = [host * num_each + gpu for host in range(log.num_hosts) for gpu in range(used)]
        options.ranks = ",".join(map(str, ids))


def _devices(options: Options) -> tuple[str, str | None]:
    """Return the topology of as many of a device's usual nodes as its devices need, and the ranks."""
    device = catalog.device(options.device)
    remark_node(device, None, "--topology")
    topology, num_devices = nodes_of(device, options.num_devices)
    if topology.startswith("torus"):
        remark("note: the devices are taken for a torus, with links that close its rings; --topology names another")
    return topology, options.ranks or str(num_devices)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a person gave, 0 among them."""
    return {name: value for name, value in values.items() if value is not None and value is not False}


def _token_traffic(options: Options, tokens: dict[str, Any]) -> TokenTraffic:
    """Return the tokens of the options; other options of what is sent and how do not go with them."""
    given = _given({**options.of("network_settings"), **options.of("algorithm"), **options.of("flow_files")})
    given |= _given({"size": options.size, "traffic": options.traffic})
    odd = [f"--{name.replace('_', '-')}" for name, value in given.items() if value != "analytic"]
    if options.op != "all_to_all":
        odd = [f"--op {options.op}", *odd]
    if odd:
        raise InputError(
            f"tokens to experts are an all-to-all in closed form; {odd[0]} does not go with them",
            "leave it out; for flows, write the bytes to a file and give --traffic",
        )
    names = {"tokens": "num_tokens", "token_type": "dtype", "experts": "num_experts", "top_k_experts": "top_k"}
    return TokenTraffic(**{names.get(name, name): value for name, value in tokens.items()})


def _sizes(text: str) -> list[int]:
    """Read `8MiB`, several sizes `1MiB,1GiB`, or those that double from the first to the last, `8..1GiB`."""
    first, dots, last = text.partition("..")
    if not dots:
        return [_size(part.strip()) for part in text.split(",")]
    size, end = (0, 0) if ".." in last else (_size(first), _size(last))
    if not 0 < size <= end:
        raise InputError(f"--size: {text!r} is not a range", "the smaller size first: 1MiB..1GiB")
    return [size << power for power in range((end // size).bit_length())]


def _size(text: str) -> int:
    try:
        return size_of(text)
    except InputError as error:
        raise InputError(error.message.replace("size_bytes", "--size", 1), error.hint) from None


def _run(
    options: Options, fabric: Fabric, ranks: int | list[int], settings: NetworkSettings, size_bytes: int
) -> CollectiveRun:
    """Run a collective whose ranks all have the same share of `size_bytes`."""
    is_closed, launch_s = hasattr(BACKENDS.get(settings.backend), "run_collective"), _launch_s(options, settings)
    if is_closed and (options.fail_links or options.fail_nodes):
        remark("note: closed forms know what fails at a GPU, not between switches; --backend flow knows both")
    choices = CollectiveChoices(
        algorithm=options.algorithm or "auto", protocol=options.protocol or "auto", pxn=options.pxn, launch_s=launch_s
    )
    return run_collective(fabric, options.op, size_bytes, ranks, settings.backend, settings, choices)


def _launch_s(options: Options, settings: NetworkSettings) -> float:
    is_simai = settings.compat == "simai"
    if is_simai and options.cuda_graph:
        raise InputError("--cuda-graph leaves out the host's launch, which SimAI has not", "leave out --compat")
    return 0.0 if is_simai or options.cuda_graph else LAUNCH_S


def _run_traffic(options: Options, fabric: Fabric, ranks: int | list[int], settings: NetworkSettings) -> CollectiveRun:
    """Run an all-to-all in which every pair of ranks has its own share, from the file of `--traffic`."""
    if options.op != "all_to_all":
        raise InputError(f"--traffic is an all-to-all's; it does not go with --op {options.op}")
    matrix = read_traffic(options.traffic, len(chosen_gpus(fabric, ranks)))
    most_bytes = int((matrix.sum(axis=1) - matrix.diagonal()).max())
    choices = CollectiveChoices(options.algorithm or "auto", launch_s=_launch_s(options, settings))
    return run_collective(fabric, "all_to_all", most_bytes, ranks, settings.backend, settings, choices, matrix)


def _write_flow_files(options: Options, done: CollectiveRun) -> None:
    """Write the flows of the run; their times and links need one more simulation."""
    table, algorithm = flows_like(done)
    if not ALGORITHMS.get(done.algorithm).OPERATIONS:
        remark(f"note: {done.algorithm} has only a closed form; the flows are those of {algorithm}")
    if options.flows is not None:
        lines = flow_table_csv(table, done.call.op, done.call.size_bytes, algorithm)
        write_text(options.flows, "".join(f"{line}\n" for line in lines))
        remark(f"wrote {options.flows}: {format_count(len(table), 'flow')}")
    files = [file for file in (options.times, options.links) if file is not None]
    if not files:
        return
    fabric, settings = done.call.fabric, done.call.settings
    flow_times = run_flows(fabric, table, settings)
    if options.times is not None:
        report.write_flow_times(table, flow_times, options.times)
    if options.links is not None:
        report.write_link_use(fabric, flow_times, options.links)
    remark(f"wrote {', '.join(map(str, files))}")


def chosen_ranks(text: str | None, num_gpus: int) -> int | list[int]:
    """Read `8` as a number of ranks, `0,8,16` as their ids."""
    if text is None:
        return num_gpus
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--ranks: {text!r} is neither a number of GPUs nor their ids", "as 16, or 0,8,16,24")
    return int(text) if len(parts) == 1 else [int(part) for part in parts]
