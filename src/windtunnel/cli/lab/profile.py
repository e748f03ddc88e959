"""`windtunnel profile`: measure operators, collectives and overheads of this machine, and check the measurements."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from windtunnel.cli.lab.capture import to_table
from windtunnel.cli.options import PATH, Verb, VerbGroup, options_in, options_of, quantity
from windtunnel.cli.output import answer, remark
from windtunnel.cli.progress import status
from windtunnel.errors import InputError, check_known
from windtunnel.units import format_count

if TYPE_CHECKING:
    from windtunnel.lab.profile.compute import Extent, Progress
    from windtunnel.pricing.table import MeasurementTable


@click.group(cls=VerbGroup, no_args_is_help=False, invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Measure operators, collectives and host overheads, for predictions of this machine."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


class ComputeOptions(NamedTuple):
    """Options of `windtunnel profile compute`: which kernels are measured, over which batches, and how exactly."""

    tp: str
    quant: str | None
    engine: str
    torch_device: str | None
    max_batch: int
    max_context: int
    max_tokens: int
    budget: str | None
    tolerance: float
    clock: str | None
    attention: str
    overwrite: bool

    def extent(self) -> "Extent":
        """Return the largest steps to measure."""
        from windtunnel.lab.profile.compute import Extent

        limits = (("--max-batch", self.max_batch, 1), ("--max-context", self.max_context, 16))
        for name, value, least in (*limits, ("--max-tokens", self.max_tokens, 4)):
            if value < least:
                raise InputError(f"{name} is {value}; at least {least} is needed")
        return Extent(self.max_batch, self.max_context, self.max_tokens)


@command.command(cls=Verb, short_help="Measure a model's operators in a real forward.")
@options_in("profile_compute", "device_name")
@options_of(ComputeOptions)
@options_in("profile_folder", "json")
def compute(options: ComputeOptions, model: str, device_name: str, out: Path, as_json: bool) -> None:
    """Measure a model's operators inside a real forward: GEMMs, attention, norms, experts and the rest.

    Every split is measured on one device. What an interrupted run measured is kept, and the same command goes on.

    \b
    windtunnel profile compute --model config.json --device-name my_cpu --tp 1,2 --budget 10min --out profiles/my_cpu
    windtunnel simulate --model config.json --device profiles/my_cpu/device.yaml --profile profiles/my_cpu ...
    """
    from windtunnel import catalog
    from windtunnel.lab.profile.compute import TimeBudget
    from windtunnel.lab.profile.run import ENGINES, ComputePlan, parse_degrees, profile_compute
    from windtunnel.model.precision import Precision
    from windtunnel.report.lab.profile import compute_document, compute_report

    spec = catalog.model(model)
    precision = spec.precision
    if options.quant:
        precision = Precision(weights=_format(options.quant), lm_head=_format(options.quant))
    kernels = ENGINES.get(options.engine)
    plan = ComputePlan(
        tp=parse_degrees(options.tp),
        engine=options.engine,
        config=catalog.model_config(model) if kernels is not None and kernels.needs_config else None,
        torch_device=options.torch_device,
        clock=options.clock,
        attention=options.attention,
        extent=options.extent(),
        budget=TimeBudget(
            None if options.budget is None else quantity("--budget", "budget_s", options.budget), options.tolerance
        ),
        overwrite=options.overwrite,
    )
    with _progress() as notify:
        profile = profile_compute(spec, precision, device_name, out, plan, notify)
    remark(f"wrote {out}")
    answer(as_json, compute_document, compute_report, profile)


class TimedCollectives(NamedTuple):
    """Options of `windtunnel profile collectives`: which collectives are timed, and between which processes."""

    ops: str
    num_workers: str
    sizes: str
    backend: str | None
    on_ray: bool
    workers_per_node: int


@command.command(cls=Verb, short_help="Time collectives between real processes.")
@options_in("device_name")
@options_of(TimedCollectives)
@options_in("profile_folder", "json")
def collectives(options: TimedCollectives, device_name: str, out: Path, as_json: bool) -> None:
    """Time collectives between real processes, with the sizes and bus bandwidths of nccl-tests.

    \b
    windtunnel profile collectives --device-name my_cpu --num-workers 1,2,4 --out profiles/my_cpu
    """
    from windtunnel.lab.profile import collectives as lab
    from windtunnel.lab.profile.run import parse_degrees, write_collectives
    from windtunnel.report.lab.profile import collectives_document, collectives_report

    plan = lab.CollectivesPlan(
        tuple(name.strip() for name in options.ops.split(",")),
        parse_degrees(options.num_workers),
        lab.sizes_between(*_sizes(options.sizes)),
        options.backend or lab.usual_backend(),
        options.workers_per_node,
    )
    with status() as notify:
        timed = (lab.time_collectives_on_ray if options.on_ray else lab.time_collectives)(plan, notify)
    write_collectives(out, device_name, plan, timed)
    remark(f"wrote {out / 'collective.parquet'}")
    answer(as_json, collectives_document, collectives_report, timed)


@command.command(cls=Verb, short_help="Measure the host's share of an engine's steps.")
@options_in("profile_overheads", "profile_folder", "json")
def overheads(model: str, device_name: str, engine: str, batches: str, out: Path, as_json: bool) -> None:
    """Measure the host's work in a real engine's steps, outside the forward, by batch size.

    Writes calibration.yaml, which `--calibration` takes, and Vidur's table of CPU overheads beside it.

    \b
    windtunnel profile overheads --engine vllm --model config.json --device-name my_cpu --out profiles/my_cpu
    """
    from windtunnel import catalog
    from windtunnel.lab.profile.overheads import fit_overheads, medians_by_batch
    from windtunnel.lab.profile.run import parse_degrees, profile_overheads
    from windtunnel.report.lab.profile import overheads_document, overheads_report

    samples = profile_overheads(
        catalog.model(model), catalog.model_config(model), engine, device_name, out, parse_degrees(batches)
    )
    remark(f"wrote {out}")
    answer(as_json, overheads_document, overheads_report, fit_overheads(samples), medians_by_batch(samples))


@command.command(cls=Verb, short_help="Show each estimator's error on points left out.")
@click.argument("folder", type=PATH, metavar="FOLDER")
@options_in("profile_check", "json")
def check(folder: Path, device: str | None, estimators: str | None, as_json: bool) -> None:
    """Show how far each estimator is off on points of a profile that it was not shown.

    \b
    windtunnel profile check profiles/my_cpu
    """
    from windtunnel import catalog
    from windtunnel.pricing.profile import profile_provenance, tables_by_words
    from windtunnel.pricing.regress import check_methods, scores
    from windtunnel.pricing.roofline import Roofline
    from windtunnel.report.lab.profile import check_document, check_report

    methods = check_methods(estimators.split(",") if estimators else None)
    about = profile_provenance(folder)
    device_file = folder / "device.yaml"
    priced = catalog.device(device or (str(device_file) if device_file.is_file() else about["device"]))
    roofline = Roofline(priced, catalog.default_node(priced))
    checked = {words: (table, scores(table, roofline, methods)) for words, table in tables_by_words(folder).items()}
    answer(as_json, check_document, check_report, about, checked)


command.add_command(to_table, "from-trace")


@command.command("from-vidur", cls=Verb, short_help="Take Vidur's CSV files as a profile.")
@click.argument("files", type=PATH, metavar="FILE.csv...", nargs=-1, required=True)
@options_in("device_name", "profile_folder", "json")
def from_vidur(files: tuple[Path, ...], device_name: str, out: Path, as_json: bool) -> None:
    """Take Vidur's mlp.csv, attention.csv, all_reduce.csv and send_recv.csv as a profile.

    \b
    windtunnel profile from-vidur data/profiling/compute/a100/meta-llama/Llama-2-70b-hf/*.csv \\
        data/profiling/network/a100_dgx/*.csv --device-name a100_sxm --out profiles/a100
    """
    from windtunnel.formats.vidur.profiles import operator_tables
    from windtunnel.pricing.table import merged

    tables = merged([table for file in files for table in operator_tables(file, device_name)])
    _write_tables(tables, {"device": device_name, "method": "Vidur's profilers"}, out, as_json)


@command.command("to-vidur", cls=Verb, short_help="Write a profile in Vidur's layout.")
@click.argument("folder", type=PATH, metavar="FOLDER")
@options_in("profile_to_vidur")
def to_vidur(folder: Path, model: str, block_size: int, out: Path) -> None:
    """Write a profile in Vidur's layout: compute/DEVICE/ORGANISATION/MODEL/{mlp,attention}.csv and network/.

    \b
    windtunnel profile to-vidur profiles/my_cpu --model config.json --out data/profiling
    """
    from windtunnel import catalog
    from windtunnel.lab.profile.run import write_vidur

    for path in write_vidur(folder, catalog.model(model), block_size, out):
        click.echo(path)


def _write_tables(tables: "list[MeasurementTable]", about: dict[str, str], out: Path, as_json: bool) -> None:
    """Write the tables of another tool as a profile, and show them."""
    from windtunnel.pricing.profile import write_profile
    from windtunnel.report.lab.profile import tables_document, tables_report

    write_profile(out, tables, about)
    remark(f"wrote {out}")
    answer(as_json, tables_document, tables_report, tables)


def _format(text: str) -> Any:
    from windtunnel.model.precision import Format

    check_known(text, Format, f"--quant: there is no format {text!r}", ", ".join(Format))
    return Format(text)


def _sizes(text: str) -> tuple[int, int]:
    smallest, dash, largest = text.partition("-")
    if not dash:
        raise InputError(f"--sizes: {text!r} is not a range", "for instance 1KiB-8MiB")
    low, high = (int(quantity("--sizes", "message_bytes", part)) for part in (smallest, largest))
    return low, high


@contextmanager
def _progress() -> Iterator[Any]:
    """Yield a callback that shows progress and the time left."""
    from windtunnel.report.numbers import duration

    with status() as say:

        def show(tp: int, done: "Progress") -> None:
            left = "" if done.left_s is None else f", {duration(done.left_s)} left"
            worst = "coarse grid" if done.expected_error >= 1 else f"refining, at most {done.expected_error:.0%} off"
            say(f"tp {tp}: {format_count(done.num_steps, 'step')}, {worst}{left}")

        yield show
